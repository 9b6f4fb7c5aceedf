"""Where every byte of a sharded checkpoint goes: this rank's file, and the metadata of all files.

Pure: no process group, no file. The format is that of ``torch.distributed.checkpoint`` (``__k_0.distcp`` and
``.metadata``), so ``dcp.load`` and stock Lightning read it.
"""

from __future__ import annotations

import functools
import json
import math
import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from lightning_resilience._torch import is_dense, local_chunk, replica_coordinates, sharding_spec, storage_info
from lightning_resilience.checkpoint.envelope import envelope
from lightning_resilience.errors import SaveError

Path: TypeAlias = tuple["str | int", ...]
"""Way to a leaf through nested dictionaries and lists."""

ALIGNMENT = 64


class Leaf(NamedTuple):
    """One value of the state, under the flat name that the checkpoint format uses."""

    name: str
    path: Path
    value: Any


@dataclass(frozen=True)
class Chunk:
    """A piece of a tensor in this rank's file.

    Attributes:
        name: Flat name of the tensor.
        path: Its way through the nested state.
        dtype: Name of the dtype, as in ``torch.float32``.
        global_shape: Shape of the whole tensor.
        offsets: Where the piece starts in it.
        shape: Shape of the piece.
        start: Where the piece's archive starts in the file, in bytes.
        length: How long the archive is.
    """

    name: str
    path: Path
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True)
class ShardLayout:
    """What one rank writes of the tensors.

    Attributes:
        rank: The rank.
        chunks: Its pieces, in file order.
        size: Length of the tensor part of the file in bytes.
        plain: Digest of the names of all values that are not sharded; equal on all ranks or the save is wrong.
    """

    rank: int
    chunks: tuple[Chunk, ...]
    size: int
    plain: int

    def encode(self) -> bytes:
        """As JSON, to be told to rank 0."""
        return json.dumps({**vars(self), "chunks": [vars(chunk) for chunk in self.chunks]}).encode()

    @staticmethod
    def decode(data: bytes) -> ShardLayout:
        """The opposite of :meth:`encode`."""
        fields: dict[str, Any] = json.loads(data)
        chunks = tuple(Chunk(**{key: _tupled(value) for key, value in chunk.items()}) for chunk in fields.pop("chunks"))
        return ShardLayout(chunks=chunks, **fields)


def _tupled(value: Any) -> Any:
    """JSON knows no tuples."""
    return tuple(value) if isinstance(value, list) else value


def flatten(state: Mapping[str, Any]) -> list[Leaf]:
    """Leaves of a nested state, named as ``torch.distributed.checkpoint`` names them."""
    leaves: list[Leaf] = []
    _collect(state.items(), "", (), leaves)
    return leaves


def _collect(children: Iterable[tuple[str | int, Any]], name: str, path: Path, leaves: list[Leaf]) -> None:
    prefix = f"{name}." if path else ""
    for key, item in children:
        way, label = (*path, key), f"{prefix}{key}"
        below = () if isinstance(item, torch.Tensor) or _is_whole(way) else _children(item)
        if below:
            _collect(below, label, way, leaves)
        else:
            leaves.append(Leaf(label, way, item))


def _is_whole(path: Path) -> bool:
    """Whether a value is kept in one piece, whatever it is: an entry of a module's state, an option of a group."""
    if path[0] == "state_dict":
        return len(path) == 2
    return len(path) == 4 and path[1] == "param_groups"


def _children(value: Any) -> list[tuple[str | int, Any]]:
    """What is below a value; lists are opened only when there is something to find in them."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list) and any(isinstance(item, (Mapping, list, torch.Tensor)) for item in value):
        return list(enumerate(value))
    return []


def is_staged(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value's bytes are copied to their place in the file; all others are pickled by ``torch.save``."""
    return isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and is_dense(value))


def signature(leaves: Sequence[Leaf]) -> int:
    """Changes whenever the layout would: names, shapes, dtypes, placements. Not for other processes."""
    return hash(tuple(_trait(leaf) for leaf in leaves))


def _trait(leaf: Leaf) -> tuple[object, ...]:
    value = leaf.value
    if isinstance(value, DTensor):
        return leaf.name, sharding_spec(value)
    if is_staged(value):
        return leaf.name, value.shape, value.dtype
    return (leaf.name,)


def plan_shard(leaves: Sequence[Leaf], rank: int) -> ShardLayout:
    """This rank's layout. A piece that several ranks hold is written by exactly one of them.

    What is not sharded comes first: all ranks will need it, and side by side it is a few blocks of the file. Between
    the shards (Adam counts its steps for each parameter) it would make every rank read nearly all of rank 0's file.
    """
    ours = [leaf for leaf in leaves if is_staged(leaf.value) and _is_ours(leaf, rank)]
    ours.sort(key=lambda leaf: isinstance(leaf.value, DTensor))
    return _lay_out(ours, leaves, rank, keep=lambda chunk, leaf: math.prod(chunk.shape) > 0 or leaf.value.numel() == 0)


def plan_own(leaves: Sequence[Leaf], rank: int) -> ShardLayout:
    """The layout of every piece that this rank holds, empty ones too, whoever else holds it."""
    tensors = [leaf for leaf in leaves if is_staged(leaf.value)]
    return _lay_out(tensors, leaves, rank, keep=lambda chunk, leaf: True)


