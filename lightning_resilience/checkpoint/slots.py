"""The slots of a rank's arena: which are free, which the writer still needs, and the memory behind them.

Used by the training thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

import torch

from lightning_resilience._torch import cuda_in_use, pin, unpin
from lightning_resilience.checkpoint.arena import Arena
from lightning_resilience.checkpoint.staging import Slot
from lightning_resilience.checkpoint.writer import WriterClient
from lightning_resilience.errors import WriterError

log = logging.getLogger(__name__)

SLACK = 4 << 20  # for what grows: meta files, values that are not tensors


class Slots:
    """Owned by the engine of one rank; the arena is made when its size is known, and again when it must grow.

    Args:
        directory: On a memory file system.
        count: How many states can be staged or being written at a time.
        patience_s: How long to wait for a free slot: longer than any save may take.
        label: Goes into the arena's name.
        writer: Who reads them.
    """

    def __init__(self, directory: str, count: int, patience_s: float, label: str, writer: WriterClient) -> None:
        self._directory = directory
        self._count = count
        self._patience_s = patience_s
        self._label = label
        self._writer = writer
        self._arena: Arena | None = None
        self._memory: torch.Tensor | None = None
        self._pinned = False
        self._slots: list[Slot] = []

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def reserve(self, nbytes: int) -> None:
        """Have slots of at least this size, and room for what may come on top; the memory is touched meanwhile.

        Raises:
            ArenaError: There is not enough shared memory.
        """
        if self._arena is not None and self._arena.slot_bytes >= nbytes:
            return
        self._wait(all)
        self.close()
        arena = Arena(self._directory, nbytes + SLACK, self._count, self._label)
        memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        offsets = range(0, arena.size, arena.slot_bytes)
        self._slots = [Slot(offset, memory[offset : offset + arena.slot_bytes]) for offset in offsets]
        self._arena, self._memory = arena, memory
        self._writer.attach(arena.path)

    def take(self, nbytes: int) -> Slot:
        """A slot that nobody reads, of at least this size; of several the one used longest ago.

        Raises:
            ArenaError: There is not enough shared memory.
            WriterError: The writer has not been done with any in time.
        """
        self.reserve(nbytes)
        self._wait(any)
        slot = min(self.free(), key=lambda slot: slot.request_id or -1)
        assert self._arena is not None
        self._arena.ready()
        self._pin()
        return slot

    def free(self) -> list[Slot]:
        """Those that the writer does not read."""
        return [slot for slot in self._slots if slot.request_id is None or self._writer.is_written(slot.request_id)]

    def _wait(self, how_many: Callable[[Iterable[bool]], bool]) -> None:
        """Wait until ``any`` or ``all`` slots are free."""
        ids = [slot.request_id for slot in self._slots]
        if ids and not self._writer.wait_written(ids, how_many, self._patience_s):
            raise WriterError(
                f"the writer process {self._writer.pid} has not written an earlier checkpoint in"
                f" {self._patience_s:.0f} s, so there is no room for another. Look at the storage, or raise"
                " AsyncCheckpointIO(timeout=...)."
            )

    def close(self, keep_file: bool = False) -> None:
        """Give the memory back.

        Args:
            keep_file: Leave the file to the writer, which has not finished with it and deletes it then.
        """
        if self._memory is not None and self._pinned:
            unpin(self._memory)
        self._slots, self._memory, self._pinned = [], None, False
        if self._arena is not None:
            self._arena.close(keep_file)
        self._arena = None

    def _pin(self) -> None:
        """Where there is a GPU its copies go straight into the arena."""
        if self._pinned or self._memory is None or not cuda_in_use():
            return
        self._pinned = pin(self._memory)
        if not self._pinned:
            log.warning("CUDA could not pin the staging memory: saves will stall training longer than they need to")
