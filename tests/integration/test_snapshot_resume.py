"""Killed without warning, a training goes on from the snapshots in shared memory, bit for bit.

The example's Llama on two ranks, with dropout, a shuffled stock `DataLoader`, a validation in the middle. First there
is no checkpoint on storage at all, then an older one.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from lightning_resilience import newest_checkpoint
from lightning_resilience.checkpoint.manifest import read_manifest
from lightning_resilience.checkpoint.storage import place_for
from tests.integration.ranks import Job, Stem
from tests.integration.test_resume import TRAIN, events, kill_after, losses, tensors

STEPS, CHECKPOINT_AT, FIRST_KILL, SECOND_KILL, VALIDATE = 40, 20, 9, 28, 15


def arguments(folder: Path, *more: str) -> list[str]:
    values = {
        "--accelerator": "cpu",
        "--devices": 2,
        "--size": "tiny",
        "--batch-size": 2,
        "--seq-len": 32,
        "--limit-mb": 0.25,
        "--steps": STEPS,
        "--validate-every": VALIDATE,
        "--checkpoint-every": CHECKPOINT_AT,
        "--checkpoint-dir": folder,
    }
    return [*(str(part) for pair in values.items() for part in pair), "--no-progress-bar", *more]


def left_in_memory() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith("lightning-resilience-snapshot-")]


@pytest.fixture(scope="module")
def whole(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nobody kills."""
    stem.load("examples.llama.train")
    folder = tmp_path_factory.mktemp("whole")
    stem.run(TRAIN, *arguments(folder), ranks=2, folder=folder)
    return folder


@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what we want of stock torch here
def test_a_killed_training_goes_on_from_memory_bit_for_bit(stem: Stem, tmp_path: Path, whole: Path) -> None:
    killed = tmp_path / "killed"
    expected = losses(whole)
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    before = left_in_memory()

    for kill_at in (FIRST_KILL, SECOND_KILL):
        with stem.start(TRAIN, *arguments(killed, "--snapshot-every", "1"), ranks=2, folder=tmp_path) as job:
            kill_after(job, killed, kill_at)
        assert (newest_checkpoint(killed, wait_s=0.0) is None) is (kill_at < CHECKPOINT_AT)
        assert len(left_in_memory()) == len(before) + 2  # one a rank, whatever the number of kills
    output = stem.run(TRAIN, *arguments(killed, "--snapshot-every", "1"), ranks=2, folder=tmp_path)

    starts = [event["step"] for event in events(killed, "start")]
    assert starts[0] == 0
    assert 0 <= starts[1] - FIRST_KILL + 2 <= 4  # the step that the kill hit may be done, or not
    assert 0 <= starts[2] - SECOND_KILL + 2 <= 4
    assert "the snapshot of step" in output
    assert f"{starts[2]} in /dev/shm" in output
    done = losses(killed)
    assert dict(done) == dict(expected)
    assert set(done) == set(expected)  # steps that were done twice gave the same bits twice
    last = Path(events(whole, "save")[-1]["path"]).name
    mine, theirs = tensors(killed / last, tmp_path), tensors(whole / last, tmp_path)
    assert any("exp_avg_sq" in name for name in mine)
    assert not [name for name, tensor in theirs.items() if not torch.equal(mine[name], tensor)]
    assert left_in_memory() == before, "training has ended well"


@pytest.mark.timeout(280)
def test_when_only_writers_are_left_they_make_a_checkpoint_of_the_newest_snapshot(
    stem: Stem, tmp_path: Path, whole: Path
) -> None:
    killed = tmp_path / "killed"
    with stem.start(TRAIN, *arguments(killed, "--snapshot-every", "1"), ranks=2, folder=tmp_path) as job:
        kill_ranks(job, killed, FIRST_KILL)
        deadline = time.monotonic() + 60
        while job.members():  # they leave by themselves
            assert time.monotonic() < deadline, job.output
            time.sleep(0.05)
        assert "the newest snapshot of the run was written to" in job.output
    found = newest_checkpoint(killed, wait_s=0.0)
    assert found is not None
    manifest = read_manifest(place_for(found))
    assert manifest is not None
    assert found == str(killed / f"rescued-step={manifest.step}.ckpt")
    assert 0 <= manifest.step - FIRST_KILL + 2 <= 4  # the step that the kill hit may be done, or not
    assert not [path for path in killed.iterdir() if "incomplete" in path.name]

    for name in left_in_memory():  # the next start is on another machine
        os.unlink(f"/dev/shm/{name}")
    stem.run(TRAIN, *arguments(killed), ranks=2, folder=tmp_path)
    assert events(killed, "start")[1]["step"] == manifest.step
    assert dict(losses(killed)) == dict(losses(whole)), "the same bits"


def kill_ranks(job: Job, folder: Path, step: int) -> None:
    """As soon as the step is done, without their writers."""
    deadline = time.monotonic() + 100
    while not any(event["step"] >= step for event in events(folder, "step")):
        assert job.alive_ranks(), job.output
        assert time.monotonic() < deadline, job.output
        time.sleep(0.005)
    for pid in job.alive_ranks():
        os.kill(pid, signal.SIGKILL)
