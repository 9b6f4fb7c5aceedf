"""Faults around the workers of data loaders, and in them: they are started anew, and no sample is lost or repeated."""

from __future__ import annotations

import pytest

from tests.integration.ranks import Stem
from tests.integration.restart_runs import Results, as_if_nothing_had_happened, fault, train
from tests.integration.restarts import Run

IN_VALIDATION = [fault("hang", "validation", rank=1, step=6), fault("raise", "forward", rank=0, step=7)]


def in_workers(*, persistent: bool) -> Run:
    faults = [{"kind": "raise", "rank": 0, "sample": 3}, {"kind": "kill", "rank": 1, "sample": 8}]
    faults.append({"kind": "hang", "rank": int(persistent), "sample": 5})
    return Run(f"in_workers_{persistent}", workers=1, persistent=persistent, worker_faults=faults)


RUNS = [
    Run("workers", workers=1),
    Run("workers_with_faults", IN_VALIDATION, workers=1),
    in_workers(persistent=True),
    Run("workers_anew", workers=1, persistent=False),
    in_workers(persistent=False),
]


@pytest.fixture(scope="module")
def results(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return train(stem, tmp_path_factory.mktemp("restart"), *RUNS)


def test_with_workers_training_goes_on_exactly(results: Results) -> None:
    for rank in results:
        as_if_nothing_had_happened(rank["workers_with_faults"], rank["workers"])
        assert len(rank["workers_with_faults"]["restarts"]) == 2


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_of_data_loaders_fail(results: Results, persistent: bool) -> None:
    for rank in results:
        run = rank[f"in_workers_{persistent}"]
        as_if_nothing_had_happened(run, rank["workers" if persistent else "workers_anew"])
        assert 1 <= len(run["restarts"]) <= 3  # they work ahead, so two may fail at once
