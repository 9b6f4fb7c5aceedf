"""Which checkpoints there are, newest first. Looks at names, manifests and sizes; reads no tensor."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_resilience.checkpoint.attempts import FOLDER, live_attempts
from lightning_resilience.checkpoint.manifest import MANIFEST, Manifest, Seal, read_manifest, read_seal
from lightning_resilience.checkpoint.quarantine import Quarantine
from lightning_resilience.checkpoint.storage import REPLACED, Entry, Place, place_for
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
_COUNTED = re.compile(r"(epoch|step)=\d")
_POLL_S = 0.1
_REMOTE_POLL_S = 1.0


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be valid.

    Attributes:
        place: Where it is.
        created_ns: When it was committed, in nanoseconds since the epoch; the file time where nothing says so.
        proof: What its bytes must be; None where another tool wrote it.
        fault: Why it cannot be valid, as far as names and sizes tell; empty when nothing speaks against it.
    """

    place: Place
    created_ns: int
    proof: Manifest | Seal | None
    fault: str = ""

    @property
    def path(self) -> str:
        """Where it is, in words."""
        return str(self.place)

    @property
    def folder(self) -> Place:
        """Where its files are, if it is a directory."""
        folder = self.proof.folder if isinstance(self.proof, Manifest) else ""
        return self.place / folder if folder else self.place


def newest_checkpoint(
    dirpath: str | os.PathLike[str], *, wait_s: float = 120.0, storage_options: Mapping[str, Any] | None = None
) -> str | None:
    """Path of the newest committed checkpoint below ``dirpath``, to be passed as ``fit(ckpt_path=...)``.

    Manifest and sizes are looked at here; every byte is checked when the checkpoint is loaded, and then the one
    before it is used should this one be damaged. A writer that is still finishing the last save of a run that was
    killed is waited for.

    Args:
        dirpath: Directory of the checkpoints, the ``dirpath`` of ``ModelCheckpoint``; may be a URL.
        wait_s: How long to wait for such a writer, in seconds.
        storage_options: For the file system of a URL, as in ``AsyncCheckpointIO(storage_options=...)``.

    Returns:
        The path, or None when there is no checkpoint at all (a first start).

    Raises:
        ConfigurationError: ``dirpath`` is a file, or a URL of a kind that nothing here knows.
        NoValidCheckpointError: There are checkpoints and none of them is valid. Training from step 0 would
            silently throw the work away, so that is never done unasked.
    """
    directory = place_for(dirpath, storage_options)
    if directory.is_file():
        raise ConfigurationError(f"newest_checkpoint({str(dirpath)!r}): that is a file, not a directory of checkpoints")
    newest = newest_in(directory, wait_s=wait_s)
    answer = None if newest is None else newest.path
    key = directory.resolved().path
    _asked.add(key)
    _answers[key] = directory, answer
    return answer


def newest_in(
    directory: Place, *, wait_s: float = 120.0, wanted: Callable[[str], bool] = lambda name: True
) -> Candidate | None:
    """The newest committed checkpoint below ``directory``; see :func:`newest_checkpoint`.

    Args:
        directory: Where to look.
        wait_s: How long to wait for a writer, in seconds.
        wanted: Whether a checkpoint of this name counts.

    Raises:
        NoValidCheckpointError: There are some and none of them is valid.
    """
    _wait_for_writers(directory, wait_s)
    found = [candidate for candidate in find(directory) if wanted(candidate.place.name)]
    faults, quarantine = [], Quarantine()
    for candidate in found:
        fault = candidate.fault or quarantine.why(candidate.place, candidate.created_ns)
        if not fault:
            return candidate
        log.warning("passing over %s: %s", candidate.path, fault)
        faults.append(fault)
    if faults:
        raise none_valid(directory, faults)
    return None


_asked: set[str] = set()
"""Directories whose newest state somebody in this process wants to go on from."""

_answers: dict[str, tuple[Place, str | None]] = {}
"""What they were told, until a ``fit`` makes use of it."""


def brought_up_to_date(path: str | None, directory: Place) -> str | None:
    """What :func:`newest_checkpoint` would say now, if ``path`` is what it has said; good for one ``fit``.

    A writer that has outlived the process before this one may have committed another checkpoint since.

    Args:
        path: What ``fit`` shall resume from.
        directory: Of the run.
    """
    real = directory.resolved().path
    for key, (place, answer) in list(_answers.items()):
        if path == answer and (path is not None or _is_in(real, key)):
            del _answers[key]
            newest = next((one for one in find(place) if not one.fault), None)
            return path if newest is None else newest.path
    return path


def was_asked_for(directory: Place) -> bool:
    """Whether :func:`newest_checkpoint` was called in this process for ``directory``, or for one that holds it."""
    path = directory.resolved().path
    return any(_is_in(path, asked) for asked in _asked)


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory.rstrip('/')}/")


def find(directory: Place, enter: Callable[[str], bool] = lambda name: True) -> list[Candidate]:
    """All checkpoints in ``directory`` and the folders below it whose names ``enter`` lets in, newest first."""
    found = [examine(place) for place in _checkpoints_below(directory, enter)]
    present = [one for one in found if not one.fault or one.place.exists()]  # a writer may be at work
    return sorted(present, key=lambda candidate: candidate.created_ns, reverse=True)


