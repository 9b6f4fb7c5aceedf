"""An attempt: one try at a checkpoint, from the first byte until it is committed or given up.

Runs in the writer processes; the search for checkpoints asks it who is still at work. While it goes on there is a
hidden directory beside the target, the *scaffolding*: who works on it, and a record of every rank that has delivered.
Where directories can be renamed the files are in it too; where not they lie inside the target already, in a folder
that only the manifest makes part of a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_resilience.checkpoint.manifest import FileRecord, read_manifest
from lightning_resilience.checkpoint.messages import Save
from lightning_resilience.checkpoint.storage import REMOVED, Entry, Place, hidden, is_url, place_for
from lightning_resilience.checkpoint.storage.protocol import GivenUp
from lightning_resilience.errors import DamagedCheckpointError

INCOMPLETE = ".incomplete"
RESCUE = "rescue-"  # begins the names of attempts that no rank has asked for, see snapshots.rescue
FOLDER = "attempt-"  # inside a checkpoint on a storage that cannot rename directories
_OWNER = "rank_{}.owner"
_FAILED = "rank_{}.failed"
_RECORD = "rank_{}.record"
_DELIVERED = re.compile(r"rank_(\d+)\.(record|failed)\Z")
_SCAFFOLD = re.compile(r"rank_\d+\.(record|failed|owner)\Z")
_ABANDONED_S = 3600.0
_QUIET_S = 60.0
_BEAT_S = 15.0
_OPENING_S = 2.0  # between the directory and the name of its owner


@dataclass(frozen=True)
class Attempt:
    """Where the parts of one try lie.

    Attributes:
        target: Where the checkpoint will be.
        name: Unique for ever.
    """

    target: Place
    name: str

    @property
    def scaffolding(self) -> Place:
        """A directory of its own; the draft, where the checkpoint is one local file."""
        return self.target.with_name(hidden(self.target.name, self.name + INCOMPLETE))

    @property
    def folder(self) -> str:
        """The directory inside the target that holds the files for ever, or an empty string."""
        return "" if self.target.storage.renames else FOLDER + self.name

    @property
    def files(self) -> Place:
        """Where the ranks write."""
        return self.target / self.folder if self.folder else self.scaffolding

    def open(self, rank: int, *, one_file: bool = False) -> None:
        """Say that this process works on it.

        Args:
            rank: Which.
            one_file: The checkpoint will be a file, not a directory.

        Raises:
            FileExistsError: What it should replace is of the other kind, which remotely cannot be done in one step.
        """
        if self.folder and (there := self.target.stat()) is not None and there.is_directory == one_file:
            kinds = ("a single file", "a sharded checkpoint")
            raise FileExistsError(
                errno.EEXIST,
                f"{kinds[there.is_directory]} of this name is there, and {kinds[not one_file]} cannot replace it in one"
                " step: choose another directory or name, or delete it",
                str(self.target),
            )
        for directory in (self.scaffolding,) if one_file else (self.scaffolding, self.files):
            directory.storage.make_directory(str(directory))
        self.beat(rank)

    def beat(self, rank: int) -> None:
        """Say it again, as a sign of life to other hosts."""
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "target": self.target.name, "attempt": self.name}
        (self.scaffolding / _OWNER.format(rank)).put(json.dumps(owner).encode())

    def deliver(self, record: Record) -> None:
        """Publish what a rank has made durable; appears whole or not at all."""
        (self.scaffolding / _RECORD.format(record.rank)).put(json.dumps(asdict(record)).encode())

    def report_failure(self, rank: int, names: Iterable[str], error: str) -> None:
        """Tell the coordinator that this rank's part will not come, even where there is no room left to say why."""
        with contextlib.suppress(OSError):  # a directory that could not even be made has nobody waiting in it
            for name in names:
                (self.files / name).delete()
            try:
                self.deliver(Record(rank, {}, error))
            except OSError:
                (self.scaffolding / _FAILED.format(rank)).put(b"")

    def new_records(self, known: Container[int]) -> list[Record]:
        """What ranks have delivered that are not ``known``; costs one listing, of a thousand ranks too."""
        found = []
        for entry in self.scaffolding.entries():
            match = _DELIVERED.match(entry.name)
            if match is not None and int(match[1]) not in known:
                found.append(_read_record(self.scaffolding / entry.name, int(match[1])))
        return found

    def looks(self) -> frozenset[Entry]:
        """What is there: as long as somebody works on it, it changes."""
        return frozenset(entry for place in {self.scaffolding, self.files} for entry in place.entries())

    def clear(self, directory: Place) -> None:
        """Take the scaffolding out of a directory that has become the checkpoint."""
        for entry in directory.entries():
            if _SCAFFOLD.match(entry.name):
                (directory / entry.name).delete()

    def abandon(self) -> None:
        """Delete what was written; the scaffolding last, so that what is left can be found."""
        self.target.storage.forget_uploads(str(self.files), before=float("inf"))
        self.files.delete()
        self.scaffolding.delete()


