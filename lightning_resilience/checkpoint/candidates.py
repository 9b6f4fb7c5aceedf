"""Which checkpoints there are, newest first. Looks at names, manifests and sizes; reads no tensor."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_resilience.checkpoint.commit import live_attempts
from lightning_resilience.checkpoint.manifest import MANIFEST, Manifest, Seal, read_manifest, read_seal
from lightning_resilience.checkpoint.storage import local as storage
from lightning_resilience.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedCheckpointError,
    LoadError,
    NoValidCheckpointError,
)

log = logging.getLogger(__name__)

METADATA = ".metadata"
META = "meta.pt"
RANK_FILE = "rank_{}.pt"  # only ours have it
_SUFFIX = ".ckpt"
_POLL_S = 0.1


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be valid.

    Attributes:
        path: Where it is.
        created_ns: When it was committed, in nanoseconds since the epoch; the file time where nothing says so.
        proof: What its bytes must be; None where another tool wrote it.
        fault: Why it cannot be valid, as far as names and sizes tell; empty when nothing speaks against it.
    """

    path: Path
    created_ns: int
    proof: Manifest | Seal | None
    fault: str = ""


def newest_checkpoint(dirpath: str | os.PathLike[str], *, wait_s: float = 120.0) -> str | None:
    """Path of the newest committed checkpoint below ``dirpath``, to be passed as ``fit(ckpt_path=...)``.

    Manifest and sizes are looked at here; every byte is checked when the checkpoint is loaded, and then the one
    before it is used should this one be damaged. A writer that is still finishing the last save of a run that was
    killed is waited for.

    Args:
        dirpath: Directory of the checkpoints, the ``dirpath`` of ``ModelCheckpoint``.
        wait_s: How long to wait for such a writer, in seconds.

    Returns:
        The path, or None when there is no checkpoint at all (a first start).

    Raises:
        ConfigurationError: ``dirpath`` is a URL or a file.
        NoValidCheckpointError: There are checkpoints and none of them is valid. Training from step 0 would
            silently throw the work away, so that is never done unasked.
    """
    if "://" in os.fspath(dirpath):
        raise ConfigurationError(f"newest_checkpoint({dirpath!r}): a URL; it looks on local and shared file systems")
    directory = Path(dirpath).expanduser()
    if directory.exists() and not directory.is_dir():
        raise ConfigurationError(f"newest_checkpoint({str(dirpath)!r}): that is a file, not a directory of checkpoints")
    if not directory.is_dir():
        return None
    _wait_for_writers(directory, wait_s)
    found = find(directory)
    for candidate in found:
        if not candidate.fault:
            return str(candidate.path)
        log.warning("passing over %s: %s", candidate.path, candidate.fault)
    if found:
        raise none_valid(directory, [candidate.fault for candidate in found])
    return None


def find(directory: Path) -> list[Candidate]:
    """All checkpoints below ``directory``, newest first; a metric's name with a slash in it makes folders."""
    found = [examine(entry) for entry in _checkpoints_below(directory)]
    present = [candidate for candidate in found if os.path.lexists(candidate.path)]  # a writer may be at work
    return sorted(present, key=lambda candidate: candidate.created_ns, reverse=True)


def _checkpoints_below(directory: Path) -> Iterator[Path]:
    for entry in directory.iterdir():
        if _may_be_checkpoint(entry):
            yield entry
        elif entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            yield from _checkpoints_below(entry)


def with_predecessors(path: Path) -> list[Candidate]:
    """The checkpoint at ``path`` and those committed before it in the same directory, newest first.

    For a directory of checkpoints: all in it.

    Raises:
        LoadError: There is no checkpoint.
    """
    if not path.exists():
        raise LoadError(f"there is no checkpoint at {path}")
    if path.is_dir() and not _is_checkpoint_directory(path):
        if found := find(path):
            return found
        raise LoadError(f"{path} is neither a checkpoint nor a directory that holds one")
    first = examine(path)
    real = path.resolve()
    older = [candidate for candidate in find(path.absolute().parent) if candidate.path.resolve() != real]
    return [first, *(candidate for candidate in older if candidate.fault or candidate.created_ns <= first.created_ns)]


def examine(path: Path) -> Candidate:
    """What can be said of a checkpoint without reading its tensors."""
    modified_ns = 0
    try:
        modified_ns = path.stat().st_mtime_ns
        proof: Manifest | Seal | None
        if path.is_dir():
            proof = read_manifest(path)
            _check_sizes(path, proof)
        else:
            proof = read_seal(path)
        return Candidate(path, proof.created_ns if proof else modified_ns, proof)
    except (CheckpointError, OSError) as error:
        return Candidate(path, modified_ns, None, str(error))


def none_valid(directory: Path, faults: list[str]) -> NoValidCheckpointError:
    """The error for when nothing is left to fall back to."""
    return NoValidCheckpointError(
        f"none of the {len(faults)} checkpoint(s) in {directory} is valid: {'; '.join(faults)}. Training does not"
        " start from step 0 by itself: restore a copy, or move these away to begin anew."
    )


def _check_sizes(path: Path, manifest: Manifest | None) -> None:
    if manifest is None:
        _check_stock(path)
        return
    for name, record in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{path / name} is missing") from None
        if size != record.size:
            raise DamagedCheckpointError(f"{path / name} has {size} bytes instead of {record.size}")


def _check_stock(path: Path) -> None:
    """A directory that stock Lightning wrote has no proof, only the files it cannot do without."""
    if (path / RANK_FILE.format(0)).exists():
        raise DamagedCheckpointError(f"{path / MANIFEST} is missing")
    for name in (METADATA, META):
        if not (path / name).is_file():
            raise DamagedCheckpointError(f"{path / name} is missing: the save was not finished")


def _is_checkpoint_directory(path: Path) -> bool:
    return path.suffix == _SUFFIX or any((path / name).exists() for name in (MANIFEST, METADATA, META))


def _may_be_checkpoint(entry: Path) -> bool:
    """Links only name what is here anyway; hidden names are unfinished, or wait to be put back."""
    if entry.is_symlink():
        return False
    if entry.name.startswith("."):
        return entry.name.endswith(storage.REPLACED)
    return _is_checkpoint_directory(entry) if entry.is_dir() else entry.suffix == _SUFFIX


def _wait_for_writers(directory: Path, wait_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    deadline = time.monotonic() + wait_s
    said = False
    while (attempts := live_attempts(directory, time.time())) and time.monotonic() < deadline:
        if not said:
            log.info("waiting for the writer that is still finishing %s", attempts[0])
            said = True
        sleep(_POLL_S)
