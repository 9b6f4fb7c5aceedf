"""The commit: how the files of all ranks become one checkpoint, with no collective and no training process.

Runs in the writer processes. Every rank writes its files into the attempt's directory, then its record. When
all records are there, rank 0's writer adds the manifest and renames the directory: that rename is the only
step that makes the checkpoint visible, so a kill at any instant leaves either the whole checkpoint or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_resilience.checkpoint.manifest import MANIFEST, FileRecord, Manifest, read_manifest, read_seal
from lightning_resilience.checkpoint.messages import Save
from lightning_resilience.checkpoint.storage import local as storage
from lightning_resilience.errors import CheckpointError, SaveError

INCOMPLETE = ".incomplete"
_OWNER = "rank_{}.owner"
_FAILED = "rank_{}.failed"
_RECORD = "rank_{}.record"
_ABANDONED_S = 3600.0
_QUIET_S = 60.0
_OPENING_S = 2.0  # between the directory and the name of its owner


def attempt_directory(path: Path, attempt: str) -> Path:
    """Where an attempt's files lie until they are committed: beside the target, so that a rename is enough."""
    return path.with_name(f".{path.name}.{attempt}{INCOMPLETE}")


@dataclass(frozen=True)
class Record:
    """What one rank has made durable, or why it could not."""

    rank: int
    files: dict[str, FileRecord]
    error: str = ""

    def write(self, directory: Path) -> None:
        """Publish it; appears whole or not at all."""
        path = directory / _RECORD.format(self.rank)
        draft = path.with_suffix(f".draft-{os.getpid()}")
        storage.write_durably(draft, memoryview(json.dumps(asdict(self)).encode()))
        os.rename(draft, path)
        storage.flush_directory(directory)


def report_failure(request: Save, error: str) -> None:
    """Tell the coordinator that this rank's part will not come, even where there is no room left to say why."""
    directory = attempt_directory(Path(request.path), request.attempt)
    with contextlib.suppress(OSError):  # a directory that could not even be made has nobody waiting in it
        for image in request.files:
            (directory / image.name).unlink(missing_ok=True)
        try:
            Record(request.rank, {}, error).write(directory)
        except OSError:
            (directory / _FAILED.format(request.rank)).touch()


def read_record(directory: Path, rank: int) -> Record | None:
    """A rank's record, or None while it has not delivered."""
    try:
        fields = json.loads((directory / _RECORD.format(rank)).read_bytes())
    except FileNotFoundError:
        if (directory / _FAILED.format(rank)).exists():
            return Record(rank, {}, "its part could not be written; its own log says why")
        return None
    files = {name: FileRecord(**record) for name, record in fields["files"].items()}
    return Record(fields["rank"], files, fields["error"])


def open_attempt(request: Save) -> Path:
    """Create the attempt's directory and say in it that this process works on it."""
    directory = attempt_directory(Path(request.path), request.attempt)
    directory.mkdir(parents=True, exist_ok=True)
    owner = {"host": socket.gethostname(), "pid": os.getpid()}
    (directory / _OWNER.format(request.rank)).write_text(json.dumps(owner))
    return directory


class CommitClock:
    """Times of commits, in nanoseconds, that only grow within a directory, whatever the clocks of earlier hosts.

    Owned by the writer process that commits; it looks at a directory once.

    Args:
        now_ns: Nanoseconds since the epoch.
    """

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._last: dict[Path, int] = {}

    def next(self, directory: Path) -> int:
        """A time after that of every checkpoint in ``directory``."""
        if directory not in self._last:
            self._last[directory] = max(_commit_times(directory), default=0)
        self._last[directory] = max(self._now_ns(), self._last[directory] + 1)
        return self._last[directory]


class Commit:
    """One checkpoint of which this process is the coordinator, from its own record to the rename.

    Args:
        request: The save as rank 0 asked for it.
        clock: Tells when it is committed.
        now: Monotonic time in seconds.
    """

    def __init__(self, request: Save, clock: CommitClock, now: float) -> None:
        self.request = request
        self._clock = clock
        self.path = Path(request.path)
        self.directory = attempt_directory(self.path, request.attempt)
        self._deadline = now + request.deadline_s
        self._progress = (-1, now)
        self._records: dict[int, Record] = {}

    def advance(self, now: float, orphaned: bool) -> bool:
        """Commit if every rank has delivered; True when done, False to be called again.

        Args:
            now: Monotonic time in seconds.
            orphaned: The training process is gone, so a rank that shows no progress will not come back.

        Raises:
            SaveError: The checkpoint cannot be completed; what was written is deleted.
        """
        if self._is_decided():  # by a writer that was killed before it could rename
            self._publish()
            return True
        self._collect()
        failed = [f"rank {record.rank}: {record.error}" for record in self._records.values() if record.error]
        if failed:
            self.abandon()
            raise SaveError("; ".join(failed))
        if not self._missing:
            self._commit(self._records.values())
            return True
        self._check_patience(now, orphaned)
        return False

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(self.request.world_size) if rank not in self._records]

    def _collect(self) -> None:
        """Take what has come since; of a thousand ranks only the missing ones are asked for again."""
        for rank in self._missing:
            if (record := read_record(self.directory, rank)) is not None:
                self._records[rank] = record

    def abandon(self) -> None:
        """Delete what was written."""
        if self.directory.exists():
            storage.delete(self.directory)

    def _check_patience(self, now: float, orphaned: bool) -> None:
        if orphaned and (size := _size_of(self.directory)) != self._progress[0]:
            self._progress = (size, now)
        if now <= self._deadline and not (orphaned and now > self._progress[1] + _QUIET_S):
            return
        missing = ", ".join(map(str, self._missing))
        self.abandon()
        raise SaveError(f"no bytes came from rank {missing} in time")

    def _commit(self, records: Iterable[Record]) -> None:
        files = {name: record for entry in records for name, record in entry.files.items()}
        manifest = Manifest(
            step=self.request.step,
            world_size=self.request.world_size,
            attempt=self.request.attempt,
            created_ns=self._clock.next(self.path.parent),
            files=files,
        )
        storage.write_durably(self.directory / MANIFEST, memoryview(manifest.encode()))
        self._publish()

    def _is_decided(self) -> bool:
        try:
            return read_manifest(self.directory) is not None
        except CheckpointError:  # half written: the records are still there
            return False

    def _publish(self) -> None:
        """Everything is there and proven: give it its name, then take the scaffolding away."""
        storage.put_in_place(self.directory, self.path)
        for rank in range(self.request.world_size):
            for scaffold in (_RECORD, _OWNER):
                (self.path / scaffold.format(rank)).unlink(missing_ok=True)


