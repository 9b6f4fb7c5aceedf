"""Shared memory whose pages are there before they are needed.

Copying into fresh pages is ten times slower than into warm ones, so a thread touches them all once.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from lightning_resilience.errors import ArenaError

_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels answer EINVAL
_CHUNK = 64 << 20


class WarmMemory:
    """A file on tmpfs, mapped as a whole. Owned by one rank; closes the descriptor it was given.

    Args:
        fd: The file.
        size: How long it shall be, in bytes.
        where: Its directory, for an error.
    """

    def __init__(self, fd: int, size: int, where: str) -> None:
        self.fd, self.size, self._where = fd, size, where
        os.ftruncate(fd, size)
        self.bytes = mmap.mmap(fd, size)
        self._failure: OSError | None = None
        self._closing = False
        self._warming = threading.Thread(target=self._warm, name="lightning-resilience-arena", daemon=True)
        self._warming.start()

    def ready(self) -> None:
        """Wait until every page is there.

        Raises:
            ArenaError: The memory could not be had after all.
        """
        self._warming.join()
        if self._failure is not None:
            raise no_room(self._where, self.size, str(self._failure)) from self._failure

    def close(self) -> None:
        """Give it back. Views of it that are still held keep it alive until they are dropped."""
        self._closing = True
        self._warming.join()
        os.close(self.fd)

    def _warm(self) -> None:
        try:
            for offset in range(0, self.size, _CHUNK):
                if self._closing:
                    return
                length = min(_CHUNK, self.size - offset)
                # Without the allocation a full tmpfs would be a SIGBUS in the middle of a copy.
                os.posix_fallocate(self.fd, offset, length)
                _populate(self.bytes, offset, length)
        except OSError as error:
            self._failure = error.with_traceback(None)  # which holds this object, and so the memory


def create_file(path: str, lock: Callable[[int], None] = lambda fd: None) -> int:
    """Create the file and lock it (shared) before it has a name that another rank would sweep.

    Args:
        path: Its name.
        lock: Locks the descriptor in another way as well.

    Raises:
        ArenaError: The directory cannot be written.
    """
    draft = str(Path(path).with_name("." + Path(path).name))
    try:
        fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ArenaError(
            f"cannot create the staging file {path}: {error.strerror}. Pass AsyncCheckpointIO(shm_dir=...) a"
            " writable directory on a memory file system."
        ) from error
    fcntl.flock(fd, fcntl.LOCK_SH)
    lock(fd)
    os.rename(draft, path)
    return fd


def require_room(directory: str, needed: int) -> None:
    """Raise an ``ArenaError`` unless this many bytes are free."""
    try:
        stat = os.statvfs(directory)
    except OSError as error:
        raise ArenaError(
            f"the staging directory {directory} cannot be used: {error.strerror}. Pass"
            " AsyncCheckpointIO(shm_dir=...) an existing directory on a memory file system."
        ) from error
    if needed > stat.f_bavail * stat.f_frsize:
        raise no_room(directory, needed, f"{_gib(stat.f_bavail * stat.f_frsize)} are free")


def no_room(directory: str, needed: int, why: str) -> ArenaError:
    """The error that says how to get more."""
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
