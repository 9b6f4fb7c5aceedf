"""SIGKILL to everything, at fifty instants: what is left are whole checkpoints, from which a start goes on.

Each time two ranks with their writers save at every step, through the engine and without Lightning, and all four
processes are killed: at a random moment, or a random few milliseconds after a sight that tells in which phase a
save is. The next start resumes from what is left in the same directory. (`test_resume.py` kills whole Lightning
jobs.)
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_resilience import newest_checkpoint
from lightning_resilience.checkpoint.candidates import find
from lightning_resilience.checkpoint.exchange import Alone
from lightning_resilience.checkpoint.layout import flatten
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.checkpoint.verify import choose
from tests.integration.ranks import Job, Stem

KILLS = 50
ENDLESS = "1000000"
PATIENCE_S = 20.0  # for a start that resumes; dead writers must not be waited for longer


# --- the instant -------------------------------------------------------------------------------------------


def any_of(pattern: str) -> Callable[[Path], bool]:
    """Whether a name like this is in the directory now, while others come and go."""

    def seen(folder: Path) -> bool:
        try:
            return any(folder.glob(pattern))
        except FileNotFoundError:
            return False

    return seen


SIGHTS: dict[str, Callable[[Path], bool] | None] = {
    "any time": None,
    "staged": any_of(".*.incomplete"),
    "writing": any_of(".*.incomplete/__*_0.distcp"),
    "one rank is done": any_of(".*.incomplete/rank_*.record"),
    "committing": any_of(".*.incomplete/manifest.json"),
    "replacing": any_of(".last.ckpt.*.incomplete/manifest.json"),
    "one file": lambda folder: any(path.is_file() for path in folder.glob(".*.incomplete")),
    "removing": any_of(".*.removed"),
}


def wait_for_the_instant(folder: Path, sight: Callable[[Path], bool] | None, dice: random.Random) -> None:
    if sight is None:
        time.sleep(dice.uniform(0.0, 0.3))
        return
    deadline = time.monotonic() + 1.0  # some sights are short and may be missed; then any time will do
    while not sight(folder) and time.monotonic() < deadline:
        pass
    time.sleep(dice.uniform(0.0, 0.003))


def phases(folder: Path) -> set[str]:
    """Which unfinished things the kill has left."""
    seen = set()
    for entry in folder.glob(".*"):
        if entry.name.endswith(".removed"):
            seen.add("a removal")
        elif entry.is_dir():
            names = os.listdir(entry)
            records = sum(name.endswith(".record") for name in names)
            data = any(name.endswith(".distcp") for name in names)
            commit = "manifest.json" in names
            seen.add("a commit" if commit else "records" if records else "data" if data else "a start")
        else:
            seen.add("a file")
    return seen or {"nothing unfinished"}


# --- the checkpoints that are left -------------------------------------------------------------------------


def values(path: Path) -> list[float]:
    """The smallest and biggest values of every tensor in a checkpoint, and all others, as stock torch reads them."""
    if path.is_file():
        content = torch.load(path, weights_only=True)
    else:
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
        content = {
            name: torch.full(entry.size, -1.0) if isinstance(entry, TensorStorageMetadata) else ""
            for name, entry in entries.items()
        }
        load(content, checkpoint_id=path, no_dist=True)
        for name in ("meta.pt", "rank_0.pt", "rank_1.pt"):
            content[name] = torch.load(path / name, weights_only=True)
    found: set[float] = set()
    for leaf in flatten(content):
        if isinstance(leaf.value, torch.Tensor):
            found |= {leaf.value.min().item(), leaf.value.max().item()}
        elif isinstance(leaf.value, (int, float)):
            found.add(float(leaf.value))
    return sorted(found)


def step_left(folder: Path) -> int:
    """Check everything that looks like a checkpoint; returns the step of the newest."""
    newest = newest_checkpoint(folder, wait_s=0.0)  # nobody is left who could still be writing
    if newest is None:
        assert not list(folder.glob("*.ckpt"))
        return 0
    steps = []
    for candidate in find(place_for(folder)):
        assert candidate.proof is not None, candidate
        assert choose(candidate.place, Alone(), fall_back=False) == candidate.place
        (step,) = values(Path(candidate.path))
        steps.append(int(step))
    assert steps == sorted(steps, reverse=True), "newest first"
    assert values(Path(newest)) == [steps[0]]
    return steps[0]


@pytest.mark.timeout(290)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what we want of stock dcp.load
def test_fifty_kills_leave_whole_checkpoints(stem: Stem, tmp_path: Path) -> None:
    folder, shm = tmp_path / "checkpoints", tmp_path / "shm"
    folder.mkdir()
    shm.mkdir()
    dice = random.Random(3)

    def start(seed: int, steps: str, kind: str = "sharded") -> Job:
        arguments = str(folder), str(shm), str(seed), steps, kind
        return stem.start("tests.integration.saves:main", *arguments, ranks=2, folder=tmp_path)

    left: Counter[str] = Counter()
    step = 0
    for kill in range(KILLS):
        sight = list(SIGHTS)[kill % len(SIGHTS)]
        with start(kill, ENDLESS, "file" if sight == "one file" else "sharded") as job:
            for rank in (0, 1):
                job.wait_for(folder / f"running-{kill}-{rank}", PATIENCE_S)
            assert len(job.members()) == 4
            wait_for_the_instant(folder, SIGHTS[sight], dice)
            assert job.kill() == 4, job.output
        left.update(phases(folder))
        newest = step_left(folder)
        assert newest >= step, f"kill {kill} ({sight}) lost step {step}"
        step = newest
    assert step > KILLS / 2  # it did go on
    assert {"data", "records", "a commit"} <= set(left), left

    with start(KILLS, "9") as job:
        job.wait()
    assert step_left(folder) == step + 9
    hidden = [entry.name for entry in folder.glob(".*")]
    assert not hidden, "the last start has cleaned up after all kills"
    assert not list(shm.iterdir())
    print(dict(left))
