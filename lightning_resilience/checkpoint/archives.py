"""What ``torch.save`` wrote, read back without trusting it: plain data only, and nothing that swells.

``torch.load(weights_only=True)`` makes only harmless objects, but it decompresses what claims to be a petabyte, and
hashes tuples in tuples until the stack ends. Both are looked for first.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import struct
import zipfile
from datetime import timedelta
from typing import IO, Any

import torch

from lightning_resilience.checkpoint.files import open_plain
from lightning_resilience.checkpoint.pickles import PickleGuard
from lightning_resilience.checkpoint.storage import LocalStorage, Place
from lightning_resilience.errors import DamagedCheckpointError, UntrustedCheckpointError

_HARMLESS: list[Any] = [pathlib.PosixPath, pathlib.PurePosixPath, pathlib.Path, timedelta]
_MAX_PICKLE = 1 << 30
_MAX_DIRECTORY = 128 << 20  # of a zip archive: a million tensors
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_OLD_PICKLES = 5  # magic number, version, system, content, names of storages: how torch saved before 1.6


def load_archive(
    source: io.BytesIO | Place, label: str, trust: bool, *, mmap: bool = False, map_location: Any = "cpu"
) -> Any:
    """``torch.load`` that unpickles only plain data, unless told to trust the file.

    Args:
        source: The archive.
        label: What to call it in an error.
        trust: Allow any object; it can run any code.
        mmap: Map a file instead of reading it, where it is local.
        map_location: Where tensors go.

    Raises:
        UntrustedCheckpointError: It holds other objects, and is not trusted.
        DamagedCheckpointError: It is not an archive.
    """
    archive = _opened(source)
    mapped = mmap and isinstance(archive, str)
    arguments: dict[str, Any] = {"map_location": map_location, "mmap": mapped or None}
    if trust:
        return _trusting(archive, label, arguments)
    try:
        _look_through(archive)
        with torch.serialization.safe_globals(_HARMLESS):
            return torch.load(archive, weights_only=True, **arguments)
    except UntrustedCheckpointError as error:
        raise UntrustedCheckpointError(f"{label}: {error}") from None
    except pickle.UnpicklingError as error:
        raise UntrustedCheckpointError(
            f"{label} holds objects that are not plain data: {_first_line(error)} If you trust where it came"
            " from, pass AsyncCheckpointIO(trust=True); loading it can run any code."
        ) from error
    except Exception as error:  # whatever it is, these bytes are what caused it
        raise DamagedCheckpointError(f"{label} cannot be read: {_first_line(error)}") from error


def _trusting(source: io.BytesIO | str, label: str, arguments: dict[str, Any]) -> Any:
    try:
        return torch.load(source, weights_only=False, **arguments)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DamagedCheckpointError(f"{label} cannot be read: {_first_line(error)}") from error


def _opened(source: io.BytesIO | Place) -> io.BytesIO | str:
    """What ``torch.load`` takes: the name of a local file, or bytes."""
    if isinstance(source, io.BytesIO):
        return source
    return source.path if isinstance(source.storage, LocalStorage) else io.BytesIO(source.read())


def _look_through(source: io.BytesIO | str) -> None:
    """Refuse what would do harm before a class is looked up; leaves the position at the start."""
    if isinstance(source, str):
        with open(open_plain(source, follow=True), "rb") as file:
            _look_through_file(file)
    else:
        _look_through_file(source)
        source.seek(0)


def _look_through_file(file: IO[bytes]) -> None:
    start = file.read(4)
    if start.startswith(b"PK"):
        _check_zip(file)
    else:
        file.seek(0)
        _check_old_format(file.read(_MAX_PICKLE))


def _check_old_format(data: bytes) -> None:
    at = 0
    for _ in range(_OLD_PICKLES):
        guard = PickleGuard(data)
        at = guard.check(at)


def _check_zip(file: IO[bytes]) -> None:
    """Nothing in it is compressed, so nothing can become larger than the file; and its pickles are looked through."""
    size = file.seek(0, io.SEEK_END)
    if _directory_size(file, size) > _MAX_DIRECTORY:
        raise UntrustedCheckpointError("it has a directory of absurd size")
    with zipfile.ZipFile(file) as archive:
        total = 0
        for item in archive.infolist():
            total += item.file_size
            if item.compress_type != zipfile.ZIP_STORED or item.file_size != item.compress_size or total > size:
                raise UntrustedCheckpointError(
                    f"it is compressed or larger than its file ({item.filename!r}), which torch never writes"
                )
            if item.filename.lower().endswith(".pkl"):
                if item.file_size > _MAX_PICKLE:
                    raise UntrustedCheckpointError(f"it has a pickle of {item.file_size} bytes")
                PickleGuard(_content(file, item)).check()


def _content(file: IO[bytes], item: zipfile.ZipInfo) -> bytes:
    """Bytes of a stored record. Not through ``zipfile``, which insists on the checksum that we do not write."""
    file.seek(item.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise DamagedCheckpointError(f"{item.filename!r} is not where the archive says")
    name, extra = struct.unpack("<HH", header[26:30])
    file.seek(item.header_offset + 30 + name + extra)
    return file.read(item.file_size)


def _directory_size(file: IO[bytes], size: int) -> int:
    """Bytes of the archive's directory, which must end where its last record begins: two readers then see the same.

    Raises:
        zipfile.BadZipFile: There is no such record.
    """
    file.seek(max(0, size - _END.size - 0xFFFF))
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END.size:
        raise zipfile.BadZipFile("it is no archive, or its end is missing")
    *_, length, offset, comment = _END.unpack_from(tail, at)
    if len(tail) - at - _END.size != comment:
        raise zipfile.BadZipFile("something follows its end")
    end = size - len(tail) + at
    if at >= _LOCATOR.size and tail.startswith(b"PK\x06\x07", at - _LOCATOR.size):
        end = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)[2]
        file.seek(end)
        *_, length, offset = _END64.unpack(file.read(_END64.size))
    if offset + length != end:
        raise zipfile.BadZipFile("its directory is not where it says")
    return int(length)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return (lines or str(error).splitlines() or [type(error).__name__])[0].strip()
