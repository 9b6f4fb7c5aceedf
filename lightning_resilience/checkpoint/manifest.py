"""What proves that a checkpoint is whole: the manifest of a directory, the seal of a single file.

Pure data and its two encodings; both the writer process and the training process use it.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from lightning_resilience.checkpoint.digest import pieces
from lightning_resilience.checkpoint.storage import Place
from lightning_resilience.errors import DamagedCheckpointError

MANIFEST = "manifest.json"
FORMAT = 2
_READABLE = (1, FORMAT)  # 1 had one digest a file
_MAX_BYTES = 64 << 20  # 30 TB of checkpoint
_MAX_FILES = 1 << 18
_END_OF_ZIP = b"PK\x05\x06"
_END_OF_ZIP_SIZE = 22
_SEAL_ROOM = 4096
_LEGACY = b"\x80\x02"  # a pickle: how torch saved before 1.6
_SEAL = re.compile(rb"lightning-resilience seal: xxh3=([0-9a-f]{16}) size=(\d{20}) step=(\d{20}) created=(\d{20})\Z")


@dataclass(frozen=True)
class FileRecord:
    """Size of one file in bytes, and its digest as :mod:`~lightning_resilience.checkpoint.digest` has it."""

    size: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """What a committed checkpoint directory consists of.

    Attributes:
        step: Optimizer steps done when the state was taken.
        world_size: How many ranks wrote it.
        attempt: Name of the try that wrote it.
        created_ns: When it was committed, in nanoseconds since the epoch; strictly increasing within a
            directory even when clocks are not.
        files: Every file except the manifest itself.
        folder: The directory inside the checkpoint that holds them; empty when they lie beside the manifest.
    """

    step: int
    world_size: int
    attempt: str
    created_ns: int
    files: Mapping[str, FileRecord]
    folder: str = ""

    def encode(self) -> bytes:
        """The manifest as a JSON file that proves itself."""
        body = {"format": FORMAT, **asdict(self)}
        return _canonical({"manifest": body, "xxh3": xxhash.xxh3_64(_canonical(body)).hexdigest()}) + b"\n"


@dataclass(frozen=True)
class Seal:
    """What the comment at the end of a single-file checkpoint says about the bytes before it."""

    size: int
    xxh3: str
    step: int
    created_ns: int

    def encode(self) -> bytes:
        """The comment; its length does not depend on the values."""
        return (
            f"lightning-resilience seal: xxh3={self.xxh3} size={self.size:020d}"
            f" step={self.step:020d} created={self.created_ns:020d}"
        ).encode()

    @property
    def digested(self) -> int:
        """How many leading bytes of the file the digest covers: all of the archive but its comment length."""
        return self.size - 2


def files_of(checkpoint: Place) -> Place:
    """Where the files of a checkpoint directory lie.

    Raises:
        DamagedCheckpointError: Its manifest is not what was written.
    """
    manifest = read_manifest(checkpoint)
    return checkpoint / manifest.folder if manifest is not None and manifest.folder else checkpoint


def read_manifest(directory: Place) -> Manifest | None:
    """The manifest of a checkpoint directory, or None where there is none (another tool wrote it).

    Raises:
        DamagedCheckpointError: There is one and it is not what was written.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(_read_limited(path), parse_constant=_no_number)
        body: dict[str, Any] = content["manifest"]
        if len(body["files"]) > _MAX_FILES:
            raise ValueError(f"it names {len(body['files'])} files")
        if xxhash.xxh3_64(_canonical(body)).hexdigest() != content["xxh3"]:
            raise ValueError("its checksum does not match")
        if body.pop("format") not in _READABLE:
            raise ValueError("it was written by a newer version of lightning_resilience")
        files = {_safe_name(name): _record(**record) for name, record in body.pop("files").items()}
        folder = body.pop("folder", "")
        if folder != "":
            _safe_name(folder)
        return _checked(Manifest(files=files, folder=folder, **body))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"the manifest {path} is damaged: {error}") from error


def _read_limited(path: Place) -> bytes:
    entry = path.stat()
    if entry is not None and entry.size > _MAX_BYTES:
        raise ValueError(f"it has {entry.size} bytes, and no manifest needs more than {_MAX_BYTES}")
    return path.read()


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _checked(manifest: Manifest) -> Manifest:
    numbers = (manifest.step, manifest.world_size, manifest.created_ns)
    if any(type(number) is not int or number < 0 for number in numbers) or type(manifest.attempt) is not str:
        raise ValueError("step, number of ranks, time or attempt is not what it should be")
    return manifest


def seal_tail(size: int, step: int, created_ns: int, digest: str) -> bytes:
    """The last bytes of a sealed file: the length of the archive's comment, and the comment.

    Args:
        size: Of the archive without a comment, in bytes, the two that this replaces included.
        step: Of the checkpoint.
        created_ns: When, in nanoseconds since 1970.
        digest: xxh3 of all bytes before these.
    """
    comment = Seal(size, digest, step, created_ns).encode()
    return len(comment).to_bytes(2, "little") + comment


def read_seal(path: Place) -> Seal | None:
    """The seal of a single-file checkpoint, or None where another tool wrote the file.

    Raises:
        DamagedCheckpointError: The end of the file is neither ours nor the plain end of an archive.
    """
    entry = path.stat()
    if entry is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path))
    length = entry.size
    end = _piece(path, max(0, length - _SEAL_ROOM), min(length, _SEAL_ROOM))
    found = _SEAL.search(end)
    if found is not None and int(found[2]) == length - len(found[0]):
        return Seal(int(found[2]), found[1].decode(), int(found[3]), int(found[4]))
    start = _piece(path, 0, min(length, 2))
    ends_plainly = end[-_END_OF_ZIP_SIZE:].startswith(_END_OF_ZIP) and end.endswith(b"\0\0")
    if start == _LEGACY or (start == b"PK" and ends_plainly):
        return None
    if start != b"PK" and b"lightning-resilience seal" not in end:
        raise DamagedCheckpointError(
            f"{path} is no checkpoint, or a damaged one: it neither begins nor ends as a file of torch.save does"
        )
    raise DamagedCheckpointError(f"the checkpoint {path} is damaged: its start or its end is missing or changed")


def _piece(path: Place, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    return bytes(buffer[: path.read_into(offset, memoryview(buffer))])


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _record(size: int, xxh3: str) -> FileRecord:
    if type(size) is not int or size < 0 or type(xxh3) is not str:
        raise ValueError(f"size {size!r} and digest {str(xxh3)[:40]!r} are none")
    pieces(size, xxh3)
    return FileRecord(size, xxh3)


def _safe_name(name: str) -> str:
    if type(name) is not str or not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"it names a file outside the checkpoint: {name!r}")
    return name
