"""Parameters that FSDP2 refuses to shard, and that we replicate: without dimensions, such as a learned temperature,
without elements, complex ones, and those of another data type than the rest of their unit.
"""

from __future__ import annotations

import warnings
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, Parameter

from lightning_resilience._torch import parameter_groups
from lightning_resilience.sharding.initialize import unsharded_modules
from lightning_resilience.sharding.mesh import DATA_PARALLEL

_AVERAGED = "_lightning_resilience_averaged"
_HOOKS = "_lightning_resilience_averaging"


def unshardable_parameters(unit: Module) -> set[Parameter]:
    """What `fully_shard` is to ignore in `unit`, whose inner units are sharded already."""
    own = [parameter for module in unsharded_modules(unit) for parameter in module.parameters(recurse=False)]
    whole = {p for p in own if p.dim() == 0 or p.numel() == 0 or p.is_complex()}
    odd = _of_another_dtype([p for p in own if p.requires_grad and p not in whole])
    if odd and dist.get_rank() == 0:
        _warn(unit, odd)
    return whole | odd


def _of_another_dtype(parameters: list[Parameter]) -> set[Parameter]:
    """All but those of the data type that takes the most memory: FSDP2 reduces gradients of one type a unit."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        sizes[parameter.dtype] += parameter.numel() * parameter.element_size()
    main = sizes.most_common(1)[0][0] if sizes else None
    return {parameter for parameter in parameters if parameter.dtype != main}


def _warn(unit: Module, odd: set[Parameter]) -> None:
    names = [name for name, parameter in unit.named_parameters() if parameter in odd]
    size = sum(parameter.numel() * parameter.element_size() for parameter in odd)
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    warnings.warn(
        f"{shown} of {type(unit).__name__} ({size / 1e6:.1f} MB) have another data type than the rest of what is"
        f" gathered with them, so every rank keeps them whole. To shard them, let auto_wrap_policy choose modules"
        f" whose trainable parameters have one data type.",
        stacklevel=2,
    )


def average_gradients(parameters: set[Parameter], model: Module, mesh: DeviceMesh) -> None:
    """Average the gradients of replicated parameters over the data-parallel ranks after every backward.

    A sum of gradients that starts with averaged ones may be averaged again: that part is equal on all ranks.
    So it also holds for several backwards before an update, and for the first one after `no_sync` ones.
    Called again, for another mesh, it takes the place of what it did before.
    """
    for hook in model.__dict__.pop(_HOOKS, ()):
        hook.remove()
    hooks = model.__dict__[_HOOKS] = []
    data_parallel = mesh[DATA_PARALLEL]
    ranks = data_parallel.size()

    def average(parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.numel() > 0 and _reduces_gradients(model):
            dist.all_reduce(parameter.grad, group=data_parallel.get_group())  # not kept: a restart makes a new one
            parameter.grad.div_(ranks)

    for parameter in parameters:
        trainable = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen parameter takes no hook, but may be unfrozen later
        hook = parameter.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]  # torch
        hooks.append(hook)
        parameter.requires_grad_(trainable)
        parameter.__dict__[_AVERAGED] = True


def is_averaged(parameter: Parameter) -> bool:
    """Whether `average_gradients` looks after `parameter`."""
    return bool(parameter.__dict__.get(_AVERAGED, False))


def _reduces_gradients(model: Module) -> bool:
    """Whether FSDP2 reduces gradients in this backward, or only accumulates them."""
    modules = (module for module in model.modules() if isinstance(module, FSDPModule))
    return all(group.reduce_grads for module in modules for group in parameter_groups(module))
