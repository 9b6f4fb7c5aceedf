"""Hangs on real ranks: noticed, ended, and training afterwards is, bit for bit, what it is without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.ranks import Stem
from tests.integration.restart_runs import Results, as_if_nothing_had_happened, elsewhere, fault, restarts_of, train
from tests.integration.restarts import Run

HANGS = [
    fault("hang", "forward", rank=1, step=1),
    fault("skip", "batch_start", rank=1, step=3),
    fault("hang", "backward", rank=0, step=4),
    fault("hang", "batch_end", rank=1, step=5),
    fault("hang", "validation", rank=0, step=6),
    fault("hang", "train_end", rank=1, step=12),
]
HANGS_ELSEWHERE = [
    fault("hang", "forward", rank=0, step=0),
    *elsewhere(HANGS),
    fault("hang", "before_update", rank=0, step=8),
]
RUNS = [Run("calm"), Run("hangs", HANGS), Run("hangs_elsewhere", HANGS_ELSEWHERE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restart")


@pytest.fixture(scope="module")
def results(stem: Stem, folder: Path) -> Results:
    return train(stem, folder, *RUNS)


@pytest.mark.parametrize(("name", "count"), [("hangs", len(HANGS)), ("hangs_elsewhere", len(HANGS_ELSEWHERE))])
def test_training_goes_on_exactly(results: Results, folder: Path, name: str, count: int) -> None:
    for number, rank in enumerate(results):
        as_if_nothing_had_happened(rank[name], rank["calm"])
        assert len(restarts_of(folder / name, number)) >= count  # one more where the machine stands still for a while


def test_both_ranks_tell_the_same_story(results: Results) -> None:
    assert results[0]["hangs"]["restarts"] == results[1]["hangs"]["restarts"]


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
