"""Local and shared POSIX file systems: bytes become durable, and a checkpoint appears in one step.

Knows files, not checkpoints. Nothing here calls ``os.sync()``: only what we wrote is flushed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from lightning_resilience.checkpoint.digest import Digest, new_digest
from lightning_resilience.checkpoint.storage.protocol import Entry, hidden, no_progress, no_tail

_CHUNK = 1 << 20  # hashed while it is in the cache, then written
_DIRECT = 4 << 20  # written past the page cache; larger pieces were no faster
_WORTH_IT = 8 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
REPLACED = ".replaced"
REMOVED = ".removed"


@dataclass(frozen=True)
class LocalStorage:
    """See :class:`~lightning_resilience.checkpoint.storage.protocol.Storage`; has no state."""

    @property
    def renames(self) -> bool:
        """Directories are moved in one step."""
        return True

    @property
    def retried(self) -> int:
        """Nothing is tried again: what goes wrong here is not passing."""
        return 0

    def entries(self, directory: str) -> list[Entry]:
        """Names that vanish while they are looked at are left out."""
        try:
            with os.scandir(directory) as scan:
                found = [_entry(item) for item in scan]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [entry for entry in found if entry is not None]

    def stat(self, path: str) -> Entry | None:
        """A link that leads nowhere is nothing."""
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        is_link = os.path.islink(path)
        return Entry(os.path.basename(path), status.st_size, status.st_mtime, S_ISDIR(status.st_mode), is_link)

    def read(self, path: str) -> bytes:
        """The file's bytes."""
        with open(open_file(path), "rb", buffering=0) as file:
            return file.read()

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """With as few calls as the kernel allows."""
        with open(open_file(path), "rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < len(buffer) and (count := file.readinto(buffer[done:])):
                done += count
        return done

    def resolved(self, path: str) -> str:
        """All links followed."""
        return os.path.realpath(path)

    def make_directory(self, path: str) -> None:
        """With its parents."""
        os.makedirs(path, exist_ok=True)

    def write(
        self,
        path: str,
        data: memoryview,
        tail: Callable[[str], bytes] = no_tail,
        held_back: int = 0,
        progress: Callable[[], None] = no_progress,
    ) -> str:
        """Past the page cache where that pays, and flushed to the device."""
        return write_durably(path, data, tail, held_back, progress)

    def put(self, path: str, data: bytes) -> None:
        """Under another name first."""
        draft = f"{path}.draft-{os.getpid()}"
        write_durably(draft, memoryview(data))
        os.rename(draft, path)
        flush_directory(Path(path).parent)

    def is_being_written(self, path: str) -> bool:
        """The writer holds a lock on the file, also from another host that shares the file system."""
        return is_being_written(path)

    def publish(self, source: str, target: str) -> None:
        """By a rename, or by exchanging two names."""
        put_in_place(Path(source), Path(target))

    def delete(self, path: str) -> None:
        """A directory loses its name before its content."""
        with contextlib.suppress(FileNotFoundError):
            delete(Path(path))

    def forget_uploads(self, path: str, before: float) -> None:
        """There is nothing out of sight here."""


def open_file(path: str, *, follow: bool = True) -> int:
    """A descriptor to read a regular file; never waits, as opening a pipe that somebody put there would.

    Args:
        path: The file.
        follow: Whether a link may stand for it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    if not S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a file", path)
    return fd


def _entry(item: os.DirEntry[str]) -> Entry | None:
    try:
        status = item.stat(follow_symlinks=False)
        return Entry(item.name, status.st_size, status.st_mtime, item.is_dir(), item.is_symlink())
    except FileNotFoundError:
        return None


def write_durably(
    path: str | Path,
    data: memoryview,
    tail: Callable[[str], bytes] = no_tail,
    held_back: int = 0,
    progress: Callable[[], None] = no_progress,
) -> str:
    """Write ``data`` to a new file, flush it to the device and return the digest of ``data``; see ``Storage.write``.

    Args:
        path: The file; an unfinished one of an earlier try is overwritten.
        data: What to write.
        tail: Makes the last bytes of the file from the digest.
        held_back: How many bytes at the end of ``data`` the tail replaces; they are not part of the digest.
        progress: Called after each piece.
    """
    body = data[: len(data) - held_back]
    digest = new_digest(held_back)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # says that somebody is still writing it
        _reserve(fd, len(data))
        done = _write_directly(path, body, digest, progress) if len(body) >= _WORTH_IT else 0
        os.lseek(fd, done, os.SEEK_SET)
        for start in range(done, len(body), _CHUNK):
            chunk = body[start : start + _CHUNK]
            digest.update(chunk)
            _write_all(fd, chunk)
            progress()
        _write_all(fd, memoryview(tail(digest.hexdigest())))
        os.fsync(fd)
    finally:
        os.close(fd)
    return digest.hexdigest()


def _write_directly(path: str | Path, body: memoryview, digest: Digest, progress: Callable[[], None]) -> int:
    """Write whole pages past the page cache, and return how many bytes that were.

    Copying into the cache costs more processor time than everything else here, and training is what it is taken
    from. A file system that does not know it, or memory that is not aligned, leaves the rest to the caller.
    """
    done = 0
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return done
    try:
        while len(body) - done >= _DIRECT:
            piece = body[done : done + _DIRECT]
            if os.write(fd, piece) != _DIRECT:
                break  # nearly full, or a signal: written once more, by whoever can tell why
            for start in range(0, _DIRECT, _CHUNK):
                digest.update(piece[start : start + _CHUNK])
            done += _DIRECT
            progress()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)
    return done


def is_being_written(path: str | Path) -> bool:
    """Whether a process, on this host or one that shares the file system, is in :func:`write_durably` for it."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def flush_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def put_in_place(source: Path, target: Path) -> None:
    """Make ``source`` appear as ``target`` in one step, replacing what is there only then.

    At no instant is there a moment without a valid ``target`` if there was one before: where the file system
    cannot exchange two names, the old one keeps a name of its own that restore also looks at.
    """
    if not os.path.lexists(target):
        os.rename(source, target)
    elif _exchange(source, target):
        delete(source)
    else:
        aside = target.with_name(hidden(target.name, uuid.uuid4().hex[:8] + REPLACED))
        os.rename(target, aside)
        os.rename(source, target)
        delete(aside)
    flush_directory(target.parent)


def link(target: Path, name: Path) -> None:
    """Make ``name`` a symbolic link to ``target``, in one step; what had that name is deleted.

    The link is relative, so that the directory can be moved.

    Raises:
        FileNotFoundError: There is no target.
    """
    if os.path.abspath(target) == os.path.abspath(name):
        return
    target.lstat()
    draft = name.with_name(f".{name.name}.{uuid.uuid4().hex[:8]}{REMOVED}")  # if killed now, a later start deletes it
    os.symlink(os.path.relpath(target, name.parent), draft)
    put_in_place(draft, name)


def delete(path: Path) -> None:
    """Delete a file or a directory so that no half of it keeps a valid name."""
    if path.is_dir() and not path.is_symlink():
        doomed = path.with_name(hidden(path.name, uuid.uuid4().hex[:8] + REMOVED))
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


def _reserve(fd: int, size: int) -> None:
    """Fail for want of space before writing rather than after."""
    if size == 0:
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _write_all(fd: int, data: memoryview) -> None:
    while len(data) > 0:
        data = data[os.write(fd, data) :]


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically; False where kernel or file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(first), os.fsencode(second)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(second))
