"""The files of one checkpoint directory, opened with care: only plain files, only those the manifest proves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import xxhash

from lightning_resilience.checkpoint.digest import BLOCK, pieces
from lightning_resilience.checkpoint.manifest import Manifest, read_manifest
from lightning_resilience.checkpoint.storage import LocalStorage, Place
from lightning_resilience.checkpoint.storage.local import open_file
from lightning_resilience.errors import DamagedCheckpointError, UntrustedCheckpointError

_MAX_SMALL = 2 << 30
_MAX_BUFFERS = 512  # of one call; the kernel takes 1024


class Source(Protocol):
    """An open file. Called from several threads at once.

    Attributes:
        step: How many bytes are best read with one call.
    """

    step: int

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, in order, from the file's byte ``offset`` on.

        Raises:
            DamagedCheckpointError: The file ends before.
        """
        ...

    def close(self) -> None:
        """Nothing is read any more."""
        ...


class CheckpointFiles:
    """What lies in a checkpoint directory, and what proves it.

    Args:
        place: The directory.
        manifest: Names every file that counts, with its size and digest; None where another tool wrote it.
        trust: Follow links to wherever they lead.
    """

    def __init__(self, place: Place, manifest: Manifest | None, trust: bool) -> None:
        self.place = place
        self.manifest = manifest
        self._trust = trust

    def within(self, path: str) -> str:
        """The name of a file that the metadata refers to by its path from the checkpoint, the folder included."""
        folder = self.manifest.folder if self.manifest is not None else ""
        return path.removeprefix(f"{folder}/") if folder else path

    @property
    def are_local(self) -> bool:
        """Whether the kernel copies their bytes, rather than a client of some service."""
        return isinstance(self.place.storage, LocalStorage)

    def has(self, name: str) -> bool:
        """Whether the file is part of the checkpoint."""
        return (self.place / name).exists() if self.manifest is None else name in self.manifest.files

    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            DamagedCheckpointError: It is not there, or not part of the checkpoint.
            UntrustedCheckpointError: Its name leads out of the checkpoint.
        """
        if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise UntrustedCheckpointError(f"{self.place} names a file outside of it: {name!r}; it was tampered with")
        if self.manifest is not None:
            if name not in self.manifest.files:
                raise DamagedCheckpointError(f"{self.place / name} is needed, and the manifest does not know it")
            return self.manifest.files[name].size
        found = (self.place / name).stat()
        if found is None:
            raise DamagedCheckpointError(f"{self.place / name} is missing: the save was not finished")
        return found.size

    def pieces(self, name: str) -> list[tuple[int, int, str]]:
        """Start, end and digest of each part that can be verified alone; the digest is empty where there is none."""
        size = self.size(name)
        if self.manifest is not None:
            return pieces(size, self.manifest.files[name].xxh3)
        return [(start, min(start + BLOCK, size), "") for start in range(0, size, BLOCK)]

    def open(self, name: str) -> Source:
        """Open a file that is large.

        Raises:
            DamagedCheckpointError: It is missing, or no file.
            UntrustedCheckpointError: It is a link.
        """
        self.size(name)
        file = self.place / name
        if self.are_local:
            return LocalSource(file, self._trust)
        return RemoteSource(file)

    def read(self, name: str) -> bytes:
        """All of a small file, verified.

        Raises:
            DamagedCheckpointError: It does not hold what was written.
            UntrustedCheckpointError: It is a link, or its size is absurd.
        """
        size = self.size(name)
        if size > _MAX_SMALL:
            raise UntrustedCheckpointError(f"{self.place / name} has {size} bytes, which no such file needs")
        source = self.open(name)
        try:
            data = bytearray(size)
            source.read(0, [memoryview(data)])
        finally:
            source.close()
        for start, stop, digest in self.pieces(name):
            if digest and xxhash.xxh3_64_hexdigest(memoryview(data)[start:stop]) != digest:
                raise altered(self.place / name)
        return bytes(data)


def files_at(place: Place, trust: bool) -> CheckpointFiles:
    """The files of the checkpoint there.

    Raises:
        DamagedCheckpointError: Its manifest is not what was written.
    """
    manifest = read_manifest(place)
    return CheckpointFiles(place / manifest.folder if manifest and manifest.folder else place, manifest, trust)


class LocalSource:
    """A file of the local file system, read straight into where its bytes belong.

    Args:
        file: The file.
        trust: Follow a link.
    """

    step = 1 << 20  # hashed while it is still in the processor's cache

    def __init__(self, file: Place, trust: bool) -> None:
        self._file = file
        self._fd = open_plain(file.path, follow=trust)

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """See :class:`Source`; the kernel copies, and Python's lock is free meanwhile."""
        left = [buffer for buffer in buffers if len(buffer)]
        while left:
            count = os.preadv(self._fd, left[:_MAX_BUFFERS], offset)
            if count == 0:
                raise ends_early(self._file)
            offset += count
            left = _after(left, count)

    def close(self) -> None:
        """See :class:`Source`."""
        os.close(self._fd)


class RemoteSource:
    """A file of another storage: one request for all that is asked for at a time.

    Args:
        file: The file.
    """

    step = BLOCK

    def __init__(self, file: Place) -> None:
        self._file = file

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """See :class:`Source`."""
        only = buffers[0] if len(buffers) == 1 else None
        whole = memoryview(bytearray(sum(map(len, buffers)))) if only is None else only
        if self._file.read_into(offset, whole) < len(whole):
            raise ends_early(self._file)
        if only is None:
            for buffer in buffers:
                buffer[:] = whole[: len(buffer)]
                whole = whole[len(buffer) :]

    def close(self) -> None:
        """Nothing is open."""


def open_plain(path: str, *, follow: bool) -> int:
    """A descriptor for a regular file; never waits, as opening a pipe would.

    Raises:
        DamagedCheckpointError: There is nothing, or something else than a file.
        UntrustedCheckpointError: It is a link and shall not be followed.
    """
    try:
        return open_file(path, follow=follow)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing") from None
    except OSError as error:
        if os.path.islink(path):
            raise UntrustedCheckpointError(
                f"{path} is a link, and where it leads is not part of the checkpoint. Put the file itself there, or"
                " pass AsyncCheckpointIO(trust=True) if you made the link."
            ) from None
        raise DamagedCheckpointError(f"{path} cannot be opened: {error.strerror}") from error


def altered(file: Place) -> DamagedCheckpointError:
    """The error for bytes that are not those that were written."""
    return DamagedCheckpointError(f"{file} does not hold what was written: its checksum differs")


def ends_early(file: Place) -> DamagedCheckpointError:
    """The error for a file that is too short."""
    return DamagedCheckpointError(f"{file} ends before it is complete")


def _after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers when ``count`` bytes have come."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
