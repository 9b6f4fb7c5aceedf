"""Clip gradients that may live on several device meshes, or on none.

torch clips lists of tensors at once, which cannot mix meshes: with tensor parallelism some parameters are spread
over two dimensions, others over one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm


def clip_by_norm(parameters: Iterable[Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients so that their norm over all ranks and parameters is at most `max_norm`.

    Returns:
        The norm before clipping, the same on all ranks.
    """
    groups = _by_mesh(parameters)
    norms = [_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    if not norms:
        return torch.tensor(0.0)
    total = (
        norms[0]
        if len(norms) == 1
        else torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    )
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total)
    return total


def clip_by_value(parameters: Iterable[Parameter], limit: float) -> None:
    """Limit each element of the gradients to the range from `-limit` to `limit`."""
    for group in _by_mesh(parameters):
        clip_grad_value_(group, limit)


def _by_mesh(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    groups: dict[DeviceMesh | None, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    norm = get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
