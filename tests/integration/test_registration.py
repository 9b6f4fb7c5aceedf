"""The strategy has a name as soon as anything public of ours is there."""

from __future__ import annotations

import subprocess
import sys

CODE = """
from lightning_resilience import {}
from lightning.pytorch.strategies import StrategyRegistry
assert type(StrategyRegistry.get("resilient_fsdp")).__name__ == "ResilientFSDPStrategy"
"""


def test_any_public_class_registers_the_strategy() -> None:
    names = ["AsyncCheckpointIO", "ResilientFSDPStrategy"]
    # Each needs an interpreter that has imported nothing else of ours; side by side, as imports are most of the time.
    processes = {name: subprocess.Popen([sys.executable, "-c", CODE.format(name)]) for name in names}
    assert {name: process.wait() for name, process in processes.items()} == dict.fromkeys(names, 0)
