"""A rank that is killed, stopped, or holds the interpreter's lock: the others notice, and say which and what of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ranks import Job, Stem

PATIENCE_S = 60.0
"""Far more than it takes, and far less than the two minutes that ranks wait for each other to meet."""
CASES = [("kill", 1), ("stop", 1), ("hold", 1), ("kill", 0), ("stop", 0)]
WORDS = {
    "kill": r"the process of rank {rank} \(pid {pid} on .*\) has ended|rank 0 \(pid {pid} on .*\)",
    "stop": r"rank {rank} \(pid {pid} on .*\).* is stopped \(T\)",
    "hold": r"rank {rank} \(pid {pid} on .*\) has said nothing for [\d.]+ s, last in \w+; its state is S",
}


@pytest.fixture(scope="module")
def outcomes(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the other rank says, what the rank itself says if it comes back, and its pid. All cases at once."""
    stem.load("tests.integration.losses")
    with contextlib.ExitStack() as stack:
        jobs: dict[str, tuple[Job, Path]] = {}
        for kind, rank in CASES:
            folder = tmp_path_factory.mktemp(f"{kind}-{rank}")
            fault = json.dumps({"kind": kind, "place": "forward", "rank": rank, "step": 4})
            job = stem.start("tests.integration.losses:main", str(folder), fault, ranks=2, folder=folder)
            jobs[f"{kind} {rank}"] = stack.enter_context(job), folder
        found = {name: outcome(*job, *name.split()) for name, job in jobs.items()}
    return found


def outcome(job: Job, folder: Path, kind: str, rank: str) -> dict[str, Any]:
    pid = list(job._ranks)[int(rank)]
    other, own = folder / f"result-{1 - int(rank)}.json", folder / f"result-{rank}.json"
    job.wait_for(other, timeout=PATIENCE_S)
    late = None
    if kind == "stop":
        os.kill(pid, signal.SIGCONT)
        job.wait_for(own, timeout=PATIENCE_S)
        late = json.loads(own.read_text())["error"]
    return {"pid": pid, "late": late, **json.loads(other.read_text())}


@pytest.mark.parametrize(("kind", "rank"), CASES)
def test_a_lost_rank_is_noticed_and_named(outcomes: dict[str, Any], kind: str, rank: int) -> None:
    found = outcomes[f"{kind} {rank}"]
    assert found["error"].startswith("RankLost: ")
    assert re.search(WORDS[kind].format(rank=rank, pid=found["pid"]), found["error"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_that_comes_back_leaves(outcomes: dict[str, Any], rank: int) -> None:
    assert outcomes[f"stop {rank}"]["late"].startswith("RankLost: ")
