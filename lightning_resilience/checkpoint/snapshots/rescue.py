"""The newest snapshot becomes a checkpoint when all ranks are gone: what their writers do then, without a collective.

Runs in the writer processes. Nothing is locked: a successor takes the file over as if nobody were here, and who reads
it notices (the header changes before the first byte does) and gives up, as the successor has the state.

1. every writer says which steps its rank has left (``gathering``);
2. rank 0's chooses the newest that all have, unless a checkpoint as new is there;
3. every writer writes its rank's part from shared memory, and rank 0's commits, as for any save.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_resilience.checkpoint.attempts import RESCUE, Pulse, Record, attempt_of
from lightning_resilience.checkpoint.candidates import META, METADATA, RANK_FILE
from lightning_resilience.checkpoint.commit import Commit, CommitClock
from lightning_resilience.checkpoint.layout import GlobalLayout, ShardLayout, file_name
from lightning_resilience.checkpoint.manifest import FileRecord
from lightning_resilience.checkpoint.messages import Rescue, Save
from lightning_resilience.checkpoint.snapshots import leftovers
from lightning_resilience.checkpoint.snapshots.choice import is_newer, newest_common
from lightning_resilience.checkpoint.snapshots.contents import INDEX, RANK_STATE, VALUES, value_places
from lightning_resilience.checkpoint.snapshots.file import Snapshot, SnapshotFile, open_shared
from lightning_resilience.checkpoint.snapshots.gathering import Gathering, Left
from lightning_resilience.checkpoint.snapshots.header import digest_of
from lightning_resilience.checkpoint.snapshots.run import read_run
from lightning_resilience.checkpoint.snapshots.stored import newest_stored
from lightning_resilience.checkpoint.staging import Slot
from lightning_resilience.checkpoint.storage import Place, in_process_only, place_for
from lightning_resilience.errors import SaveError

NAME = "rescued-step={}.ckpt"
_POLL_S = 0.05
_FLOCK = "hhqqi"


class CalledOff(SaveError):
    """Somebody goes on from the snapshots themselves."""


def rescue(order: Rescue, clock: CommitClock) -> str:
    """Write this rank's part of the newest snapshot of its run.

    Args:
        order: What the writer was told while its rank lived.
        clock: Tells when it is committed.

    Returns:
        The path of the checkpoint, on rank 0's writer, and an empty string when none is due.

    Raises:
        SaveError: The other writers do not come, or what is there does not make a checkpoint.
        OSError: Of the storage.
    """
    if in_process_only(order.directory):
        return ""
    directory = place_for(order.directory, order.storage_options)
    with _left_behind(order) as held:
        try:
            return _rescue(order, clock, directory, held)
        except CalledOff:
            return ""


@dataclass
class _Held:
    """A complete snapshot that the rank has left."""

    file: SnapshotFile
    slot: Slot
    snapshot: Snapshot

    def check(self) -> None:
        """Raises ``CalledOff`` when it is being written over, or soon may be."""
        if _is_taken(self.file.fd) or (self.slot, self.snapshot) not in self.file.snapshots():
            raise CalledOff

    def part(self, name: str) -> bytes:
        return self.file.part(self.slot, self.snapshot.parts[name])


def _rescue(order: Rescue, clock: CommitClock, directory: Place, held: Sequence[_Held]) -> str:
    def check() -> None:
        for one in held:
            one.check()
        _check_run(order, directory)

    check()
    gathering = Gathering(order, directory, check)
    gathering.say(Left([one.snapshot.step for one in held], _layouts(held)))
    if order.rank != 0:
        if (step := gathering.decision()) is not None:
            _write(order, directory, _of_step(held, step), b"")
        return ""
    try:
        left = gathering.hear_all()
        step = _choice(order, directory, left)
        if step is None:
            return ""
        gathering.decide(step)
        layouts = [ShardLayout.decode(one.layouts[str(step)].encode()) for one in left]
        return _commit(order, clock, directory, _of_step(held, step), layouts)
    finally:
        gathering.end()


def _choice(order: Rescue, directory: Place, left: Sequence[Left]) -> int | None:
    step = newest_common([one.steps for one in left])
    newest = newest_stored(directory)
    return step if step is not None and is_newer(step, newest, order.base_ns) else None


def _commit(order: Rescue, clock: CommitClock, directory: Place, held: _Held, layouts: Sequence[ShardLayout]) -> str:
    """Rank 0's part, and then what makes it a checkpoint."""
    request = _request(order, directory, held.snapshot.step)
    attempt = attempt_of(request)
    _write(order, directory, held, metadata(layouts, held, attempt.folder))
    commit = Commit(request, clock, time.monotonic())
    try:
        while not commit.advance(time.monotonic(), orphaned=True):
            time.sleep(_POLL_S)
            _check_run(order, directory)
    except (SaveError, OSError):
        commit.abandon()
        raise
    _delete_older(directory, attempt.target)
    return request.path


