"""`python train.py` alone: Lightning starts the ranks, the strategy is chosen by name."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.jobs import script

DEVICES = [1, 2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """By the number of devices; both scripts at once, as they import one after the other in each."""
    folder = tmp_path_factory.mktemp("launch")

    def result(devices: int) -> Any:
        out = folder / f"{devices}.json"
        script("tests.integration.strategy_script", str(out), str(devices))
        return json.loads(out.read_text())

    with ThreadPoolExecutor() as pool:
        return dict(zip(DEVICES, pool.map(result, DEVICES), strict=True))


@pytest.mark.parametrize("devices", DEVICES)
def test_a_script_starts_its_own_ranks(results: dict[int, Any], devices: int) -> None:
    result = dict(results[devices])
    assert 0 < result.pop("val_loss") < 10
    assert result == {
        "strategy": "ResilientFSDPStrategy",
        "launcher": "_SubprocessScriptLauncher",
        "world_size": devices,
        "steps": 8 // devices,
    }