class Pulse:
    """What a rank does between the pieces of a long write: keep to the deadline, and give a sign of life.

    A local file shows by itself that it grows; of an upload nothing is to be seen before it is complete.

    Args:
        attempt: What is being written.
        request: Its save; the time it has begins now.
        clock: Monotonic time in seconds.
    """

    def __init__(self, attempt: Attempt, request: Save, clock: Callable[[], float] = time.monotonic) -> None:
        self._attempt = attempt
        self._request = request
        self._clock = clock
        self._deadline = clock() + request.deadline_s
        self._next_beat = clock() + _BEAT_S

    def __call__(self) -> None:
        """Raises :class:`GivenUp` when time is up."""
        now = self._clock()
        if now > self._deadline:
            took = f"writing took more than the {self._request.deadline_s:.0f} s that a save may take"
            raise GivenUp(errno.ETIMEDOUT, took, self._request.path)
        if now > self._next_beat and not self._attempt.target.storage.renames:
            self._next_beat = now + _BEAT_S
            self._attempt.beat(self._request.rank)


@dataclass(frozen=True)
class Record:
    """What one rank has made durable, or why it could not."""

    rank: int
    files: dict[str, FileRecord]
    error: str = ""


def folder_of(path: str, attempt: str) -> str:
    """What :attr:`Attempt.folder` will be, known before anything is written."""
    return FOLDER + attempt if is_url(path) else ""


def attempt_of(request: Save) -> Attempt:
    """The attempt that a request is about."""
    return Attempt(place_for(request.path, request.storage_options), request.attempt)


def live_attempts(directory: Place, now: float, *, rescues_here: bool = True) -> list[Place]:
    """Attempts in ``directory`` that a writer is still working on, as far as can be seen from this host.

    Args:
        directory: Where checkpoints are committed.
        now: Wall-clock time in seconds, to compare with file times.
        rescues_here: Also rescues of snapshots that are in the memory of this host, where they are at hand.
    """
    found = [(directory / entry.name, entry) for entry in directory.entries() if entry.name.endswith(INCOMPLETE)]
    return [
        place
        for place, entry in found
        if (rescues_here or not _is_rescue_here(place)) and is_alive(place, entry, now, _QUIET_S)
    ]


def _is_rescue_here(scaffolding: Place) -> bool:
    if f".{RESCUE}" not in scaffolding.name:
        return False
    return any(owner["host"] in ("", socket.gethostname()) for owner in _owners(scaffolding))


def sweep(directory: Place, now: float, before: float) -> None:
    """Delete what attempts of earlier runs, on which nobody works any more, have left in ``directory``.

    Args:
        directory: Where checkpoints are committed.
        now: Wall-clock time in seconds, to compare with file times.
        before: When this run started, in the same seconds. What changed since is its own: a rank that has delivered
            its part and left looks like a dead one.
    """
    for entry in directory.entries():
        place = directory / entry.name
        if entry.name.startswith(".") and entry.name.endswith(REMOVED):
            place.delete()
        elif entry.name.startswith(".") and entry.name.endswith(INCOMPLETE):
            if _last_change(place, entry) < before and not is_alive(place, entry, now, _ABANDONED_S):
                _delete_attempt(place, before)
    if not directory.storage.renames:
        _sweep_folders(directory, before)


