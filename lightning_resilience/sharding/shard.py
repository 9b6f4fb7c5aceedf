"""Shard a model in place, once; ask and change the state of a sharded model.

The order: choose the units, wrap them for activation checkpointing, then for each unit, children first and the
model itself last: allocate what is on the meta device, make replicas equal, `fully_shard`. So no more than one
unit exists in full at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.utils.checkpoint import checkpoint

from lightning_resilience._torch import is_gathered, map_tensors, put_back_shards, sharded_parameters, take_apart
from lightning_resilience.errors import ShardingError
from lightning_resilience.sharding.initialize import allocate, initialize, unsharded_modules
from lightning_resilience.sharding.mesh import DATA_PARALLEL, Meshes
from lightning_resilience.sharding.options import ShardingOptions
from lightning_resilience.sharding.replicated import average_gradients, is_averaged, unshardable_parameters
from lightning_resilience.sharding.supported import check_supported
from lightning_resilience.sharding.wrapping import select_modules, without_split_ties

_SHARDED_WITH = "_lightning_resilience_sharded_with"
_UNITS = "_lightning_resilience_units"


def shard_model(
    model: Module,
    options: ShardingOptions,
    *,
    meshes: Meshes,
    device: torch.device,
    mixed_precision: MixedPrecisionPolicy,
) -> None:
    """Shard `model` in place.

    Args:
        model: A model without any FSDP module. Its tensors may be on any device, the meta device included.
        options: What to wrap and how.
        meshes: From `build_meshes`.
        device: Where to compute.
        mixed_precision: Data types inside the units. The model itself does not cast the arguments of its
            forward, so that targets keep their precision; the layers it manages cast theirs.

    Raises:
        ShardingError: A policy does not fit the model, or FSDP2 cannot train it.
    """
    check_supported(model)
    units = select_modules("auto_wrap_policy", options.auto_wrap_policy, model)
    checkpointed = select_modules("activation_checkpointing_policy", options.activation_checkpointing_policy, model)
    for module in checkpointed:
        checkpoint_activations(module)

    def begin(module: Module) -> None:
        initialize(module, device, meshes.job, synchronize=options.sync_module_states)

    def cast() -> None:
        cast_inputs_of_layers(model, mixed_precision.param_dtype)

    inner = list(reversed(without_split_ties(units, model)))
    _shard_units(model, inner, options, meshes, device, mixed_precision, begin, cast)
    model.__dict__[_SHARDED_WITH] = (options, mixed_precision)


def shard_again(
    model: Module, options: ShardingOptions, *, meshes: Meshes, device: torch.device
) -> dict[Parameter, Parameter]:
    """Shard a model of `shard_model` over other ranks. The values of what was sharded are lost.

    Hooks, modules and their attributes stay; called again after it has failed it makes up for that.

    Args:
        model: At rest: nothing is gathered.
        options: What to wrap and how; as before but for the mesh.
        meshes: From `build_meshes`.
        device: Where to compute.

    Returns:
        What has taken the place of each sharded parameter.
    """
    asked = sharded_with(model)
    assert asked is not None
    units: list[Module] = model.__dict__[_UNITS]
    before = _sharded_places(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            take_apart(module)
    hollow: dict[Parameter, Parameter] = {}
    for module, name, parameter in before:
        if parameter not in hollow:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            hollow[parameter] = Parameter(empty, requires_grad=parameter.requires_grad)
        module._parameters[name] = hollow[parameter]

    def begin(module: Module) -> None:
        allocate(module, device)

    _shard_units(model, units, options, meshes, device, asked[1], begin, lambda: None)
    model.__dict__[_SHARDED_WITH] = (options, asked[1])
    return {old: _parameter(module, name) for module, name, old in before}


def _sharded_places(model: Module) -> list[tuple[Module, str, Parameter]]:
    """Which module has which sharded parameter under which name."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor) or (parameter is not None and parameter.is_meta)
    ]


def _parameter(module: Module, name: str) -> Parameter:
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def _shard_units(
    model: Module,
    units: list[Module],
    options: ShardingOptions,
    meshes: Meshes,
    device: torch.device,
    mixed_precision: MixedPrecisionPolicy,
    begin: Callable[[Module], None],
    before_model: Callable[[], None],
) -> None:
    """`fully_shard` for each of the units, children first, and for the model; `begin` gives each its tensors."""
    replicated: set[Parameter] = set()

    def shard(module: Module, policy: MixedPrecisionPolicy) -> None:
        begin(module)
        unshardable = unshardable_parameters(module)
        replicated.update(unshardable)
        fully_shard(
            module,
            mesh=meshes.sharding,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=policy,
            offload_policy=_offload_policy(options, device),
            ignored_params=unshardable,
        )

    for unit in units:
        shard(unit, mixed_precision)
    before_model()
    shard(model, _without_input_cast(mixed_precision))
    average_gradients(replicated, model, meshes.job)
    model.__dict__[_UNITS] = units


def sharded_with(model: Module) -> tuple[ShardingOptions, MixedPrecisionPolicy] | None:
    """What `shard_model` was asked for, or None when the user called `fully_shard`."""
    asked: tuple[ShardingOptions, MixedPrecisionPolicy] | None = model.__dict__.get(_SHARDED_WITH)
    return asked


def is_sharded(model: Module) -> bool:
    """Whether `fully_shard` was applied to `model` or anything in it, by us or by the user."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard_all(model: Module) -> None:
    """Put every FSDP module of `model` back to sharded parameters and free the gathered ones. Local."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and is_gathered(module):
            put_back_shards(module)


def check_gradients_reduced(model: Module, mesh: DeviceMesh) -> None:
    """Refuse trainable parameters whose gradients nobody averages over the data-parallel ranks.

    Raises:
        ShardingError: Replicas of a parameter would drift apart silently.
    """
    if mesh[DATA_PARALLEL].size() == 1:
        return
    reduced = sharded_parameters(model)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    left = [name for name, p in trainable if p not in reduced and not is_averaged(p)]
    if left:
        names = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
        raise ShardingError(
            f"{type(model).__name__} calls fully_shard itself but leaves {len(left)} trainable parameters out: "
            f"{names}. Their gradients would differ between ranks and so would the weights, silently. Apply "
            f"fully_shard to the module that holds them too (last, to self), freeze them, or leave all the "
            f"sharding to the strategy by not calling fully_shard."
        )


def checkpoint_activations(module: Module) -> None:
    """Recompute the activations of `module` in backward instead of keeping them.

    `forward` is replaced in place: names in the state dict, the class and isinstance checks stay as they are.
    """
    forward = module.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed


def cast_inputs_of_layers(model: Module, dtype: torch.dtype | None) -> None:
    """Let the layers that `model` itself manages cast their floating-point inputs to `dtype`."""
    if dtype is None:
        return

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def hook(_: Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_tensors(cast, args), map_tensors(cast, kwargs)

    for module in unsharded_modules(model):
        if module is not model and next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(hook, with_kwargs=True)


def _offload_policy(options: ShardingOptions, device: torch.device) -> OffloadPolicy:
    """On a CPU the parameters are where offloading would bring them."""
    return CPUOffloadPolicy() if options.cpu_offload and device.type != "cpu" else OffloadPolicy()


def _without_input_cast(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.output_dtype,
        cast_forward_inputs=False,
    )
