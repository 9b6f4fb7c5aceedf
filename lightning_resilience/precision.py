"""Precision plugins for sharded parameters.

`Trainer(precision=...)` makes Lightning's own plugin; `sharded_precision` puts ours in its place. They differ from
Lightning's in two points: gradients are clipped by their norm over all ranks and meshes, and "bf16-mixed" is done
by FSDP2, which gathers bfloat16 parameters and reduces float32 gradients, not by autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_resilience.errors import ConfigurationError
from lightning_resilience.sharding.clipping import clip_by_norm, clip_by_value

_FLOAT16 = (
    "float16 needs a loss scale, and torch has no scaler that agrees on overflows over sharded gradients: "
    "ranks would skip different steps and their weights would drift apart"
)
_UNKNOWN = "it has not been tried with sharded parameters"
_WORKING = 'Use "32-true", "bf16-true" or "bf16-mixed".'


class ShardedPrecision(Precision):
    """Everything in float32: `precision="32-true"`."""

    def __init__(self) -> None:
        super().__init__()
        self.before_update: Callable[[], None] = _nothing
        """Called when gradients are ready and clipped, just before an optimizer uses them."""

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The data types FSDP2 is to use."""
        return MixedPrecisionPolicy()

    @override
    def _wrap_closure(self, model: LightningModule, optimizer: Steppable, closure: Callable[[], Any]) -> Any:
        result = super()._wrap_closure(model, optimizer, closure)
        self.before_update()
        return result

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_norm(self.main_params(optimizer), clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_value(self.main_params(optimizer), clip_val)


class ShardedHalfPrecision(ShardedPrecision, HalfPrecision):
    """Parameters, gradients and optimizer state in bfloat16: `precision="bf16-true"`."""

    def __init__(self) -> None:
        HalfPrecision.__init__(self, "bf16-true")
        self.before_update = _nothing


class ShardedMixedPrecision(ShardedPrecision):
    """Compute in bfloat16, keep and update float32 parameters: `precision="bf16-mixed"`."""

    precision = "bf16-mixed"

    @property
    @override
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _nothing() -> None:
    pass


def sharded_precision(plugin: Precision) -> ShardedPrecision:
    """Our plugin for the precision that `plugin` stands for.

    Raises:
        ConfigurationError: The precision does not work with sharded parameters.
    """
    if isinstance(plugin, ShardedPrecision):
        return plugin
    if type(plugin) not in (Precision, HalfPrecision, MixedPrecision, FSDPPrecision):
        raise _refused(f"The plugin {type(plugin).__qualname__}", _UNKNOWN)
    check_precision(str(plugin.precision))
    return _PLUGINS[str(plugin.precision)]()


def check_precision(precision: str) -> None:
    """Check what `Trainer(precision=...)` stands for.

    Raises:
        ConfigurationError: The precision does not work with sharded parameters.
    """
    if precision not in _PLUGINS:
        raise _refused(f"precision={precision!r}", _FLOAT16 if precision in ("16-mixed", "16-true") else _UNKNOWN)


def _refused(what: str, reason: str) -> ConfigurationError:
    return ConfigurationError(f"{what} does not work with ResilientFSDPStrategy: {reason}. {_WORKING}")


_PLUGINS: dict[str, type[ShardedPrecision]] = {
    "32-true": ShardedPrecision,
    "bf16-true": ShardedHalfPrecision,
    "bf16-mixed": ShardedMixedPrecision,
}
