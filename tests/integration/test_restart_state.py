"""Faults that leave a state which cannot be trusted, faults while saving, and storage that stalls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.ranks import Stem
from tests.integration.restart_runs import Results, as_if_nothing_had_happened, fault, train
from tests.integration.restarts import Run

TORN = [fault("raise", "update", rank=1, step=5), fault("hang", "update", rank=0, step=8)]
TORN_BY_EXCEPTIONS = [fault("raise", "update", rank=1, step=5), fault("raise", "update", rank=0, step=8)]
SAVING = [fault("raise", "save", rank=0, step=4), fault("hang", "save", rank=1, step=8)]


def saving(name: str, faults: list[dict[str, Any]], folder: Path, **options: Any) -> Run:
    """A run that writes a checkpoint at every second step."""
    return Run(name, faults, saves=str(folder / name / "checkpoints"), **options)


def saving_runs(folder: Path) -> list[Run]:
    every_step = {"plugin": {"snapshot_every_n_steps": 1}}
    return [
        saving("saving", [], folder),
        saving("unnormalized", [], folder, model="Unnormalized"),
        saving("torn", TORN, folder, model="Unnormalized"),
        saving("torn_with_snapshots", TORN_BY_EXCEPTIONS, folder, **every_step),
        saving("saving_with_faults", SAVING, folder),
        saving("stalled", [], folder, stalls=True),
    ]


@pytest.fixture(scope="module")
def results(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("restart")
    return train(stem, folder, *saving_runs(folder))


@pytest.mark.parametrize(
    ("name", "calm", "faults"),
    [
        ("torn", "unnormalized", TORN),
        ("torn_with_snapshots", "saving", TORN_BY_EXCEPTIONS),
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
