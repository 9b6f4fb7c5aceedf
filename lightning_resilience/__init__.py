"""PyTorch Lightning training jobs that do not stop.

This module is the door: it names the public classes and imports nothing heavy until one is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_resilience.checkpoint.candidates import newest_checkpoint
    from lightning_resilience.checkpoint.retention import KeepEvery, KeepLatest
    from lightning_resilience.checkpoint_io import AsyncCheckpointIO
    from lightning_resilience.model_checkpoint import ResilientModelCheckpoint
    from lightning_resilience.restart.policy import RestartPolicy
    from lightning_resilience.strategy import ResilientFSDPStrategy
    from lightning_resilience.weights import load_weights

_HOMES = {
    "AsyncCheckpointIO": "lightning_resilience.checkpoint_io",
    "KeepEvery": "lightning_resilience.checkpoint.retention",
    "KeepLatest": "lightning_resilience.checkpoint.retention",
    "ResilientFSDPStrategy": "lightning_resilience.strategy",
    "ResilientModelCheckpoint": "lightning_resilience.model_checkpoint",
    "RestartPolicy": "lightning_resilience.restart.policy",
    "load_weights": "lightning_resilience.weights",
    "newest_checkpoint": "lightning_resilience.checkpoint.candidates",
}

__all__ = [
    "AsyncCheckpointIO",
    "KeepEvery",
    "KeepLatest",
    "ResilientFSDPStrategy",
    "ResilientModelCheckpoint",
    "RestartPolicy",
    "load_weights",
    "newest_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    if isinstance(found, type):  # whoever has one of our classes may also say strategy="resilient_fsdp"
        importlib.import_module(_HOMES["ResilientFSDPStrategy"])
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
