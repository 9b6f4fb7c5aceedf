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
    stem.run("tests.integration.restarts:main", orders(*RUNS), str(folder), ranks=2, folder=folder, timeout=200)
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(2)]


def fault(kind: str, place: str, *, rank: int, step: int) -> dict[str, Any]:
    return {"kind": kind, "place": place, "rank": rank, "step": step, "message": f"in {place}"}


EXCEPTIONS = [
    fault("raise", "train_start", rank=0, step=0),
    fault("raise", "forward", rank=1, step=0),
    fault("raise", "batch_start", rank=1, step=1),
    fault("raise", "forward", rank=0, step=2),
    fault("raise", "backward", rank=1, step=3),
    fault("raise", "batch_end", rank=0, step=4),
    fault("raise", "validation", rank=1, step=6),
    fault("raise", "epoch_end", rank=0, step=6),
    fault("raise", "epoch_start", rank=1, step=6),
    fault("raise", "forward", rank=0, step=6),
    fault("raise", "before_update", rank=1, step=8),
    fault("raise", "validation_end", rank=1, step=12),
    fault("raise", "train_end", rank=0, step=12),
]
HANGS = [
    fault("hang", "forward", rank=1, step=1),
    fault("hang", "backward", rank=0, step=4),
    fault("hang", "batch_end", rank=1, step=5),
    fault("hang", "validation", rank=0, step=6),
    fault("hang", "train_end", rank=1, step=12),
]
FEW = [fault("raise", "forward", rank=1, step=3), fault("raise", "backward", rank=0, step=5)]
VARIANTS: dict[str, dict[str, Any]] = {
    "accumulating": {"trainer": {"accumulate_grad_batches": 2}},
    "workers": {"workers": 1},
    "compiled": {"model": "Compiled"},
    "self_sharded": {"model": "SelfSharded"},
    "no_shard": {"strategy": {"sharding_strategy": "NO_SHARD"}},
    "hybrid": {"strategy": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 1)}},
    "kept_gathered": {"strategy": {"sharding_strategy": "SHARD_GRAD_OP"}},
    "clipped": {"trainer": {"gradient_clip_val": 0.1}},
    "often_validated": {"trainer": {"val_check_interval": 2}},
}
IN_VALIDATION = [fault("hang", "validation", rank=1, step=6), fault("raise", "forward", rank=0, step=7)]
ACCUMULATED = [fault("raise", "batch_start", rank=1, step=1), fault("raise", "forward", rank=0, step=2)]
OTHER = {"accumulating": ACCUMULATED, "workers": IN_VALIDATION}
RUNS = [Run("calm"), Run("exceptions", EXCEPTIONS), Run("hangs", HANGS)] + [
    Run(name + suffix, faults, **options)
    for name, options in VARIANTS.items()
    for suffix, faults in (("", []), ("_with_faults", OTHER.get(name, FEW)))
]


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


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_go_on_exactly(results: Results, name: str) -> None:
    for rank in results:
        as_if_nothing_had_happened(rank[f"{name}_with_faults"], rank[name])
        assert len(rank[f"{name}_with_faults"]["restarts"]) == 2


def test_both_ranks_tell_the_same_story(results: Results) -> None:
    assert results[0]["exceptions"]["restarts"] == results[1]["exceptions"]["restarts"]
    assert "rank 0 at step 0" in results[0]["exceptions"]["restarts"][0]


@pytest.mark.usefixtures("results")
def test_events_are_written(folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "hangs" / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["restarted"] * 2 * len(HANGS)
    assert {"unblock", "reset", "meeting", "rebuild", "restore"} <= events[0]["phases"].keys()
