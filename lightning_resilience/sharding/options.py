"""How a model is to be spread over the ranks: one frozen value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from lightning_resilience.errors import ConfigurationError
from lightning_resilience.sharding.wrapping import WrapPolicy, check_policy

ShardingStrategyName: TypeAlias = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """How a model is spread over the ranks. See `ResilientFSDPStrategy` for the meaning of each."""

    sharding_strategy: ShardingStrategyName = "FULL_SHARD"
    device_mesh: tuple[int, int] | None = None
    tensor_parallel_size: int = 1
    cpu_offload: bool = False
    auto_wrap_policy: WrapPolicy = "auto"
    activation_checkpointing_policy: WrapPolicy = None
    sync_module_states: bool = True

    def __post_init__(self) -> None:
        if self.sharding_strategy not in get_args(ShardingStrategyName):
            raise ConfigurationError(
                f"sharding_strategy={self.sharding_strategy!r} is unknown. "
                f"Choose one of {', '.join(get_args(ShardingStrategyName))}."
            )
        _check_size("tensor_parallel_size", self.tensor_parallel_size)
        _check_flag("cpu_offload", self.cpu_offload)
        _check_flag("sync_module_states", self.sync_module_states)
        self._check_mesh()
        for argument in ("auto_wrap_policy", "activation_checkpointing_policy"):
            object.__setattr__(self, argument, check_policy(argument, getattr(self, argument)))

    def _check_mesh(self) -> None:
        if self.device_mesh is None:
            return
        if self.sharding_strategy != "HYBRID_SHARD":
            raise ConfigurationError(
                f"device_mesh={self.device_mesh!r} needs sharding_strategy='HYBRID_SHARD', "
                f"not {self.sharding_strategy!r}, which decides the mesh by itself."
            )
        if not isinstance(self.device_mesh, (tuple, list)) or len(self.device_mesh) != 2:
            raise ConfigurationError(f"device_mesh={self.device_mesh!r} must be a pair (replicas, shards).")
        object.__setattr__(self, "device_mesh", tuple(self.device_mesh))
        for size in self.device_mesh:
            _check_size("device_mesh", size)

    @property
    def chooses_modules(self) -> bool:
        """Whether a policy other than the defaults was given."""
        return self.auto_wrap_policy not in ("auto", None) or self.activation_checkpointing_policy is not None

    @property
    def reshard_after_forward(self) -> bool | None:
        """None lets FSDP2 keep the root gathered from forward to backward, where it is needed first."""
        return False if self.sharding_strategy == "SHARD_GRAD_OP" else None


def _check_size(argument: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigurationError(f"{argument} takes positive whole numbers, not {size!r}.")


def _check_flag(argument: str, flag: object) -> None:
    if not isinstance(flag, bool):
        raise ConfigurationError(f"{argument}={flag!r} must be True or False.")
