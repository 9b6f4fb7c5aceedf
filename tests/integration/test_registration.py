"""The strategy has a name as soon as anything public of ours is there."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["AsyncCheckpointIO", "ResilientFSDPStrategy"])
def test_any_public_class_registers_the_strategy(name: str) -> None:
    code = f"""
from lightning_resilience import {name}
from lightning.pytorch.strategies import StrategyRegistry
assert type(StrategyRegistry.get("resilient_fsdp")).__name__ == "ResilientFSDPStrategy"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
