"""Exceptions on real ranks: training afterwards is, bit for bit, what it is without them.

The same two processes train again and again, with different faults.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.ranks import Stem
from tests.integration.restart_runs import (
    FEW,
    Results,
    as_if_nothing_had_happened,
    elsewhere,
    fault,
    restarts_of,
    train,
)
from tests.integration.restarts import Run

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
AT_ONCE = [
    *(
        {**fault("raise", "batch_start", rank=rank, step=2), "message": text}
        for rank, text in enumerate(("one", "other"))
    ),
    fault("raise", "forward", rank=0, step=4),
    fault("hang", "batch_start", rank=1, step=4),
]
MANY = [fault("raise", "forward", rank=step % 2, step=step) for step in range(30)]
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
REPEATING = [{**fault("raise", "forward", rank=1, step=2), "times": 2}]
LEAVING = [fault("interrupt", "forward", rank=0, step=1)]
RUNS = [
    Run("repeating", REPEATING),
    Run("leaving", LEAVING),
    Run("calm"),  # after runs that failed, and so are all below
    Run("lately", model="Lately"),
    Run("setting_up", SETTING_UP, model="Lately"),
    Run("at_once", AT_ONCE),
    Run("exceptions", EXCEPTIONS),
    Run("exceptions_elsewhere", elsewhere(EXCEPTIONS)),
    Run("unfit", FEW, checks="Unfit"),
    Run("many", MANY, trainer={"max_epochs": 5}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restart")


@pytest.fixture(scope="module")
def results(stem: Stem, folder: Path) -> Results:
    return train(stem, folder, *RUNS)


@pytest.mark.parametrize("name", ["exceptions", "exceptions_elsewhere"])
def test_training_goes_on_exactly(results: Results, folder: Path, name: str) -> None:
    for number, rank in enumerate(results):
        as_if_nothing_had_happened(rank[name], rank["calm"])
        assert len(restarts_of(folder / name, number)) == len(EXCEPTIONS)


def test_faults_of_two_ranks_at_once_are_one_restart(results: Results) -> None:
    for rank in results:
        as_if_nothing_had_happened(rank["at_once"], rank["calm"])
        assert 2 <= len(rank["at_once"]["restarts"]) <= len(AT_ONCE)


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
        early, late = least(usage[10:20]), least(usage[-10:])  # by then neighbours know each other
        growth = {name: late[name] - early[name] for name in early}
        assert growth.pop("resident") < 4096, "KiB"
        assert max(growth.values()) <= 0, growth  # less when the collector finds what an earlier run left


def test_setting_up_begins_again(results: Results) -> None:
    for rank in results:
        as_if_nothing_had_happened(rank["setting_up"], rank["lately"])
        assert len(rank["setting_up"]["restarts"]) == len(SETTING_UP)


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


def test_both_ranks_tell_the_same_story(results: Results, folder: Path) -> None:
    assert "rank 0 at step 0" in results[0]["exceptions"]["restarts"][0]
    mine, other = ([event["faults"] for event in restarts_of(folder / "exceptions", rank)] for rank in range(2))
    assert mine == other