def _checkpoints_below(directory: Place, enter: Callable[[str], bool]) -> Iterator[Place]:
    for entry in directory.entries():
        place = directory / entry.name
        if _may_be_checkpoint(place, entry):
            yield place
        elif entry.is_directory and not (entry.is_link or entry.name.startswith((".", FOLDER))) and enter(entry.name):
            yield from _checkpoints_below(place, enter)


def with_predecessors(place: Place) -> list[Candidate]:
    """The checkpoint at ``place`` and those committed before it in the same directory, newest first.

    For a directory of checkpoints: all in it.

    Raises:
        LoadError: There is no checkpoint.
    """
    there = place.stat()
    if there is None:
        raise LoadError(f"there is no checkpoint at {place}")
    if there.is_directory and not is_checkpoint_directory(place):
        if found := find(place):
            return _worth_a_try(found) or found
        raise LoadError(f"{place} is neither a checkpoint nor a directory that holds one")
    first = examine(place)
    real = place.resolved()
    older = _worth_a_try(candidate for candidate in _same_run(place) if candidate.place.resolved() != real)
    return [first, *(candidate for candidate in older if candidate.fault or candidate.created_ns <= first.created_ns)]


def _worth_a_try(found: Iterable[Candidate]) -> list[Candidate]:
    quarantine, worth = Quarantine(), []
    for candidate in found:
        if why := quarantine.why(candidate.place, candidate.created_ns):
            log.warning("passing over %s: %s", candidate.path, why)
        else:
            worth.append(candidate)
    return worth


def _same_run(place: Place) -> list[Candidate]:
    """What lies beside a checkpoint. Folders below or above may be those of other runs, and are only looked into if
    their names say that a metric's slash made them: `val/loss` makes `epoch=0-val`.
    """
    directory = place.parent
    while _COUNTED.search(directory.name):
        directory = directory.parent
    return find(directory, enter=lambda name: _COUNTED.search(name) is not None)


def examine(place: Place) -> Candidate:
    """What can be said of a checkpoint without reading its tensors."""
    modified_ns = 0
    try:
        there = place.stat()
        if there is None:
            raise FileNotFoundError(errno.ENOENT, "it is not there any more", str(place))
        modified_ns = int(there.modified_s * 1e9)
        proof = read_manifest(place) if there.is_directory else read_seal(place)
        found = Candidate(place, proof.created_ns if proof else modified_ns, proof)
        if there.is_directory:
            _check_sizes(found)
        return found
    except (CheckpointError, OSError) as error:
        return Candidate(place, modified_ns, None, str(error))


def none_valid(directory: Place, faults: list[str]) -> NoValidCheckpointError:
    """The error for when nothing is left to fall back to."""
    return NoValidCheckpointError(
        f"none of the {len(faults)} checkpoint(s) in {directory} is valid: {'; '.join(faults)}. Training does not"
        " start from step 0 by itself: restore a copy, or move these away to begin anew."
    )


def _check_sizes(candidate: Candidate) -> None:
    if not isinstance(candidate.proof, Manifest):
        _check_stock(candidate.place)
        return
    sizes = {entry.name: _size_of(candidate.folder, entry) for entry in candidate.folder.entries()}
    for name, record in candidate.proof.files.items():
        if name not in sizes:
            raise DamagedCheckpointError(f"{candidate.folder / name} is missing")
        if sizes[name] != record.size:
            raise DamagedCheckpointError(f"{candidate.folder / name} has {sizes[name]} bytes instead of {record.size}")


def _size_of(folder: Place, entry: Entry) -> int:
    """Of the file that will be read; whether a link may be followed is decided then."""
    there = (folder / entry.name).stat() if entry.is_link else entry
    return -1 if there is None else there.size


def _check_stock(place: Place) -> None:
    """A directory that stock Lightning wrote has no proof, only the files it cannot do without."""
    names = {entry.name for entry in place.entries() if not entry.is_directory}
    if RANK_FILE.format(0) in names:
        raise DamagedCheckpointError(f"{place / MANIFEST} is missing")
    for name in (METADATA, META):
        if name not in names:
            raise DamagedCheckpointError(f"{place / name} is missing: the save was not finished")


def is_checkpoint_directory(place: Place) -> bool:
    """Whether a directory is one checkpoint, rather than holding several.

    Files in the folder of an attempt are a checkpoint when a manifest says so.
    """
    names = {entry.name for entry in place.entries()}
    if any(name.startswith(FOLDER) for name in names):
        return MANIFEST in names
    return place.name.endswith(_SUFFIX) or not names.isdisjoint((MANIFEST, METADATA, META))


def _may_be_checkpoint(place: Place, entry: Entry) -> bool:
    """Links only name what is here anyway; hidden names are unfinished, or wait to be put back."""
    if entry.is_link:
        return False
    if entry.name.startswith((".", FOLDER)):
        return entry.name.endswith(REPLACED)
    return is_checkpoint_directory(place) if entry.is_directory else entry.name.endswith(_SUFFIX)


def _wait_for_writers(directory: Place, wait_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    deadline = time.monotonic() + wait_s
    said = False
    while (attempts := live_attempts(directory, time.time(), rescues_here=False)) and time.monotonic() < deadline:
        if not said:
            log.info("waiting for the writer that is still finishing %s", attempts[0])
            said = True
        sleep(_POLL_S if directory.storage.renames else _REMOTE_POLL_S)
