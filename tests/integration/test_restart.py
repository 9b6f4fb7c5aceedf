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
    stem.run(
        "tests.integration.restarts:main",
        orders(*RUNS, *saving_runs(folder)),
        str(folder),
        ranks=2,
        folder=folder,
        timeout=500,
    )
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(2)]


def fault(kind: str, place: str, *, rank: int, step: int) -> dict[str, Any]:
    return {"kind": kind, "place": place, "rank": rank, "step": step, "message": f"in {place}"}


EXCEPTIONS = [
    fault("raise", "train_start", rank=0, step=0),
    fault("raise", "forward", rank=1, step=0),
    fault("raise", "batch_start", rank=1, step=1),
    fault("raise", "forward", rank=0, step=2),
    fault("raise", "restart", rank=1, step=2),
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
    fault("skip", "batch_start", rank=1, step=3),
    fault("hang", "backward", rank=0, step=4),
    fault("hang", "batch_end", rank=1, step=5),
    fault("hang", "validation", rank=0, step=6),
    fault("hang", "train_end", rank=1, step=12),
]
ON_OTHER_RANKS = [{**one, "rank": 1 - one["rank"]} for one in EXCEPTIONS]
HANGS_ON_OTHER_RANKS = [
    fault("hang", "forward", rank=0, step=0),
    *({**one, "rank": 1 - one["rank"]} for one in HANGS),
    fault("hang", "before_update", rank=0, step=8),
]
AT_ONCE = [
    *(fault("raise", "batch_start", rank=rank, step=2) for rank in range(2)),
    fault("raise", "forward", rank=0, step=4),
    fault("hang", "batch_start", rank=1, step=4),
]
MANY = [fault("raise", "forward", rank=step % 2, step=step) for step in range(30)]
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
SETTING_UP = [  # with a barrier between any two
    fault("raise", "prepare_data", rank=0, step=0),
    fault("raise", "setup", rank=1, step=0),
    fault("raise", "configure_model", rank=0, step=0),
    fault("raise", "configure_optimizers", rank=1, step=0),
    fault("raise", "sanity_check", rank=1, step=0),
    fault("raise", "sanity_check_end", rank=0, step=0),
    fault("raise", "forward", rank=1, step=0),
    fault("raise", "backward", rank=0, step=3),
]
TORN = [fault("raise", "update", rank=1, step=5), fault("hang", "update", rank=0, step=8)]
SAVING = [fault("raise", "save", rank=0, step=4), fault("hang", "save", rank=1, step=8)]


def saving(name: str, faults: list[dict[str, Any]], folder: Path, **options: Any) -> Run:
    """A run that writes a checkpoint at every second step."""
    return Run(name, faults, saves=str(folder / name / "checkpoints"), **options)


def saving_runs(folder: Path) -> list[Run]:
    every_step = {"plugin": {"snapshot_every_n_steps": 1}}
    return [
        saving("saving", [], folder),
        saving("torn", TORN, folder, model="Unnormalized"),
        saving("unnormalized", [], folder, model="Unnormalized"),
        saving("torn_with_snapshots", TORN, folder, **every_step),
        saving("saving_with_faults", SAVING, folder),
        saving("stalled", [], folder, stalls=True),
    ]


MANUAL = [fault("raise", "batch_start", rank=1, step=4), fault("raise", "batch_end", rank=0, step=8)]
REPEATING = [{**fault("raise", "forward", rank=1, step=2), "times": 2}]
LEAVING = [fault("interrupt", "forward", rank=0, step=1)]
RUNS = [
    Run("manual", model="Manual"),
    Run("manual_with_faults", MANUAL, model="Manual"),
    Run("repeating", REPEATING),
    Run("leaving", LEAVING),
    Run("calm again"),
]
RUNS += [Run("lately", model="Lately"), Run("setting_up", SETTING_UP, model="Lately")]


def in_workers(*, persistent: bool) -> Run:
    faults = [{"kind": "raise", "rank": 0, "sample": 3}, {"kind": "kill", "rank": 1, "sample": 8}]
    faults.append({"kind": "hang", "rank": int(persistent), "sample": 5})
    return Run(f"in_workers_{persistent}", workers=1, persistent=persistent, worker_faults=faults)


