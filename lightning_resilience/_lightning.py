"""Every private name of Lightning this package relies on, seen in lightning 2.6.6.

`tests/unit/test_private_names.py` fails when one of them moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from torch.nn import Module
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch.distributed.device_mesh import DeviceMesh

DEFAULT_TIMEOUT: timedelta = default_pg_timeout
"""How long Lightning lets a collective operation run."""


def materialize(module: Module, device: torch.device) -> None:
    """Allocate what is still on the meta device and call `reset_parameters`, as `ModelParallelStrategy` does."""
    _materialize_distributed_module(module, device)


def move_optimizers(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move the state of optimizers to `device`."""
    _optimizers_to_device(optimizers, device)


def publish_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Make `self.device_mesh` of a LightningModule return `mesh`. There is no public setter."""
    module._device_mesh = mesh


def publish_device(module: LightningModule, device: torch.device) -> None:
    """Make `self.device` of a LightningModule return `device` without moving its tensors."""
    module._device = device


def evaluate_without_inference_mode(trainer: Trainer) -> None:
    """Let validate, test and predict run under `torch.no_grad`, as Lightning does for its own FSDP strategy.

    FSDP2 allocates its gather buffers at the first forward; made in inference mode they cannot be trained with.
    Lightning decides this from the type of its strategy (`loops/utilities.py`, `_no_grad_context`).
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
