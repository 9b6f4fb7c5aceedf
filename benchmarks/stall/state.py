"""The state that is saved: sharded over the ranks as FSDP2 shards it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

_BLOCKS = 8
_MULTIPLE = 32  # of the hidden size
_VECTORS = 12  # norms and biases of a block
_SMALL = (32, 32)


def training_state(mesh: DeviceMesh, nbytes: int) -> dict[str, Any]:
    """Parameters, Adam's two moments and step counters of a small transformer.

    About 150 matrices hold nearly all bytes; 300 vectors and 150 scalars come with them.

    Args:
        mesh: The ranks to shard over.
        nbytes: Size on each rank in bytes; it becomes a few percent more.
    """
    elements = nbytes * mesh.size() / 3 / 4
    hidden = math.ceil(math.sqrt(elements / 12 / _BLOCKS) / _MULTIPLE) * _MULTIPLE
    shapes = {f"layers.{i}.{name}": shape for i in range(_BLOCKS) for name, shape in _block(hidden).items()}
    moments = {name: _moments(mesh, shape) for name, shape in shapes.items()}
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "params": list(shapes)}
    return {
        "model": {name: _sharded(mesh, shape) for name, shape in shapes.items()},
        "optimizer": {"state": moments, "param_groups": [group]},
    }


def small_tensors(mesh: DeviceMesh, count: int) -> dict[str, Any]:
    """So many tensors that hold next to nothing."""
    return {"model": {f"tensor.{i}": _sharded(mesh, _SMALL) for i in range(count)}}


def local_tensors(state: Any) -> Iterator[torch.Tensor]:
    """What this rank holds of every tensor."""
    for value in torch.utils._pytree.tree_leaves(state):
        if isinstance(value, torch.Tensor):
            yield local(value)


def local(value: Any) -> Any:
    """This rank's part if it is a ``DTensor``."""
    return value.to_local() if isinstance(value, DTensor) else value


def size_of(state: Any) -> int:
    """Bytes of this rank."""
    return sum(tensor.nbytes for tensor in local_tensors(state))


def _block(hidden: int) -> dict[str, tuple[int, ...]]:
    square, wide, tall = (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)
    matrices = {"q": square, "k": square, "v": square, "o": square, "up": tall, "down": wide}
    return {f"{name}.weight": shape for name, shape in matrices.items()} | {
        f"norm.{i}.weight": (hidden,) for i in range(_VECTORS)
    }


def _moments(mesh: DeviceMesh, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(1.0), "exp_avg": _sharded(mesh, shape), "exp_avg_sq": _sharded(mesh, shape)}


def _sharded(mesh: DeviceMesh, shape: tuple[int, ...]) -> DTensor:
    return distribute_tensor(torch.rand(shape), mesh, [Shard(0)], src_data_rank=None)
