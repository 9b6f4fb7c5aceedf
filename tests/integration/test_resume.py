"""Killed without warning and started again, a training goes on as if nothing had happened, bit for bit.

The example's Llama on two ranks: dropout, a shuffled stock `DataLoader`, a checkpoint every ten steps.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from examples.llama.step_log import read_events
from lightning_resilience import newest_checkpoint
from tests.integration.ranks import Job, Stem

STEPS, EVERY, KILL_AT = 60, 10, 33
TRAIN = "examples.llama.train:main"


def arguments(folder: Path) -> list[str]:
    values = {
        "--accelerator": "cpu",
        "--devices": 2,
        "--size": "tiny",
        "--batch-size": 2,
        "--seq-len": 32,
        "--limit-mb": 0.25,
        "--steps": STEPS,
        "--validate-every": STEPS,
        "--checkpoint-every": EVERY,
        "--checkpoint-dir": folder,
    }
    return [*(str(part) for pair in values.items() for part in pair), "--no-progress-bar"]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "steps.jsonl") if event["event"] == kind]


def losses(folder: Path) -> list[tuple[int, str]]:
    """Step and exact loss of every step, in the order in which they were done."""
    return [(event["step"], event["loss"].hex()) for event in events(folder, "step")]


def kill_after(job: Job, folder: Path, step: int) -> None:
    """Kill all processes as soon as the step is done."""
    deadline = time.monotonic() + 100
    while not any(event["step"] >= step for event in events(folder, "step")):
        assert job.alive_ranks(), job.output
        assert time.monotonic() < deadline, job.output
        time.sleep(0.005)
        if len(events(folder, "step")) == step - 1:
            job.members()  # look for them now, so that nothing is left to do but to kill them
    assert job.kill() >= 4  # two ranks and their writers


def tensors(checkpoint: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, as stock torch reads it."""
    dcp_to_torch_save(checkpoint, folder / "whole.pt")
    found: dict[str, torch.Tensor] = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                collect(f"{name}.{key}", item)

    collect("", torch.load(folder / "whole.pt", weights_only=True))
    return found


@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what we want of stock torch here
def test_a_killed_training_goes_on_bit_for_bit(stem: Stem, tmp_path: Path) -> None:
    stem.load("examples.llama.train")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    stem.run(TRAIN, *arguments(whole), ranks=2, folder=tmp_path)
    with stem.start(TRAIN, *arguments(killed), ranks=2, folder=tmp_path) as job:
        kill_after(job, killed, KILL_AT)
    before = losses(killed)
    assert before[-1][0] in (KILL_AT, KILL_AT + 1, KILL_AT + 2)  # it may have gone on while it was being killed
    assert newest_checkpoint(killed) is not None
    stem.run(TRAIN, *arguments(killed), ranks=2, folder=tmp_path)
    after = losses(killed)[len(before) :]

    expected = losses(whole)
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert len({loss for _, loss in expected}) == STEPS
    first, second = events(killed, "start")
    assert (first["step"], second["step"]) == (0, 30)
    assert before == expected[: len(before)]
    assert after == expected[30:]
    last = Path(events(whole, "save")[-1]["path"]).name
    mine, theirs = tensors(killed / last, tmp_path), tensors(whole / last, tmp_path)
    assert mine.keys() == theirs.keys()
    assert any("exp_avg_sq" in name for name in mine)
    assert any("embed_tokens" in name for name in mine)
    different = [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])]
    assert not different
