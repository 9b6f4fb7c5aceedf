"""The arena: one shared-memory file per rank that holds a rank's part of a checkpoint until it is on storage.

Runs in the training process. The slots are allocated and their pages touched once, by a thread, before the
first save needs them: copying into fresh pages is ten times slower than into warm ones.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
import uuid
from pathlib import Path

from lightning_resilience.errors import ArenaError

log = logging.getLogger(__name__)

PREFIX = "lightning-resilience-"
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels answer EINVAL
_CHUNK = 64 << 20


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
        _require_room(directory, self.size)
        self._fd = _create(self.path)
        self._failure: OSError | None = None
        os.ftruncate(self._fd, self.size)
        self.memory = mmap.mmap(self._fd, self.size)
        self._warming = threading.Thread(target=self._warm, name="lightning-resilience-arena", daemon=True)
        self._closing = False
        self._warming.start()

    @property
    def size(self) -> int:
        """Bytes of all slots together."""
        return self.slot_bytes * self.slots

    def ready(self) -> None:
        """Wait until every page is there.

        Raises:
            ArenaError: The memory could not be had after all.
        """
        self._warming.join()
        if self._failure is not None:
            raise _no_room(os.path.dirname(self.path), self.size, str(self._failure)) from self._failure

    def close(self, keep_file: bool = False) -> None:
        """Give the memory back. Views of it that are still held keep it alive until they are dropped.

        Args:
            keep_file: Leave the file to the writer, which has not finished with it and deletes it then.
        """
        self._closing = True
        self._warming.join()
        if not keep_file:
            Path(self.path).unlink(missing_ok=True)
        os.close(self._fd)

    def _warm(self) -> None:
        try:
            for offset in range(0, self.size, _CHUNK):
                if self._closing:
                    return
                length = min(_CHUNK, self.size - offset)
                # Without the allocation a full tmpfs would be a SIGBUS in the middle of a copy.
                os.posix_fallocate(self._fd, offset, length)
                _populate(self.memory, offset, length)
        except OSError as error:
            self._failure = error


def sweep(directory: str) -> list[str]:
    """Remove arenas whose rank and writer are both gone; returns their paths.

    Both hold a shared lock on the file for as long as they live, whatever ends them.
    """
    removed = []
    for path in Path(directory).glob(f"{PREFIX}*"):
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


def _create(path: str) -> int:
    """Create the file and lock it before it has a name that another rank would sweep."""
    draft = str(Path(path).with_name("." + Path(path).name))
    try:
        fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ArenaError(
            f"cannot create the staging file {path}: {error.strerror}. Pass AsyncCheckpointIO(shm_dir=...) a"
            " writable directory on a memory file system."
        ) from error
    fcntl.flock(fd, fcntl.LOCK_SH)
    os.rename(draft, path)
    return fd


def _require_room(directory: str, needed: int) -> None:
    try:
        stat = os.statvfs(directory)
    except OSError as error:
        raise ArenaError(
            f"the staging directory {directory} cannot be used: {error.strerror}. Pass"
            " AsyncCheckpointIO(shm_dir=...) an existing directory on a memory file system."
        ) from error
    if needed > stat.f_bavail * stat.f_frsize:
        raise _no_room(directory, needed, f"{_gib(stat.f_bavail * stat.f_frsize)} are free")


def _no_room(directory: str, needed: int, why: str) -> ArenaError:
    return ArenaError(
        f"staging checkpoints needs {_gib(needed)} in {directory} for this rank, and {why}. In a container give"
        " it more shared memory (Docker: --shm-size=64g; Kubernetes: an emptyDir volume with medium: Memory at"
        " /dev/shm), or pass AsyncCheckpointIO(shm_dir=...) another memory file system."
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _populate(memory: mmap.mmap, offset: int, length: int) -> None:
    """Put the pages into this process's page table; ctypes lets other threads run meanwhile."""
    anchor = ctypes.c_char.from_buffer(memory, offset)
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.madvise(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
    if result != 0 and ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
