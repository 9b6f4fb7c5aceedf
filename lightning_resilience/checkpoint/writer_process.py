"""The writer: a process beside each rank that turns staged bytes into committed checkpoints.

Started as ``python -m lightning_resilience.checkpoint.writer_process SOCKET PIDFD``: inherited descriptors of the
connection to its rank and of the rank itself. It imports neither torch nor the user's script, has no process group and
no device context. It lives as long as its rank, and when the rank dies it finishes what was staged, makes a checkpoint
of the newest snapshot if there are snapshots, and leaves.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from lightning_resilience.checkpoint.attempts import Attempt, Pulse, Record, attempt_of, sweep
from lightning_resilience.checkpoint.commit import Commit, CommitClock, is_committed, write_file
from lightning_resilience.checkpoint.manifest import FileRecord, seal_tail
from lightning_resilience.checkpoint.messages import (
    Attach,
    Done,
    FileImage,
    Link,
    Message,
    Remove,
    Rescue,
    Retain,
    Save,
    Seal,
    Stop,
    Written,
)
from lightning_resilience.checkpoint.removal import retain
from lightning_resilience.checkpoint.snapshots.sealing import Sealer
from lightning_resilience.checkpoint.storage import Place, is_url, place_for
from lightning_resilience.checkpoint.storage.local import link
from lightning_resilience.checkpoint.writer_link import Arena, Connection, leave_when_stuck, say
from lightning_resilience.checkpoint.writer_queue import WriterQueue
from lightning_resilience.errors import CheckpointError, SaveError

_NICENESS = 10  # training has the processor first
_POLL_S = 0.02


class Rank(Protocol):
    """Who asks and is answered."""

    closed: bool

    def receive(self, timeout_s: float | None) -> list[Message]:
        """What has been asked since; waits up to ``timeout_s`` seconds for the first (None: for ever)."""
        ...

    def send(self, message: Message) -> None:
        """Answer."""
        ...


class Writer:
    """Takes requests in order. Its whole state is what is queued and what waits for other ranks."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._queue = WriterQueue()
        self._commits: deque[Commit] = deque()
        self._writing: Save | None = None
        self._retried: Counter[int] = Counter()
        self._arena: Arena | None = None
        self._rescue: Rescue | None = None
        self._sealer: Sealer | None = None
        self._stopping = False
        self._run_started = 0.0
        self._swept: set[str] = set()
        self._clock = CommitClock()

    def run(self) -> None:
        """Serve until told to stop, or until the rank is gone, and nothing is left to do."""
        while not self._finished:
            for message in self._rank.receive(self._patience_s()):
                self._handle(message)
            if (save := self._queue.next_save(alone=self._rank.closed)) is not None:
                self._save(save)
            self._commit_in_order()
            for request, committed in self._queue.take_ready(alone=self._stopping or self._rank.closed):
                self._follow(request, committed)
        if self._arena is not None:
            path = self._arena.path
            self._detach()
            if self._rank.closed:
                Path(path).unlink(missing_ok=True)  # its owner died and cannot do it
        if self._rescue is not None and not self._stopping:
            self._write_snapshot(self._rescue)

    @property
    def arena(self) -> str | None:
        """Path of the rank's arena."""
        return None if self._arena is None else self._arena.path

    @property
    def doing(self) -> str:
        """The save that is being written, in words."""
        return "" if self._writing is None else f"; NOT saved: {self._writing.path} (step {self._writing.step})"

    @property
    def _finished(self) -> bool:
        return (self._stopping or self._rank.closed) and not self._queue

    def _patience_s(self) -> float | None:
        if self._queue.has_turn or (self._rank.closed and not self._commits):
            return 0.0
        return _POLL_S if self._commits else None

    def _handle(self, message: Message) -> None:
        if isinstance(message, Attach):
            self._attach(message.arena)
            self._run_started = message.run_started
        elif isinstance(message, Seal):
            self._sealer = self._sealer or Sealer()
            self._sealer.want(message.path)
        elif isinstance(message, Rescue):
            self._rescue = message
        elif isinstance(message, Stop):
            self._stopping = True
        elif isinstance(message, Save) and message.abandoned:
            self._clean_up(message)
        else:
            self._queue.take(message)

    def _attach(self, path: str) -> None:
        self._detach()
        if path:
            with contextlib.suppress(FileNotFoundError):  # its rank gave it up before this process had started
                self._arena = Arena(path)

    def _detach(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def _save(self, request: Save) -> None:
        self._writing, began = request, time.monotonic()
        one_file = request.files[0].name == ""
        attempt = attempt_of(request)
        try:
            with self._counting(request):
                if request.staged and not is_committed(request):
                    (self._write_file if one_file else self._write_shard)(request, attempt)
        except OSError as error:
            self._finish(request, explain(error))
            return
        self._rank.send(Written(request.id))
        if one_file or request.rank != 0:
            self._finish(request, "")
        else:
            self._commits.append(Commit(request, self._clock, began))

    def _write_file(self, request: Save, attempt: Attempt) -> None:
        """A checkpoint that is one file, with a seal at its end; appears whole."""
        image, directory = request.files[0], attempt.target.parent
        directory.storage.make_directory(str(directory))
        self._sweep(directory)
        created_ns = self._clock.next(directory)

        def seal(digest: str) -> bytes:
            return seal_tail(image.size, request.step, created_ns, digest)

        write_file(attempt, self._bytes(image), seal, Pulse(attempt, request))

    def _write_shard(self, request: Save, attempt: Attempt) -> None:
        """This rank's files and its record, where the coordinator looks for them."""
        pulse = Pulse(attempt, request)
        try:
            attempt.open(request.rank)
            if request.rank == 0:
                self._sweep(attempt.target.parent)
            files = {image.name: self._write_image(attempt.files, image, pulse) for image in request.files}
            attempt.deliver(Record(request.rank, files))
        except OSError as error:
            attempt.report_failure(request.rank, [image.name for image in request.files], explain(error))
            if request.rank == 0:
                attempt.abandon()
            raise

    def _write_image(self, directory: Place, image: FileImage, pulse: Pulse) -> FileRecord:
        digest = (directory / image.name).write(self._bytes(image), progress=pulse)
        return FileRecord(image.size, digest)

    def _bytes(self, image: FileImage) -> memoryview:
        if self._arena is None:
            raise SaveError("no arena was attached before the first save")
        return self._arena.memory[image.offset : image.offset + image.size]

    def _sweep(self, directory: Place) -> None:
        if str(directory) not in self._swept:
            sweep(directory, time.time(), self._run_started)
            self._swept.add(str(directory))

    @contextlib.contextmanager
    def _counting(self, request: Save) -> Iterator[None]:
        """Requests to the storage that fail meanwhile are those of this save."""
        storage = attempt_of(request).target.storage
        before = storage.retried
        try:
            yield
        finally:
            self._retried[request.id] += storage.retried - before

    def _clean_up(self, request: Save) -> None:
        """An earlier writer hung in this save and was killed."""
        attempt = attempt_of(request)
        if request.rank != 0:
            attempt.report_failure(request.rank, [image.name for image in request.files], request.abandoned)
            return
        with contextlib.suppress(OSError):  # what is left is swept by the next start
            attempt.abandon()

    def _commit_in_order(self) -> None:
        """Commits happen in the order in which the saves were asked for."""
        while self._commits and self._commit(self._commits[0]):
            self._commits.popleft()

    def _commit(self, pending: Commit) -> bool:
        """Whether it is over, one way or the other."""
        try:
            with self._counting(pending.request):
                done = pending.advance(time.monotonic(), orphaned=self._rank.closed)
            if not done:
                return False
        except (SaveError, OSError) as error:
            pending.abandon()
            self._finish(pending.request, explain(error))
        else:
            self._finish(pending.request, "")
        return True

    def _write_snapshot(self, order: Rescue) -> None:
        """The rank is gone, and nobody has said that training has ended well."""
        from lightning_resilience.checkpoint.snapshots.rescue import rescue  # torch: seconds, and nobody waits any more

        try:
            path = rescue(order, self._clock)
        except (CheckpointError, OSError) as error:
            say(f"the newest snapshot of rank {order.rank} was not written to {order.directory}: {explain(error)}")
            return
        if path:
            say(f"the newest snapshot of the run was written to {path}")

    def _finish(self, request: Save, error: str) -> None:
        self._writing = None
        self._queue.settle(request.id, committed=not error)
        self._rank.send(Done(request.id, error, retried=self._retried.pop(request.id, 0)))
        if error and self._rank.closed:
            say(f"the checkpoint {request.path} (step {request.step}) was NOT saved: {error}")

    def _follow(self, request: Remove | Link | Retain, committed: bool) -> None:
        """Delete or link what should come after a save that is over now."""
        if not committed:  # what should replace the old one does not exist
            self._rank.send(Done(request.id, void=True))
        elif isinstance(request, Remove):
            self._rank.send(Done(request.id, self._delete(request)))
        elif isinstance(request, Retain):
            self._rank.send(Done(request.id, self._retain(request)))
        else:
            self._rank.send(Done(request.id, self._link(request)))

    def _link(self, request: Link) -> str:
        try:
            link(Path(request.path), Path(request.link))
        except OSError as error:
            return explain(error)
        return ""

    def _retain(self, request: Retain) -> str:
        try:
            retain(request, int(self._run_started * 1e9))
        except (CheckpointError, OSError) as error:
            return explain(error)
        return ""

    def _delete(self, request: Remove) -> str:
        try:
            place_for(request.path, request.storage_options).delete()
        except OSError as error:
            return explain(error)
        return ""


def explain(error: Exception) -> str:
    """The error in words that say what to do next."""
    if not isinstance(error, OSError):
        return str(error)
    hint = (_REMOTE_HINTS if is_url(str(error.filename)) else _HINTS).get(error.errno or 0, "")
    return f"{error.strerror or error}: {error.filename or 'writing'}{hint}"


_REMOTE_HINTS = {
    errno.EACCES: " (check the credentials, in storage_options or the environment, and what they allow)",
    errno.ENOENT: " (check that the bucket exists, and the endpoint)",
}
_HINTS = {
    errno.ENOSPC: " (the file system is full: free space, or keep fewer checkpoints)",
    errno.EDQUOT: " (the quota is used up: free space, or keep fewer checkpoints)",
    errno.EACCES: " (check the owner and mode of the checkpoint directory)",
    errno.EPERM: " (check the owner and mode of the checkpoint directory)",
    errno.EROFS: " (the file system is mounted read-only)",
    errno.ENOTDIR: " (a part of the path is a file; choose another checkpoint directory)",
    errno.EEXIST: " (a part of the path is a file; choose another checkpoint directory)",
}


def main(connection_fd: int, rank_pidfd: int) -> None:
    """Serve the rank at the other end of the connection."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # it ends when its rank is gone and its work is done
    os.nice(_NICENESS)
    with socket.socket(fileno=connection_fd) as connection:
        rank = Connection(connection, rank_pidfd)
        writer = Writer(rank)
        leave_when_stuck(rank, lambda: writer.arena, lambda: writer.doing)
        writer.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