RUNS += [Run("workers_anew", workers=1, persistent=False)]
RUNS += [in_workers(persistent=True), in_workers(persistent=False), Run("at_once", AT_ONCE)]
RUNS += [Run("exceptions_elsewhere", ON_OTHER_RANKS), Run("hangs_elsewhere", HANGS_ON_OTHER_RANKS)]
RUNS += [Run("unfit", FEW, checks="Unfit"), Run("many", MANY, trainer={"max_epochs": 5})]
RUNS += [Run("calm"), Run("exceptions", EXCEPTIONS), Run("hangs", HANGS)] + [
    Run(name + suffix, faults, **options)
    for name, options in VARIANTS.items()
    for suffix, faults in (("", []), ("_with_faults", OTHER.get(name, FEW)))
]


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


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("exceptions", EXCEPTIONS),
        ("hangs", HANGS),
        ("exceptions_elsewhere", ON_OTHER_RANKS),
        ("hangs_elsewhere", HANGS_ON_OTHER_RANKS),
    ],
)
def test_training_goes_on_exactly(results: Results, folder: Path, name: str, faults: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(results):
        as_if_nothing_had_happened(rank[name], rank["calm"])
        assert len(restarts_of(folder / name, number)) == len(faults)


def restarts_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """The events of a rank. Its `on_restart` may have been interrupted by the next fault, if that comes at once."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == "restarted" and event["rank"] == rank]


def test_faults_of_two_ranks_at_once_are_one_restart(results: Results) -> None:
    for rank in results:
        as_if_nothing_had_happened(rank["at_once"], rank["calm"])
        assert 2 <= len(rank["at_once"]["restarts"]) <= len(AT_ONCE)


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_of_data_loaders_fail(results: Results, persistent: bool) -> None:
    for rank in results:
        run = rank[f"in_workers_{persistent}"]
        as_if_nothing_had_happened(run, rank["workers" if persistent else "workers_anew"])
        assert 1 <= len(run["restarts"]) <= 3  # they work ahead, so two may fail at once


def test_a_rank_that_is_not_fit_to_go_on_says_why(results: Results) -> None:
    other, own = (rank["unfit"]["error"] for rank in results)
    found = "Unfit: the sensor is broken, 1 time asked for normal values"
    assert f"rank 1 is not fit to go on ({found}; mend that and start the job again)" in other
    assert own == "PlannedError: in forward"  # what happened to it comes first; its log has the rest


def least(rows: list[dict[str, int]]) -> dict[str, int]:
    """Without what is open only for a moment."""
    return {name: min(row[name] for row in rows) for name in rows[0]}


def test_nothing_piles_up_over_thirty_restarts(results: Results) -> None:
    for rank in results:
        usage = rank["many"]["usage"]
        assert len(usage) == len(MANY)
        early, late = least(usage[:10]), least(usage[-10:])
        assert late.pop("resident") - early.pop("resident") < 4096, "KiB"
        assert early == late


def test_setting_up_begins_again(results: Results) -> None:
    for rank in results:
        as_if_nothing_had_happened(rank["setting_up"], rank["lately"])
        assert len(rank["setting_up"]["restarts"]) == len(SETTING_UP)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_go_on_exactly(results: Results, name: str) -> None:
    for rank in results:
        as_if_nothing_had_happened(rank[f"{name}_with_faults"], rank[name])
        assert len(rank[f"{name}_with_faults"]["restarts"]) == 2


@pytest.mark.parametrize(
    ("name", "calm", "faults"),
    [
        ("torn", "unnormalized", TORN),
        ("torn_with_snapshots", "saving", TORN),
        ("saving_with_faults", "saving", SAVING),
    ],
)
def test_a_state_that_cannot_be_trusted_comes_from_a_copy(
    results: Results, name: str, calm: str, faults: list[dict[str, Any]]
) -> None:
    for number, rank in enumerate(results):
        rank_zero_only = ("average",) if (name, number) == ("torn", 1) else ()  # of callbacks, in a checkpoint
        as_if_nothing_had_happened(rank[name], rank[calm], but=rank_zero_only)
        assert len(rank[name]["restarts"]) == len(faults)


def test_storage_that_stalls_is_no_hang_of_training(results: Results) -> None:
    """For twice the time that makes one: neither while it writes nor where a rank waits for its answer."""
    for rank in results:
        assert rank["stalled"]["restarts"] == []
        as_if_nothing_had_happened(rank["stalled"], rank["saving"])


def test_manual_optimization_goes_on_exactly(results: Results) -> None:
    for rank in results:
        as_if_nothing_had_happened(rank["manual_with_faults"], rank["manual"])
        assert len(rank["manual_with_faults"]["restarts"]) == 2


def test_a_fault_that_repeats_ends_the_run(results: Results) -> None:
    other, own = (rank["repeating"] for rank in results)
    assert own["error"] == "PlannedError: in forward"
    assert "this fault repeats at step 2; it is not transient" in other["error"]
    assert [len(run["restarts"]) for run in (own, other)] == [1, 1]
    assert [run["exceptions"] for run in (own, other)] == [1, 1]


def test_an_interrupt_is_not_retried(results: Results) -> None:
    own, other = (rank["leaving"] for rank in results)
    assert own["error"].startswith("SystemExit")  # what Lightning makes of Ctrl-C
    assert other["error"].startswith("PeerFailed")
    assert own["restarts"] == other["restarts"] == []


def test_training_works_after_runs_that_failed(results: Results) -> None:
    for rank in results:
        as_if_nothing_had_happened(rank["calm again"], rank["calm"])


def test_both_ranks_tell_the_same_story(results: Results, folder: Path) -> None:
    assert results[0]["hangs"]["restarts"] == results[1]["hangs"]["restarts"]
    assert "rank 0 at step 0" in results[0]["exceptions"]["restarts"][0]
    mine, other = ([event["faults"] for event in restarts_of(folder / "exceptions", rank)] for rank in range(2))
    assert mine == other


@pytest.mark.usefixtures("results")
def test_events_are_written(folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "hangs" / "events.jsonl").read_text().splitlines()]
    restarts = [event for event in events if event["kind"] == "restarted"]
    assert len(restarts) == 2 * len(HANGS)
    assert {"unblock", "reset", "meeting", "rebuild", "restore"} <= restarts[0]["phases"].keys()
    hangs = [event for event in events if event["kind"] == "hang"]
    assert len(events) == len(restarts) + len(hangs)
    suspected = [["0", "1"] if fault["kind"] == "skip" else [str(fault["rank"])] for fault in HANGS]
    assert [sorted(event["suspects"]) for event in hangs] == suspected  # of two ranks either may have left one out
    for event in hangs:
        assert [statement["rank"] for statement in event["ranks"]] == [0, 1]
        assert all(any("restarts.py" in frame for frame in statement["stack"]) for statement in event["ranks"])
