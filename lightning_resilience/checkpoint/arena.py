"""The arena: one shared-memory file per rank that holds a rank's part of a checkpoint until it is on storage.

Runs in the training process. The slots are allocated and their pages touched once, by a thread, before the
first save needs them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import uuid
from pathlib import Path

from lightning_resilience.checkpoint.snapshots import leftovers
from lightning_resilience.checkpoint.warm_memory import WarmMemory, create_file, require_room

PREFIX = "lightning-resilience-"


class Arena:
    """``slots`` equal regions of shared memory, backed by one file with one descriptor.

    Owned by the checkpoint engine of one rank, used by its training thread only; the writer process maps the
    same file. Lives until :meth:`close`, or until both processes are gone and another arena sweeps it.

    Args:
        directory: A directory on tmpfs.
        slot_bytes: Size of a slot in bytes; rounded up to whole pages.
        slots: How many.
        label: Goes into the file's name, for people who look at it.

    Raises:
        ArenaError: The directory has no room, or cannot be written.
    """

    def __init__(self, directory: str, slot_bytes: int, slots: int, label: str) -> None:
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.slots = slots
        self.path = str(Path(directory) / f"{PREFIX}{label}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        sweep(directory)
        leftovers.sweep(directory)
        leftovers.make_room(directory, self.size)
        require_room(directory, self.size)
        self._memory = WarmMemory(create_file(self.path), self.size, directory)
        self.memory = self._memory.bytes

    @property
    def size(self) -> int:
        """Bytes of all slots together."""
        return self.slot_bytes * self.slots

    def ready(self) -> None:
        """Wait until every page is there.

        Raises:
            ArenaError: The memory could not be had after all.
        """
        self._memory.ready()

    def close(self, keep_file: bool = False) -> None:
        """Give the memory back. Views of it that are still held keep it alive until they are dropped.

        Args:
            keep_file: Leave the file to the writer, which has not finished with it and deletes it then.
        """
        if not keep_file:
            Path(self.path).unlink(missing_ok=True)
        self._memory.close()


def sweep(directory: str) -> list[str]:
    """Remove arenas whose rank and writer are both gone; returns their paths.

    Both hold a shared lock on the file for as long as they live, whatever ends them.
    """
    removed = []
    for path in Path(directory).glob(f"{PREFIX}*"):
        if path.name.startswith(leftovers.PREFIX):  # they wait for a successor
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone by now
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(str(path))
        except OSError:  # somebody holds it
            continue
        finally:
            os.close(fd)
    return removed
