"""Restarts with other strategies, loops and models: training afterwards is, bit for bit, what it is without faults."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.ranks import Stem
from tests.integration.restart_runs import FEW, Results, as_if_nothing_had_happened, fault, train
from tests.integration.restarts import Run

VARIANTS: dict[str, dict[str, Any]] = {
    "accumulating": {"trainer": {"accumulate_grad_batches": 2}},
    "manual": {"model": "Manual"},
    "compiled": {"model": "Compiled"},
    "self_sharded": {"model": "SelfSharded"},
    "no_shard": {"strategy": {"sharding_strategy": "NO_SHARD"}},
    "hybrid": {"strategy": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 1)}},
    "kept_gathered": {"strategy": {"sharding_strategy": "SHARD_GRAD_OP"}},
    "clipped": {"trainer": {"gradient_clip_val": 0.1}},
    "often_validated": {"trainer": {"val_check_interval": 2}},
}
ACCUMULATED = [fault("raise", "batch_start", rank=1, step=1), fault("raise", "forward", rank=0, step=2)]
MANUAL = [fault("raise", "batch_start", rank=1, step=4), fault("raise", "batch_end", rank=0, step=8)]
OTHER = {"accumulating": ACCUMULATED, "manual": MANUAL}
RUNS = [
    Run(name + suffix, faults, **options)
    for name, options in VARIANTS.items()
    for suffix, faults in (("", []), ("_with_faults", OTHER.get(name, FEW)))
]


@pytest.fixture(scope="module")
def results(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return train(stem, tmp_path_factory.mktemp("restart"), *RUNS)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_go_on_exactly(results: Results, name: str) -> None:
    for rank in results:
        as_if_nothing_had_happened(rank[f"{name}_with_faults"], rank[name])
        assert len(rank[f"{name}_with_faults"]["restarts"]) == 2
