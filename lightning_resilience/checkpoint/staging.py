"""The one copy out of training: from wherever the state lives into a slot of the arena.

Runs on the training thread. A slot holds the finished bytes of this rank's files, one after the other, so the
writer only has to move them to storage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from lightning_resilience._torch import cuda_in_use, foreach_copy
from lightning_resilience.checkpoint.envelope import envelope
from lightning_resilience.checkpoint.layout import Leaf, ShardLayout, file_name, is_staged, torch_dtype
from lightning_resilience.checkpoint.messages import FileImage

_PAGE = 4096


@dataclass(eq=False)
class Slot:
    """One region of the arena.

    Attributes:
        offset: Where it starts in the arena.
        memory: Its bytes, as a tensor.
        bytes: The same, as a buffer.
        request_id: The last save that was staged here; the writer may still be reading it.
        layout: Whose envelopes lie here, so that they are written only once.
        destinations: Where each tensor of that layout goes, in order.
    """

    offset: int
    memory: torch.Tensor
    request_id: int | None = None
    layout: ShardLayout | None = None
    destinations: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bytes: memoryview = self.memory.numpy().data

    def prepare(self, layout: ShardLayout) -> None:
        """Put the layout's envelopes in place unless they are there."""
        if self.layout is layout:
            return
        self.layout = layout
        self.destinations = []
        for chunk in layout.chunks:
            dtype = torch_dtype(chunk.dtype)
            cover = envelope(dtype, chunk.shape)
            data = chunk.start + len(cover.prefix)
            self.put(chunk.start, cover.prefix)
            self.put(data + cover.nbytes, cover.suffix)
            self.destinations.append(self._room(data, dtype, chunk.shape) if cover.nbytes else torch.empty(chunk.shape))

    def _room(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return self.memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def put(self, position: int, data: bytes) -> None:
        """Copy a few bytes to a position of the slot."""
        self.bytes[position : position + len(data)] = data


def stage_shard(
    slot: Slot, layout: ShardLayout, tensors: Mapping[str, torch.Tensor], values: Sequence[bytes]
) -> FileImage:
    """Stage this rank's ``.distcp`` file.

    Args:
        slot: Where to; big enough.
        layout: This rank's pieces.
        tensors: The state by flat name; every name of the layout is in it.
        values: Archives of the values that are not tensors, which follow the tensors (rank 0 only).
    """
    slot.prepare(layout)
    with torch.no_grad():
        sources = [local_part(tensors[chunk.name]) for chunk in layout.chunks]
    copy_all(slot.destinations, sources)
    end = layout.size
    for value in values:
        slot.put(end, value)
        end += len(value)
    return FileImage(file_name(layout.rank), slot.offset, end)


def stage_files(slot: Slot, start: int, files: Mapping[str, bytes]) -> list[FileImage]:
    """Stage small files behind what is in the slot already."""
    images = []
    for name, data in files.items():
        start = page_aligned(start)
        slot.put(start, data)
        images.append(FileImage(name, slot.offset + start, len(data)))
        start += len(data)
    return images


def needed_bytes(layout: ShardLayout, values: Sequence[bytes], files: Mapping[str, bytes]) -> int:
    """How big a slot must be for all this."""
    end = layout.size + sum(map(len, values))
    for data in files.values():
        end = page_aligned(end) + len(data)
    return end


def page_aligned(position: int) -> int:
    """The next multiple of the page size."""
    return -(-position // _PAGE) * _PAGE


def copy_all(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its destination and wait until the bytes are there."""
    devices = {source.device for source in sources if source.is_cuda} if cuda_in_use() else set()
    foreach_copy(destinations, sources, non_blocking=bool(devices))
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


class SlotFile:
    """A file to ``torch.save`` into a slot. What does not fit is counted and dropped: look at ``fits``."""

    def __init__(self, slot: Slot) -> None:
        slot.layout = None  # its envelopes are overwritten
        self._memory = slot.bytes
        self.size = 0

    @property
    def fits(self) -> bool:
        """Whether everything that was written is there."""
        return self.size <= len(self._memory)

    def write(self, data: bytes) -> int:
        """Append; one copy, at memory speed."""
        view = memoryview(data).cast("B")
        if self.size + len(view) <= len(self._memory):
            self._memory[self.size : self.size + len(view)] = view
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is buffered."""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def leaves_by_kind(leaves: Sequence[Leaf]) -> tuple[dict[str, torch.Tensor], list[Leaf]]:
    """Tensors that are copied, by flat name, and the rest."""
    tensors: dict[str, torch.Tensor] = {}
    others = []
    for leaf in leaves:
        if is_staged(leaf.value):
            tensors[leaf.name] = leaf.value
        else:
            others.append(leaf)
    return tensors, others
