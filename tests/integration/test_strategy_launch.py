"""`python train.py` alone: Lightning starts the ranks, the strategy is chosen by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.jobs import script


@pytest.mark.parametrize("devices", [1, 2])
def test_a_script_starts_its_own_ranks(tmp_path: Path, devices: int) -> None:
    out = tmp_path / "result.json"
    script("tests.integration.strategy_script", str(out), str(devices))
    result = json.loads(out.read_text())
    assert 0 < result.pop("val_loss") < 10
    assert result == {
        "strategy": "ResilientFSDPStrategy",
        "launcher": "_SubprocessScriptLauncher",
        "world_size": devices,
        "steps": 8 // devices,
    }
