"""Parameters without dimensions, such as a learned temperature. FSDP2 refuses to shard them; we replicate them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, Parameter

from lightning_resilience._torch import parameter_groups
from lightning_resilience.sharding.mesh import DATA_PARALLEL

_AVERAGED = "_lightning_resilience_averaged"


def scalar_parameters(model: Module) -> set[Parameter]:
    """What `fully_shard` is to ignore."""
    return {parameter for parameter in model.parameters() if parameter.dim() == 0}


def average_gradients(parameters: set[Parameter], model: Module, mesh: DeviceMesh) -> None:
    """Average the gradients of replicated parameters over the data-parallel ranks after every backward.

    A sum of gradients that starts with averaged ones may be averaged again: that part is equal on all ranks.
    So it also holds for several backwards before an update, and for the first one after `no_sync` ones.
    """
    group, ranks = mesh[DATA_PARALLEL].get_group(), mesh[DATA_PARALLEL].size()

    def average(parameter: torch.Tensor) -> None:
        if parameter.grad is not None and _reduces_gradients(model):
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(ranks)

    for parameter in parameters:
        trainable = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen parameter takes no hook, but may be unfrozen later
        parameter.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]  # torch
        parameter.requires_grad_(trainable)
        parameter.__dict__[_AVERAGED] = True


def is_averaged(parameter: Parameter) -> bool:
    """Whether `average_gradients` looks after `parameter`."""
    return bool(parameter.__dict__.get(_AVERAGED, False))


def _reduces_gradients(model: Module) -> bool:
    """Whether FSDP2 reduces gradients in this backward, or only accumulates them."""
    modules = (module for module in model.modules() if isinstance(module, FSDPModule))
    return all(group.reduce_grads for module in modules for group in parameter_groups(module))
