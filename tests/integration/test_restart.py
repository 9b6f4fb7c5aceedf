"""Faults on real ranks: training afterwards is, bit for bit, what it is without them.

A few jobs; in each the same processes train again and again, with different faults.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ranks import Stem
from tests.integration.restarts import Run, orders

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restart")


@pytest.fixture(scope="module")
def results(stem: Stem, folder: Path) -> Results:
    """Of each rank, by name of the run."""
    stem.load("tests.integration.restarts")
    stem.run("tests.integration.restarts:main", orders(*RUNS), str(folder), ranks=2, folder=folder, timeout=120)
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(2)]


def fault(kind: str, place: str, *, rank: int, step: int) -> dict[str, Any]:
    return {"kind": kind, "place": place, "rank": rank, "step": step}


EXCEPTIONS = [
    fault("raise", "forward", rank=1, step=0),
    fault("raise", "forward", rank=0, step=2),
    fault("raise", "backward", rank=1, step=3),
]
HANGS = [fault("hang", "forward", rank=1, step=1), fault("hang", "backward", rank=0, step=4)]
RUNS = [Run("calm"), Run("exceptions", EXCEPTIONS), Run("hangs", HANGS)]


def as_if_nothing_had_happened(run: dict[str, Any], calm: dict[str, Any]) -> None:
    """Everything but what was logged twice at a place that was gone through twice."""
    assert run["error"] == ""
    assert merged(run["rows"]) == merged(calm["rows"])
    same = ("state", "average", "stopping", "metrics", "steps", "epoch", "finalized", "exceptions", "training")
    assert {name: run[name] for name in same} == {name: calm[name] for name in same}


def merged(rows: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """What was logged, by step and name; the same thing is never logged with two values."""
    found: dict[str, float] = {}
    for step, metrics in rows:
        for name, value in metrics.items():
            key = f"{step} {name} {metrics.get('epoch')}"
            assert found.setdefault(key, value) == value, key
    return found


@pytest.mark.parametrize(("name", "faults"), [("exceptions", EXCEPTIONS), ("hangs", HANGS)])
def test_training_goes_on_exactly(results: Results, name: str, faults: list[dict[str, Any]]) -> None:
    for rank in results:
        as_if_nothing_had_happened(rank[name], rank["calm"])
        assert len(rank[name]["restarts"]) == len(faults)


def test_both_ranks_tell_the_same_story(results: Results) -> None:
    assert results[0]["exceptions"]["restarts"] == results[1]["exceptions"]["restarts"]
    assert "rank 1 at step 0" in results[0]["exceptions"]["restarts"][0]


@pytest.mark.usefixtures("results")
def test_events_are_written(folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "hangs" / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["restarted"] * 2 * len(HANGS)
    assert {"unblock", "reset", "meeting", "rebuild", "restore"} <= events[0]["phases"].keys()
