"""What the checkpoint engine asks of the place where checkpoints lie, and a path on such a place.

Both processes import this file: the writer uses all of it, training and the command line read, list and delete.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import xxhash

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(::[A-Za-z][A-Za-z0-9+.\-]*)*://")


_LONGEST_NAME = 180  # bytes; what is put around it must fit into the 255 that file systems allow


def no_tail(digest: str) -> bytes:
    """Nothing follows the data."""
    return b""


def no_progress() -> None:
    """Nobody wants to know."""


class GivenUp(TimeoutError):
    """What ``progress`` raises to end a write: nobody tries again then."""


def hidden(name: str, mark: str) -> str:
    """A name that is no checkpoint's, made from that of one; the same every time, and never too long."""
    data = name.lstrip(".").encode()
    if len(data) > _LONGEST_NAME:
        data = data[:_LONGEST_NAME].decode(errors="ignore").encode() + b"~" + xxhash.xxh3_64_hexdigest(data).encode()
    return f".{data.decode()}.{mark}"


@dataclass(frozen=True)
class Entry:
    """What a listing says of one name.

    Attributes:
        name: The last part of the path.
        size: Bytes; of a directory, whatever the storage says.
        modified_s: When it was changed last, in seconds since the epoch by the clock of the storage; 0 where it does
            not say.
        is_directory: A directory or, on an object store, the common beginning of several names.
        is_link: Another name for something else (local file systems only).
    """

    name: str
    size: int
    modified_s: float
    is_directory: bool = False
    is_link: bool = False


class Storage(Protocol):
    """Where checkpoints lie. Paths are strings, whole URLs where it is remote; they never pass through ``pathlib``.

    Called by the writer process (all of it) and by training processes and the command line (all that does not
    write), there also from several threads at once. An implementation raises ``OSError`` and nothing else:
    ``FileNotFoundError`` where nothing is, others only after it has tried again what may succeed a second time.
    Neither errors nor ``repr`` show how it was told to log in.
    """

    @property
    def renames(self) -> bool:
        """Whether :meth:`publish` moves a whole directory in one step. If not, one object written last decides."""
        ...

    @property
    def retried(self) -> int:
        """How many requests have failed in passing so far and were sent again, as far as this process can know."""
        ...

    def entries(self, directory: str) -> list[Entry]:
        """What lies directly in it, as it is now; nothing when it is gone."""
        ...

    def stat(self, path: str) -> Entry | None:
        """What is at ``path``, links followed; None when nothing is."""
        ...

    def read(self, path: str) -> bytes:
        """A whole small file."""
        ...

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from the file's byte ``offset`` on; less than its length only where the file ends."""
        ...

    def resolved(self, path: str) -> str:
        """The same path without links, where there are links."""
        ...

    def make_directory(self, path: str) -> None:
        """Make it and those above it, where directories exist by themselves."""
        ...

    def write(
        self,
        path: str,
        data: memoryview,
        tail: Callable[[str], bytes] = no_tail,
        held_back: int = 0,
        progress: Callable[[], None] = no_progress,
    ) -> str:
        """Write ``data`` durably as a file, replacing what is there, and return its ``new_digest(held_back)``.

        Args:
            path: The file. On a local file system its beginning is visible meanwhile.
            data: What to write.
            tail: Makes the last bytes of the file from the digest.
            held_back: How many bytes at the end of ``data`` the tail replaces; they are not part of the digest.
            progress: Called now and then while it goes on. Raises :class:`GivenUp` to end the writing.
        """
        ...

    def put(self, path: str, data: bytes) -> None:
        """Write a small file that appears whole or not at all, replacing what is there."""
        ...

    def is_being_written(self, path: str) -> bool:
        """Whether some process is in :meth:`write` for it; False where a storage cannot tell."""
        ...

    def publish(self, source: str, target: str) -> None:
        """Make ``source`` appear as ``target`` in one step, replacing what is there only then; if it ``renames``."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file, or a directory so that no half of it can be taken for a checkpoint; nothing is no error."""
        ...

    def forget_uploads(self, path: str, before: float) -> None:
        """Drop what writers that died have uploaded in part, where a storage keeps such things out of sight.

        Args:
            path: A file, or what the names of several begin with.
            before: Only those begun earlier, in seconds since the epoch.
        """
        ...


def is_url(path: str) -> bool:
    """Whether it names something that is not a local path, such as ``s3://bucket/run``."""
    return _URL.match(path) is not None


def join(path: str, *names: str) -> str:
    """A path below another."""
    return "/".join([path.rstrip("/"), *names])


@dataclass(frozen=True)
class Place:
    """A path and the storage it is on: what ``pathlib.Path`` is to the local file system, for URLs too."""

    storage: Storage
    path: str

    def __truediv__(self, name: str) -> Place:
        return Place(self.storage, join(self.path, name))

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Place:
        """The directory it lies in."""
        return Place(self.storage, self.path.rstrip("/").rpartition("/")[0] or "/")

    def with_name(self, name: str) -> Place:
        """Another name in the same directory."""
        return self.parent / name

    def resolved(self) -> Place:
        """The same place under the name that it has without links."""
        return Place(self.storage, self.storage.resolved(self.path))

    def entries(self) -> list[Entry]:
        """See :meth:`Storage.entries`."""
        return self.storage.entries(self.path)

    def stat(self) -> Entry | None:
        """See :meth:`Storage.stat`."""
        return self.storage.stat(self.path)

    def exists(self) -> bool:
        """Whether anything is there."""
        return self.stat() is not None

    def is_dir(self) -> bool:
        """Whether it is a directory."""
        found = self.stat()
        return found is not None and found.is_directory

    def is_file(self) -> bool:
        """Whether it is a file."""
        found = self.stat()
        return found is not None and not found.is_directory

    def read(self) -> bytes:
        """See :meth:`Storage.read`."""
        return self.storage.read(self.path)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """See :meth:`Storage.read_into`."""
        return self.storage.read_into(self.path, offset, buffer)

    def write(
        self,
        data: bytes | memoryview,
        tail: Callable[[str], bytes] = no_tail,
        held_back: int = 0,
        progress: Callable[[], None] = no_progress,
    ) -> str:
        """See :meth:`Storage.write`."""
        return self.storage.write(self.path, memoryview(data), tail, held_back, progress)

    def put(self, data: bytes) -> None:
        """See :meth:`Storage.put`."""
        self.storage.put(self.path, data)

    def delete(self) -> None:
        """See :meth:`Storage.delete`."""
        self.storage.delete(self.path)