def metadata(layouts: Sequence[ShardLayout], held: _Held, folder: str) -> bytes:
    """The ``.metadata`` of all ranks' files.

    Args:
        layouts: Of the ranks; each holds all that its rank had.
        held: The snapshot of rank 0, where the values are that are not tensors.
        folder: See ``GlobalLayout.encode``.

    Raises:
        SaveError: The ranks' pieces do not fit together.
    """
    start = held.snapshot.parts[VALUES].offset
    values = [(name, way, start + offset, size) for name, way, offset, size in value_places(held.part(VALUES))]
    return GlobalLayout(layouts).encode(tuple(values), folder)


def _write(order: Rescue, directory: Place, held: _Held, whole: bytes) -> None:
    """The files of this rank, and its record."""
    request = _request(order, directory, held.snapshot.step)
    attempt = attempt_of(request)
    pulse = Pulse(attempt, request)

    def progress() -> None:
        pulse()
        held.check()

    attempt.open(order.rank)
    files = _files(order.rank, held, whole)
    try:
        records = {
            name: FileRecord(len(data), (attempt.files / name).write(data, progress=progress))
            for name, data in files.items()
        }
        held.check()
    except (OSError, SaveError) as error:
        attempt.report_failure(order.rank, files, str(error) or "its rank has a successor")
        if order.rank == 0:
            attempt.abandon()
        raise
    attempt.deliver(Record(order.rank, records))


def _files(rank: int, held: _Held, whole: bytes) -> dict[str, memoryview]:
    """By name. Behind the tensors, and as a part of the same file, come the values of rank 0."""
    values = held.snapshot.parts[VALUES]
    end = values.offset + values.size if rank == 0 else held.snapshot.tensor_bytes
    files = {file_name(rank): held.slot.bytes[:end], RANK_FILE.format(rank): memoryview(held.part(RANK_STATE))}
    if rank == 0:
        files |= {META: memoryview(held.part(META)), METADATA: memoryview(whole)}
    return files


def _request(order: Rescue, directory: Place, step: int) -> Save:
    """The same on all ranks, told apart from those of other starts."""
    return Save(
        id=0,
        path=(directory / NAME.format(step)).path,
        attempt=f"{RESCUE}{order.run}-{order.start}",
        step=step,
        rank=order.rank,
        world_size=order.world_size,
        files=(),
        deadline_s=order.deadline_s,
        storage_options=order.storage_options,
    )


def _of_step(held: Sequence[_Held], step: int) -> _Held:
    return next(one for one in held if one.snapshot.step == step)


def _layouts(held: Sequence[_Held]) -> dict[str, str]:
    return {str(one.snapshot.step): one.part(INDEX).decode() for one in held}


def _check_run(order: Rescue, directory: Place) -> None:
    """Raises ``CalledOff`` when the run has been started again, or its directory is another run's."""
    run = read_run(directory)
    if run is None or (run.id, run.start) != (order.run, order.start):
        raise CalledOff


def _delete_older(directory: Place, newest: Place) -> None:
    """Of earlier rescues, which nobody else would delete: one is enough."""
    first, last = NAME.split("{}")
    for entry in directory.entries():
        if entry.name.startswith(first) and entry.name.endswith(last) and entry.name != newest.name:
            (directory / entry.name).delete()


@contextmanager
def _left_behind(order: Rescue) -> Iterator[list[_Held]]:
    """The usable snapshots of the rank, newest first."""
    name = f"{order.run}-rank{order.rank}-"
    found = [open_shared(path) for path in leftovers.files(order.shm_dir, name)]
    files = [file for file in found if file is not None]
    try:
        held = [
            _Held(file, slot, snapshot)
            for file in files
            for slot, snapshot in file.snapshots()
            if snapshot.world_size == order.world_size and snapshot.start >= order.start
            if _is_whole(file, slot, snapshot)
        ]
        yield sorted(held, key=lambda one: one.snapshot.step, reverse=True)
    finally:
        held = []
        for file in files:
            file.close(keep=True)


def _is_whole(file: SnapshotFile, slot: Slot, snapshot: Snapshot) -> bool:
    seal = file.seal(slot)
    return seal is None or digest_of(slot.bytes[: snapshot.tensor_bytes]) == seal


def _is_taken(fd: int) -> bool:
    """Whether another process holds the lock of an owner."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind: int = struct.unpack_from(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK
