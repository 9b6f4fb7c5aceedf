"""What the tests of restarts share: runs with faults on real ranks, and the comparison with runs without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.integration.ranks import Stem
from tests.integration.restarts import Run, orders

Results = list[dict[str, Any]]
"""Of each rank, by name of the run."""


def fault(kind: str, place: str, *, rank: int, step: int) -> dict[str, Any]:
    return {"kind": kind, "place": place, "rank": rank, "step": step, "message": f"in {place}"}


FEW = [fault("raise", "forward", rank=1, step=3), fault("raise", "backward", rank=0, step=5)]


def elsewhere(faults: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same on the other rank."""
    return [{**one, "rank": 1 - one["rank"]} for one in faults]


def train(stem: Stem, folder: Path, *runs: Run, ranks: int = 2) -> Results:
    """Do all runs, one after the other, in the same processes."""
    stem.load("tests.integration.restarts")
    stem.run("tests.integration.restarts:main", orders(*runs), str(folder), ranks=ranks, folder=folder, timeout=250)
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(ranks)]


def as_if_nothing_had_happened(run: dict[str, Any], calm: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    """Everything but what was logged twice at a place that was gone through twice."""
    assert run["error"] == ""
    assert merged(run["rows"]) == merged(calm["rows"])
    same = ("state", "average", "stopping", "metrics", "steps", "epoch", "finalized", "exceptions", "training")
    names = [name for name in same if name not in but]
    assert {name: run[name] for name in names} == {name: calm[name] for name in names}


def merged(rows: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """What was logged, by step and name; the same thing is never logged with two values."""
    found: dict[str, float] = {}
    for step, metrics in rows:
        for name, value in metrics.items():
            key = f"{step} {name} {metrics.get('epoch')}"
            assert found.setdefault(key, value) == value, key
    return found


def restarts_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """The events of a rank. Its `on_restart` may have been interrupted by the next fault, if that comes at once."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == "restarted" and event["rank"] == rank]