def is_committed(request: Save) -> bool:
    """Whether this very attempt is in place already: a replayed request then has nothing left to do."""
    try:
        manifest = read_manifest(Path(request.path))
    except (CheckpointError, OSError):
        return False
    return manifest is not None and manifest.attempt == request.attempt


def sweep(directory: Path, now: float, before: float) -> None:
    """Delete what attempts of earlier runs, on which nobody works any more, have left in ``directory``.

    Args:
        directory: Where checkpoints are committed.
        now: Wall-clock time in seconds, to compare with file times.
        before: When this run started, in the same seconds. What changed since is its own: a rank that has delivered
            its part and left looks like a dead one.
    """
    for entry in _entries(directory):
        is_left = entry.name.endswith(INCOMPLETE) and _last_change(entry) < before
        is_left = is_left and not _is_alive(entry, now, _ABANDONED_S)
        if entry.name.startswith(".") and (is_left or entry.name.endswith(storage.REMOVED)):
            with contextlib.suppress(FileNotFoundError):  # its writer was faster
                storage.delete(entry)


def live_attempts(directory: Path, now: float) -> list[Path]:
    """Attempts in ``directory`` that a writer is still working on, as far as can be seen from this host."""
    attempts = [entry for entry in _entries(directory) if entry.name.endswith(INCOMPLETE)]
    return [attempt for attempt in attempts if _is_alive(attempt, now, _QUIET_S)]


def _is_alive(attempt: Path, now: float, quiet_s: float) -> bool:
    """Whether a writer of this host works on it, or perhaps one of another host.

    Args:
        attempt: Its directory; where the checkpoint is one file, a file that its writer locks.
        now: Wall-clock time in seconds.
        quiet_s: How long another host may be silent.
    """
    if attempt.is_file():
        return storage.is_being_written(attempt) or now - _last_change(attempt) < _OPENING_S
    owners = [_read_owner(path) for path in _entries(attempt) if path.match(_OWNER.format("*"))]
    if any(owner["host"] == socket.gethostname() and _is_writer(owner["pid"]) for owner in owners):
        return True
    elsewhere = any(owner["host"] not in ("", socket.gethostname()) for owner in owners)
    return now - _last_change(attempt) < (quiet_s if elsewhere else _OPENING_S)


def _read_owner(path: Path) -> dict[str, Any]:
    try:
        owner: dict[str, Any] = json.loads(path.read_bytes())
        return {"host": owner["host"], "pid": owner["pid"]}
    except (OSError, ValueError, KeyError):  # being written, or its writer was killed before it could
        return {"host": "", "pid": 0}


def _last_change(attempt: Path) -> float:
    """When anything in it changed, in seconds since the epoch; 0 when it is gone."""
    try:
        return max(path.stat().st_mtime for path in (attempt, *_entries(attempt)))
    except OSError:
        return 0.0


def _size_of(attempt: Path) -> int:
    """Bytes of its files; other ranks are renaming theirs meanwhile."""
    total = 0
    for entry in _entries(attempt):
        with contextlib.suppress(FileNotFoundError):
            total += entry.stat().st_size
    return total


def _entries(directory: Path) -> list[Path]:
    """What is in it now; nothing when it was renamed or deleted meanwhile (``Path.glob`` would raise)."""
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _is_writer(pid: int) -> bool:
    """Whether that process is a writer; a number may have been given to another process since."""
    try:
        return b"lightning_resilience.checkpoint.writer_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _commit_times(directory: Path) -> Iterable[int]:
    for entry in directory.iterdir():
        if entry.name.startswith("."):
            continue
        try:
            proof = read_manifest(entry) if entry.is_dir() else read_seal(entry)
        except (CheckpointError, OSError):
            continue
        if proof is not None:
            yield proof.created_ns
