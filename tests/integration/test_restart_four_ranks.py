"""Faults on any of four ranks: training afterwards is, bit for bit, what it is without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.ranks import Stem
from tests.integration.restart_runs import Results, as_if_nothing_had_happened, fault, restarts_of, train
from tests.integration.restarts import Run

FAULTS = [
    fault("raise", "forward", rank=2, step=0),
    fault("raise", "backward", rank=3, step=3),
    fault("hang", "backward", rank=2, step=4),
    fault("raise", "epoch_end", rank=1, step=6),
    fault("raise", "before_update", rank=3, step=8),
    fault("raise", "train_end", rank=3, step=12),
]
HYBRID: dict[str, Any] = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
RUNS = [
    Run("calm"),
    Run("faults", FAULTS),
    Run("hybrid", strategy=HYBRID),
    Run("hybrid_faults", FAULTS[:3], strategy=HYBRID),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restart")


@pytest.fixture(scope="module")
def results(stem: Stem, folder: Path) -> Results:
    return train(stem, folder, *RUNS, ranks=4)


@pytest.mark.parametrize(("name", "calm"), [("faults", "calm"), ("hybrid_faults", "hybrid")])
def test_training_goes_on_exactly(results: Results, folder: Path, name: str, calm: str) -> None:
    count = next(len(run.faults) for run in RUNS if run.name == name)
    for number, rank in enumerate(results):
        as_if_nothing_had_happened(rank[name], rank[calm])
        assert len(restarts_of(folder / name, number)) >= count  # one more where the machine stands still for a while
