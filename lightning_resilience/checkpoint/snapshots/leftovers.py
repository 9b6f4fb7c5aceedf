"""Snapshot files whose rank is gone: kept for a successor, for a while, and then removed by whoever comes next.

The owner of such a file holds a POSIX lock on it. Unlike the lock on an arena it ends with that process, even while
data loader workers that it has forked are still there: a successor may come within a second.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "lightning-resilience-snapshot-"
KEPT_S = 3600.0
_FOREIGN_BITS = 0o077

ours: set[str] = set()
"""Files this process owns: opening and closing one of them again would end the lock."""


def sweep(directory: str, now: float | None = None, kept_s: float = KEPT_S) -> list[str]:
    """Remove what nobody has come back for; returns the paths."""
    limit = (time.time() if now is None else now) - kept_s
    return [str(path) for path in files(directory, "") if _is_older(path, limit) and _remove_ownerless(path)]


def remove_run(directory: str, run: str) -> list[str]:
    """Remove the files of a run that no rank has taken over; returns the paths."""
    return [str(path) for path in files(directory, f"{run}-") if _remove_ownerless(path)]


def files(directory: str, name: str) -> Iterator[Path]:
    """Those of other processes; this one's are left alone, see ``ours``."""
    for path in sorted(Path(directory).glob(f"{PREFIX}{name}*")):
        if str(path) not in ours:
            yield path


def make_room(directory: str, needed: int) -> None:
    """Remove even those that might still be waited for, if there is no room for somebody who is alive."""
    if _free(directory) < needed and (removed := sweep(directory, kept_s=0.0)):
        log.warning("removed snapshots that no job has come back for, to make room: %s", ", ".join(removed))


def _free(directory: str) -> int:
    try:
        found = os.statvfs(directory)
    except OSError:  # whoever needs the room says so
        return 0
    return found.f_bavail * found.f_frsize


def lock(path: Path) -> int | None:
    """A descriptor of the file with its locks; None if it is somebody's, or not a file of ours at all."""
    fd = open_private(path)
    if fd is None:
        return None
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink == 1:  # with no name left somebody was faster
            return fd
    except OSError:  # its owner is alive
        pass
    os.close(fd)
    return None


def open_private(path: Path) -> int | None:
    """A descriptor of the file, without locks; None if it is gone, or not a file of ours at all."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # another user's, a link, or gone by now
        return None
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & _FOREIGN_BITS:
        return fd
    os.close(fd)
    return None


def _is_older(path: Path, limit: float) -> bool:
    try:
        return path.stat().st_mtime < limit
    except OSError:
        return False


def _remove_ownerless(path: Path) -> bool:
    fd = lock(path)
    if fd is None:
        return False
    path.unlink(missing_ok=True)
    os.close(fd)
    return True
