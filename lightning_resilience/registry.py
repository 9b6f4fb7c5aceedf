"""`Trainer(strategy="resilient_fsdp")`."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

NAME = "resilient_fsdp"


def register() -> None:
    """Make the name known to Lightning. May be called any number of times."""
    from lightning_resilience.strategy import ResilientFSDPStrategy

    StrategyRegistry.register(
        NAME,
        ResilientFSDPStrategy,
        description="FSDP2 that keeps training through faults (lightning_resilience)",
        override=True,
    )
