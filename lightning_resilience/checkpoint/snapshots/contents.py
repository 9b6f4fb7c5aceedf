"""What a slot holds, written and read: this rank's own tensors, values and small files.

Unlike a checkpoint's, the part of a rank is complete in itself: pieces that other ranks hold too, plain tensors and
values are in it as this rank has them. So a successor needs nothing from anybody else, and gets back exactly what its
predecessor had.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from lightning_resilience._torch import local_chunk
from lightning_resilience.checkpoint.envelope import envelope
from lightning_resilience.checkpoint.layout import Chunk, Leaf, Path, ShardLayout, torch_dtype
from lightning_resilience.checkpoint.reader import load_archive
from lightning_resilience.checkpoint.snapshots.file import Part, Snapshot
from lightning_resilience.checkpoint.staging import Slot, needed_bytes, page_aligned
from lightning_resilience.checkpoint.values import archived
from lightning_resilience.errors import MismatchedCheckpointError

INDEX, VALUES = "index", "values"
RANK_STATE = "rank.pt"


@dataclass(frozen=True)
class Small:
    """Everything of a state but its tensors, by name of the part; ``layout`` says where the tensors lie."""

    layout: ShardLayout
    parts: Mapping[str, bytes]

    @property
    def needed(self) -> int:
        """How big a slot must be."""
        return needed_bytes(self.layout, (), self.parts)

    def put(self, slot: Slot) -> dict[str, Part]:
        """Copy it behind the tensors."""
        found: dict[str, Part] = {}
        end = self.layout.size
        for name, data in self.parts.items():
            start = page_aligned(end)
            slot.put(start, data)
            found[name] = Part(start, len(data), xxhash.xxh3_64_hexdigest(data))
            end = start + len(data)
        return found


def pack(layout: ShardLayout, index: bytes, others: Sequence[Leaf], files: Mapping[str, bytes]) -> Small:
    """The small parts of a state.

    Args:
        layout: Of its tensors.
        index: The layout, encoded.
        others: What is not a tensor.
        files: Small files of this rank.
    """
    data = [archived(leaf.value) for leaf in others]
    places, start = [], 0
    for leaf, value in zip(others, data, strict=True):
        places.append((leaf.name, leaf.path, start, len(value)))
        start += len(value)
    head = json.dumps(places).encode()
    values = b"".join([len(head).to_bytes(8, "little"), head, *data])
    return Small(layout, {INDEX: index, VALUES: values, **files})


class SnapshotReader:
    """The tensors and values of one snapshot: to ``restore`` it looks like the reader of a checkpoint.

    Args:
        slot: Where it lies.
        snapshot: What its header says.
        parts: Its small parts.
    """

    def __init__(self, slot: Slot, snapshot: Snapshot, parts: Mapping[str, bytes]) -> None:
        self._slot = slot
        self._label = f"the snapshot of step {snapshot.step}"
        layout = ShardLayout.decode(parts[INDEX])
        self._chunks = {chunk.name: chunk for chunk in layout.chunks}
        self._values, self._value_paths = _unpack(parts[VALUES])

    @property
    def names(self) -> list[str]:
        """Flat names of everything in it."""
        return [*self._chunks, *self._values]

    def path_of(self, name: str) -> tuple[str | int, ...]:
        """Way of a value through the nested state it was taken from."""
        chunk = self._chunks.get(name)
        return chunk.path if chunk else self._value_paths[name]

    def tensor_shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a whole tensor; None for a value that is not a tensor."""
        chunk = self._chunks.get(name)
        return chunk.global_shape if chunk else None

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return torch_dtype(self._chunks[name].dtype)

    def value(self, name: str, trust: bool) -> Any:
        """A value that is not a tensor."""
        return load_archive(io.BytesIO(self._values[name]), f"{self._label} ({name})", trust)

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill the pieces of tensors that this rank holds, in place.

        Raises:
            MismatchedCheckpointError: It holds others now.
        """
        with torch.no_grad():
            for name, target in targets.items():
                local = target.to_local() if hasattr(target, "to_local") else target
                chunk = self._chunks[name]
                if local_chunk(target) != (chunk.offsets, chunk.shape):
                    raise MismatchedCheckpointError(
                        f"{self._label} holds another piece of {name} than this rank has now: the sharding has"
                        " changed. Start it as it was, or remove the snapshots of the run from `shm_dir`."
                    )
                local.copy_(self._piece(chunk))

    def _piece(self, chunk: Chunk) -> torch.Tensor:
        dtype = torch_dtype(chunk.dtype)
        start = chunk.start + len(envelope(dtype, chunk.shape).prefix)
        size = math.prod(chunk.shape) * dtype.itemsize
        if size == 0:
            return torch.empty(chunk.shape, dtype=dtype)
        return self._slot.memory[start : start + size].view(dtype).view(chunk.shape)


def value_places(data: bytes) -> list[tuple[str, Path, int, int]]:
    """Name, path, start and length of each archive in the part :data:`VALUES`."""
    body = 8 + int.from_bytes(data[:8], "little")
    return [(name, tuple(way), body + start, size) for name, way, start, size in json.loads(data[8:body])]


def _unpack(data: bytes) -> tuple[dict[str, bytes], dict[str, Path]]:
    places = value_places(data)
    values = {name: data[start : start + size] for name, _, start, size in places}
    return values, {name: way for name, way, _, _ in places}
