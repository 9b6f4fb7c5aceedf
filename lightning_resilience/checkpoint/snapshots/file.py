"""One rank's snapshots in shared memory: a file with two slots, each behind a header that says what lies in it.

The newest complete snapshot is never touched: a new one goes to the other slot, whose header is void from before the
first byte is copied until after the last. So a kill at any instant leaves the older or the newer one, never a mixture.

The file outlives its rank. Whoever runs as that rank next finds it by name and takes it over; the owner holds a POSIX
lock on it, which ends with the process whatever became of the processes it has forked.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import mmap
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from lightning_resilience._torch import cuda_in_use, pin, unpin
from lightning_resilience.checkpoint.layout import ShardLayout
from lightning_resilience.checkpoint.snapshots import leftovers
from lightning_resilience.checkpoint.snapshots.header import SIZE, SLOTS, Header
from lightning_resilience.checkpoint.staging import Slot
from lightning_resilience.checkpoint.warm_memory import WarmMemory, create_file, require_room

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """A run of bytes in a slot, with their xxh3 digest."""

    offset: int
    size: int
    xxh3: str


@dataclass(frozen=True)
class Snapshot:
    """What a slot's header says.

    Attributes:
        step: Optimizer steps done.
        generation: Number of the snapshot in the life of the file; the highest is the newest.
        rank: Whose state it is.
        world_size: Of how many ranks.
        tensor_bytes: Length of the tensor part, which starts the slot.
        layout: xxh3 digest of the index, which says where each tensor lies.
        parts: Everything else, by name.
        start: Which start of its run has taken it, or gone on from it.
    """

    step: int
    generation: int
    rank: int
    world_size: int
    tensor_bytes: int
    layout: str
    parts: dict[str, Part]
    start: int


class SnapshotFile:
    """Owned by one rank, used by its training thread only; made by :func:`create` or :func:`take_over`."""

    def __init__(self, path: str, fd: int, size: int) -> None:
        self.path = path
        self.slot_bytes = size // SLOTS - SIZE
        self._memory = WarmMemory(fd, size, os.path.dirname(path))
        self._bytes = torch.frombuffer(self._memory.bytes, dtype=torch.uint8)
        self._pinned = False
        self._headers = [Header(self._region(index, 0, SIZE).numpy().data) for index in range(SLOTS)]
        self.slots = [
            Slot(index * (size // SLOTS) + SIZE, self._region(index, SIZE, self.slot_bytes)) for index in range(SLOTS)
        ]
        leftovers.ours.add(path)

    @property
    def fd(self) -> int:
        """The open file."""
        return self._memory.fd

    def snapshots(self) -> list[tuple[Slot, Snapshot]]:
        """The complete ones, newest first."""
        found = [(slot, self.read(index)) for index, slot in enumerate(self.slots)]
        complete = [(slot, snapshot) for slot, snapshot in found if snapshot is not None]
        return sorted(complete, key=lambda pair: pair[1].generation, reverse=True)

    def read(self, index: int) -> Snapshot | None:
        """What lies in a slot; None while it is being filled, or when it cannot be trusted."""
        header = self._headers[index]
        body = header.read()
        if body is None:
            return None
        fields = json.loads(body)
        parts = {name: Part(**part) for name, part in fields.pop("parts").items()}
        if not all(self._is_whole(index, part) for part in parts.values()):
            return None
        return Snapshot(parts=parts, start=header.start, **fields)

    def faults(self) -> list[str]:
        """What cannot be trusted any more, by slot: only damage of the memory leaves such a thing."""
        damaged = [
            header.is_damaged or (header.read() is not None and self.read(index) is None)
            for index, header in enumerate(self._headers)
        ]
        return [f"what slot {index} of {self.path} says of its snapshot" for index, bad in enumerate(damaged) if bad]

    def lay_out(self, layout: ShardLayout) -> None:
        """Get the slots ready that hold nothing.

        Raises:
            ArenaError: The memory could not be had after all.
        """
        self._memory.ready()
        self._pin()
        for index, slot in enumerate(self.slots):
            if self.read(index) is None:
                slot.prepare(layout)

    def begin(self) -> Slot:
        """The slot for the next snapshot, whose old content is void from now on.

        Raises:
            ArenaError: The memory could not be had after all.
        """
        self._memory.ready()
        self._pin()
        newest = next((slot for slot, _ in self.snapshots()), None)
        slot = next(slot for slot in self.slots if slot is not newest)
        self._headers[self.slots.index(slot)].void()
        return slot

    def complete(self, slot: Slot, snapshot: Snapshot) -> None:
        """Everything is there: from now on the slot holds this snapshot."""
        fields = dataclasses.asdict(snapshot)
        del fields["start"]
        self._headers[self.slots.index(slot)].write(json.dumps(fields).encode(), snapshot.start)
        os.utime(self._memory.fd)

    def seal(self, slot: Slot) -> int | None:
        """Digest that the tensors in a slot have had; None where no writer had the time to compute it."""
        return self._headers[self.slots.index(slot)].sealed

    def part(self, slot: Slot, part: Part) -> bytes:
        """The bytes of a part."""
        return bytes(slot.bytes[part.offset : part.offset + part.size])

    def stamp(self, step: int, start: int) -> None:
        """A new start goes on from the snapshot of this step."""
        for index in range(SLOTS):
            snapshot = self.read(index)
            if snapshot is not None and snapshot.step == step:
                self._headers[index].start = start

    def void(self, which: Callable[[int], bool] = lambda step: True) -> None:
        """Forget the snapshots of these steps, and what is none."""
        for index in range(SLOTS):
            snapshot = self.read(index)
            if snapshot is None or which(snapshot.step):
                self._headers[index].void()

    def close(self, keep: bool) -> None:
        """Let go of the memory.

        Args:
            keep: Leave the file to a successor.
        """
        if self._pinned:
            unpin(self._bytes)
        if not keep:
            Path(self.path).unlink(missing_ok=True)
        self.slots, self._headers = [], []
        leftovers.ours.discard(self.path)
        self._memory.close()

    def _is_whole(self, index: int, part: Part) -> bool:
        data = self.slots[index].bytes[part.offset : part.offset + part.size]
        return len(data) == part.size and xxhash.xxh3_64_hexdigest(data) == part.xxh3

    def _region(self, index: int, start: int, length: int) -> torch.Tensor:
        first = index * (self._memory.size // SLOTS) + start
        return self._bytes[first : first + length]

    def _pin(self) -> None:
        if not self._pinned and cuda_in_use():
            self._pinned = pin(self._bytes)


def create(directory: str, run: str, rank: int, nbytes: int) -> SnapshotFile:
    """A new file of a rank, for snapshots of this many bytes.

    Raises:
        ArenaError: There is not enough shared memory.
    """
    slot_bytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    size = SLOTS * (SIZE + slot_bytes)
    leftovers.make_room(directory, size)
    require_room(directory, size)
    path = str(Path(directory) / f"{leftovers.PREFIX}{run}-rank{rank}-{uuid.uuid4().hex[:8]}")
    fd = create_file(path, lock=lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX))
    return SnapshotFile(path, fd, size)


def take_over(directory: str, run: str, rank: int) -> SnapshotFile | None:
    """The file that a rank's dead predecessor has left; of several, the one with the newest snapshot."""
    taken = [file for path in leftovers.files(directory, f"{run}-rank{rank}-") if (file := _open(path)) is not None]
    taken.sort(key=lambda file: max((snapshot.start, snapshot.step) for _, snapshot in file.snapshots()), reverse=True)
    for file in taken[1:]:
        file.close(keep=False)
    return taken[0] if taken else None


def open_shared(path: Path) -> SnapshotFile | None:
    """Look at a file without owning it: who does may take it away at any time, and changes a header before a slot."""
    fd = leftovers.open_private(path)
    if fd is None:
        return None
    size = os.fstat(fd).st_size
    if _is_complete(size):
        return SnapshotFile(str(path), fd, size)
    os.close(fd)
    return None


def _is_complete(size: int) -> bool:
    """Whether the owner of a file of this size had finished making it."""
    return size >= SLOTS * (SIZE + mmap.PAGESIZE) and size % (SLOTS * mmap.PAGESIZE) == 0


def _open(path: Path) -> SnapshotFile | None:
    fd = leftovers.lock(path)
    if fd is None:
        return None
    size = os.fstat(fd).st_size
    if not _is_complete(size):
        path.unlink(missing_ok=True)
        os.close(fd)
        return None
    file = SnapshotFile(str(path), fd, size)
    for fault in file.faults():
        log.error("DAMAGED SNAPSHOT: %s is altered. An older state is used instead. Have the memory tested.", fault)
    if file.snapshots():
        return file
    file.close(keep=False)
    return None
