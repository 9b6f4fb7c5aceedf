"""Every private name of torch that this package relies on, each with its version and its reason.

A test in ``tests/unit/test_private_names*.py`` fails when one of them moves.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.tensor import DTensor
from torch.serialization import _get_layout

# --- checkpoint format -------------------------------------------------------------------------------------


def local_chunk(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and shape of the piece of ``tensor`` that this rank holds.

    ``DTensor.__create_chunk_list__`` is the hook that torch.distributed.checkpoint itself asks (torch 2.4 on);
    it is not documented outside its docstring.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunk.offsets), tuple(chunk.sizes)


def replica_coordinates(tensor: DTensor) -> list[tuple[int, int]] | None:
    """For each mesh dimension over which ``tensor`` is replicated: this rank's coordinate and the size.

    None when this rank is not part of the mesh. Public API only; here because it belongs to ``local_chunk``.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    return [
        (coordinate[dim], tensor.device_mesh.size(dim))
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    ]


def storage_info(file: str, start: int, length: int) -> Any:
    """The value type of ``Metadata.storage_data`` that ``FileSystemReader`` understands.

    ``torch.distributed.checkpoint.filesystem._StorageInfo`` (torch 2.2 on) is pickled into every ``.metadata``
    file, so its name cannot move without breaking stock checkpoints too.
    """
    return _StorageInfo(file, start, length)


def foreach_copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool) -> None:
    """Copy many tensors with one call into C++.

    ``torch._foreach_copy_`` (torch 2.1 on) is what torch's own optimizers and FSDP2 use; there is no public name.
    """
    if destinations:
        torch._foreach_copy_(list(destinations), list(sources), non_blocking=non_blocking)


METADATA_CLASSES: dict[tuple[str, str], Any] = {
    (cls.__module__, cls.__name__): cls
    for cls in (
        _StorageInfo,
        _MEM_FORMAT_ENCODING,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        torch.Size,
        collections.OrderedDict,
        pathlib.PosixPath,
    )
} | {("torch.serialization", "_get_layout"): _get_layout, ("pathlib._local", "PosixPath"): pathlib.PosixPath}
"""All that a ``.metadata`` file may refer to; enums and layouts are pickled by private names (torch 2.4 on)."""