def is_alive(scaffolding: Place, entry: Entry, now: float, quiet_s: float) -> bool:
    """Whether a writer of this host works on it, or perhaps one of another host.

    Args:
        scaffolding: Its directory; where the checkpoint is one local file, a file that its writer locks.
        entry: What a listing says of that.
        now: Wall-clock time in seconds.
        quiet_s: How long another host may be silent.
    """
    silence = now - _last_change(scaffolding, entry)
    if not entry.is_directory:
        storage = scaffolding.storage
        return storage.is_being_written(str(scaffolding)) or silence < (_OPENING_S if storage.renames else quiet_s)
    owners = _owners(scaffolding)
    if any(owner["host"] == socket.gethostname() and _is_writer(owner["pid"]) for owner in owners):
        return True
    elsewhere = any(owner["host"] not in ("", socket.gethostname()) for owner in owners)
    return silence < (quiet_s if elsewhere else _OPENING_S)


def _delete_attempt(scaffolding: Place, before: float) -> None:
    """The scaffolding last: it is what the rest is found by."""
    if not scaffolding.storage.renames:
        for owner in _owners(scaffolding):
            if owner["target"] and "/" not in owner["target"]:
                attempt = Attempt(scaffolding.with_name(owner["target"]), owner["attempt"])
                attempt.target.storage.forget_uploads(str(attempt.target), before)
                if committed_folder(attempt.target) != attempt.folder:
                    attempt.files.delete()
                break
    scaffolding.delete()


def _sweep_folders(directory: Place, before: float) -> None:
    """What a checkpoint was made of before it was saved anew under the same name.

    The order of the three looks matters: whoever is in the first and at work is in the second, and whoever was
    committed meanwhile is in the third.
    """
    targets = [directory / entry.name for entry in directory.entries() if entry.is_directory and entry.name[0] != "."]
    folders = [(target, sub) for target in targets for sub in target.entries() if sub.name.startswith(FOLDER)]
    scaffolds = [entry.name.removesuffix(INCOMPLETE) for entry in directory.entries()]
    busy = {FOLDER + name.rpartition(".")[2] for name in scaffolds}
    for target, sub in folders:
        is_left = sub.name not in busy and _last_change(target / sub.name, sub) < before
        if is_left and committed_folder(target) not in (sub.name, None):
            (target / sub.name).delete()


def committed_folder(target: Place) -> str | None:
    """The folder that the manifest at ``target`` names, empty where there is no manifest; None if it is damaged."""
    try:
        manifest = read_manifest(target)
    except DamagedCheckpointError:
        return None
    return manifest.folder if manifest is not None else ""


def _read_record(path: Place, rank: int) -> Record:
    data = path.read()
    if not data:
        return Record(rank, {}, "its part could not be written; its own log says why")
    fields = json.loads(data)
    files = {name: FileRecord(**record) for name, record in fields["files"].items()}
    return Record(rank, files, fields["error"])


def _owners(scaffolding: Place) -> list[dict[str, Any]]:
    return [_read_owner(scaffolding / entry.name) for entry in scaffolding.entries() if entry.name.endswith(".owner")]


def _read_owner(path: Place) -> dict[str, Any]:
    try:
        owner: dict[str, Any] = json.loads(path.read())
        found = {"host": owner["host"], "pid": owner["pid"]}
        return {**found, "target": owner.get("target", ""), "attempt": owner.get("attempt", "")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # gone, or its writer was killed first
        return {"host": "", "pid": 0, "target": "", "attempt": ""}


def _last_change(place: Place, entry: Entry) -> float:
    """When anything in it changed, in seconds since the epoch; 0 when it is gone."""
    return max([entry.modified_s, *(inner.modified_s for inner in place.entries())]) if place.exists() else 0.0


def _is_writer(pid: int) -> bool:
    """Whether that process is a writer; a number may have been given to another process since."""
    try:
        return b"lightning_resilience.checkpoint.writer_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
