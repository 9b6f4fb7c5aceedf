"""Give a model its first values: allocate what is on the meta device, make all replicas equal."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_resilience._torch import is_dense, overwrite, sharded_parameters
from lightning_resilience.sharding.mesh import DATA_PARALLEL


def initialize(module: Module, device: torch.device, mesh: DeviceMesh, *, synchronize: bool) -> None:
    """Bring the tensors of `module` that are not sharded yet to `device`, with the same values on all replicas.

    Args:
        module: A module about to be sharded. FSDP modules inside it are left alone.
        device: Where to compute.
        mesh: The mesh of the job.
        synchronize: Broadcast the first rank's values. Values made here, on each rank by itself, always are.
    """
    allocated = materialize(module, device)
    tensors = list(_tensors(unsharded_modules(module)))
    for tensor in tensors:
        tensor.data = _plain_memory(tensor.data.to(device), contiguous=isinstance(tensor, Parameter))
    if allocated or synchronize:
        _synchronize(tensors, mesh, sharded=set())


def synchronize_replicas(model: Module, mesh: DeviceMesh) -> None:
    """Give every copy of a tensor the value of the first rank that holds it, also in a model already sharded."""
    _synchronize(_tensors(model.modules()), mesh, sharded=sharded_parameters(model))


def move_all_but_parameters(model: Module, device: torch.device) -> None:
    """Bring buffers, and modules that keep tensors in other ways, such as metrics, to `device`."""
    for name, buffer in model.named_buffers(recurse=False):
        model._buffers[name] = buffer.to(device)
    for child in model.children():
        if next(child.parameters(), None) is None:
            child.to(device)
        else:
            move_all_but_parameters(child, device)


def materialize(module: Module, device: torch.device) -> bool:
    """Allocate tensors on the meta device and call `reset_parameters` of the modules that own them.

    Shared parameters stay shared, which `Module.to_empty` does not ensure.

    Returns:
        Whether anything was on the meta device.
    """
    owners = allocate(module, device)
    _reset_parameters(owners)
    return bool(owners)


def allocate(module: Module, device: torch.device) -> list[Module]:
    """Give tensors on the meta device memory, with whatever is in it; returns the modules that own them."""
    allocated: dict[torch.Tensor, torch.Tensor] = {}
    owners = []
    for submodule in unsharded_modules(module):
        tables: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers)
        empty = [(table, name) for table in tables for name, tensor in table.items() if _is_meta(tensor)]
        for table, name in empty:
            tensor = table[name]
            if tensor not in allocated:
                allocated[tensor] = _allocate(tensor, device)
            table[name] = allocated[tensor]
        if empty:
            owners.append(submodule)
    return owners


def unsharded_modules(module: Module) -> Iterator[Module]:
    """`module` and what is below it, parents first, down to the FSDP modules, which look after their own."""
    seen: set[Module] = set()
    stack = [module]
    while stack:
        current = stack.pop()
        if current in seen or isinstance(current, FSDPModule):
            continue
        seen.add(current)
        yield current
        stack.extend(reversed(list(current.children())))


def _tensors(modules: Iterable[Module]) -> Iterator[torch.Tensor]:
    seen: set[torch.Tensor] = set()
    for module in modules:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor not in seen:
                seen.add(tensor)
                yield tensor


def _is_meta(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta


def _allocate(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    data = torch.empty_like(tensor, device=device)
    if not isinstance(tensor, Parameter):
        return data
    parameter = Parameter(data, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def _reset_parameters(modules: list[Module]) -> None:
    without = set()
    for module in modules:
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        else:
            without.add(type(module).__qualname__)
    if without and dist.get_rank() == 0:
        warnings.warn(
            f"These modules were on the meta device and have no reset_parameters() to give their parameters and "
            f"buffers a value: {', '.join(sorted(without))}. Unless a checkpoint fills them, they hold garbage. "
            f"Add the method, or create the model on a real device.",
            stacklevel=2,
        )


def _synchronize(tensors: Iterable[torch.Tensor], mesh: DeviceMesh, *, sharded: set[Parameter]) -> None:
    """Plain tensors are copies of each other on all ranks.

    A DTensor has copies along the mesh dimensions where it is replicated and, until FSDP2 shards it, along the
    data-parallel dimension.
    """
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            _broadcast(tensor, dist.group.WORLD)
            continue
        for dim, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                _broadcast(tensor.to_local(), tensor.device_mesh.get_group(dim))
        if tensor not in sharded:
            _broadcast(tensor.to_local(), mesh[DATA_PARALLEL].get_group())


def _plain_memory(tensor: torch.Tensor, *, contiguous: bool) -> torch.Tensor:
    """The same values where FSDP2 and in-place copies can work on them: every element has memory of its own."""
    if not is_dense(tensor):
        return tensor
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.size(), strict=True))
    return tensor.contiguous() if contiguous or overlaps else tensor


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Overwrite `tensor` by the value of the first rank of `group`."""
    if dist.get_world_size(group) == 1 or tensor.numel() == 0:
        return
    if not is_dense(tensor):
        _broadcast_object(tensor, group)
        return
    target = tensor.detach()
    contiguous = target.contiguous()
    dist.broadcast(contiguous.reshape(-1).view(torch.uint8), group=group, group_src=0)  # gloo knows few data types
    if contiguous is not target:
        target.copy_(contiguous)


def _broadcast_object(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Of a sparse or quantized buffer even the amount of data may differ between ranks."""
    values = [tensor.detach().cpu() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(values, group=group, group_src=0)
    assert values[0] is not None
    overwrite(tensor, values[0])