def _lay_out(
    tensors: Sequence[Leaf], leaves: Sequence[Leaf], rank: int, keep: Callable[[Chunk, Leaf], bool]
) -> ShardLayout:
    chunks: list[Chunk] = []
    end = 0
    for leaf in tensors:
        chunk = _place(leaf, _aligned(end))
        if keep(chunk, leaf):
            chunks.append(chunk)
            end = chunk.start + chunk.length
    plain = "\n".join(sorted(leaf.name for leaf in leaves if not isinstance(leaf.value, DTensor)))
    return ShardLayout(rank, tuple(chunks), _aligned(end), zlib.crc32(plain.encode()))


def _is_ours(leaf: Leaf, rank: int) -> bool:
    """Plain tensors are rank 0's, all of them: a mixture of ranks could be a state that never was."""
    if not isinstance(leaf.value, DTensor):
        return rank == 0
    turn = zlib.crc32(leaf.name.encode())
    coordinates = replica_coordinates(leaf.value)
    return coordinates is not None and all(turn % size == index for index, size in coordinates)


def _place(leaf: Leaf, start: int) -> Chunk:
    tensor = leaf.value
    offsets, shape = local_chunk(tensor)
    return Chunk(
        name=leaf.name,
        path=leaf.path,
        dtype=str(tensor.dtype),
        global_shape=tuple(tensor.shape),
        offsets=offsets,
        shape=shape,
        start=start,
        length=envelope(tensor.dtype, shape).size,
    )


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def file_name(rank: int) -> str:
    """Name of a rank's file, as stock checkpoints have it."""
    return f"__{rank}_0.distcp"


def _without_copies(layouts: Sequence[ShardLayout]) -> list[ShardLayout]:
    """Of a piece that several ranks have, the first one's: a checkpoint refers to each piece once.

    With tensor parallelism a parameter may be sharded over a mesh of some ranks, and others have it as well.
    """
    seen: set[tuple[str, tuple[int, ...]]] = set()
    result = []
    for layout in layouts:
        chunks = []
        for chunk in layout.chunks:
            is_nothing = math.prod(chunk.shape) == 0 and math.prod(chunk.global_shape) > 0
            if is_nothing or (chunk.name, chunk.offsets) in seen:
                continue
            seen.add((chunk.name, chunk.offsets))
            chunks.append(chunk)
        result.append(replace(layout, chunks=tuple(chunks)))
    return result


class GlobalLayout:
    """The metadata of all ranks' files; rank 0 has it and it changes only when a layout does.

    Args:
        layouts: One per rank.

    Raises:
        SaveError: The pieces do not make the tensors whole.
    """

    def __init__(self, layouts: Sequence[ShardLayout]) -> None:
        _check_agreement(layouts)
        self._paths: dict[str, Path] = {}
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._storage: dict[MetadataIndex, Any] = {}
        self._same: dict[Any, Any] = {}
        for layout in _without_copies(layouts):
            for chunk in layout.chunks:
                self._add(chunk, file_name(layout.rank))
        for name, tensor in self._tensors.items():
            _check_whole(name, tensor)

    @functools.lru_cache(maxsize=4)  # noqa: B019  # one instance per layout, and it ends with it
    def encode(self, values: tuple[tuple[str, Path, int, int], ...], folder: str = "") -> bytes:
        """The ``.metadata`` file.

        Args:
            values: Name, path, start and length of every value in rank 0's file that is not a tensor.
            folder: Where the ranks' files lie, if not beside it.
        """
        storage = dict(self._storage)
        for name, _, start, length in values:
            storage[MetadataIndex(name)] = storage_info(file_name(0), start, length)
        if folder:
            storage = {
                index: storage_info(f"{folder}/{info.relative_path}", info.offset, info.length)
                for index, info in storage.items()
            }
        metadata = Metadata(
            state_dict_metadata={**self._tensors, **{name: BytesStorageMetadata() for name, *_ in values}},
            planner_data={**self._paths, **{name: path for name, path, *_ in values}},
            storage_data=storage,
            storage_meta=StorageMeta(),
            version="1.0.0",
        )
        return pickle.dumps(metadata)

    def _one(self, value: Any) -> Any:
        """An equal value that was met before: pickled once, and referred to ever after."""
        return self._same.setdefault(value, value)

    def _add(self, chunk: Chunk, file: str) -> None:
        name, offsets = self._one(chunk.name), self._one(torch.Size(chunk.offsets))
        tensor = self._tensors.setdefault(
            name,
            TensorStorageMetadata(
                properties=_properties(chunk.dtype),
                size=self._one(torch.Size(chunk.global_shape)),
                chunks=[],
            ),
        )
        index = MetadataIndex(name, offsets, len(tensor.chunks))
        tensor.chunks.append(ChunkStorageMetadata(offsets, self._one(torch.Size(chunk.shape))))
        self._storage[index] = storage_info(file, chunk.start, chunk.length)
        self._paths[name] = chunk.path


@functools.cache
def _properties(dtype: str) -> TensorProperties:
    """One instance per dtype: a thousand equal ones would be pickled a thousand times."""
    return TensorProperties(dtype=torch_dtype(dtype))


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that prints as ``name``."""
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def _check_agreement(layouts: Sequence[ShardLayout]) -> None:
    odd = [layout.rank for layout in layouts if layout.plain != layouts[0].plain]
    if odd:
        raise SaveError(
            f"ranks {odd} hold other unsharded tensors than rank 0, and a checkpoint keeps only rank 0's: every"
            " rank must have the same parameters, buffers and optimizer entries, or shard them as DTensors"
        )


def _check_whole(name: str, tensor: TensorStorageMetadata) -> None:
    held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    if held != math.prod(tensor.size):
        raise SaveError(
            f"the ranks hold {held} of the {math.prod(tensor.size)} elements of {name!r} (shape"
            f" {tuple(tensor.size)}): it is not sharded over the mesh as its placements say"
        )
