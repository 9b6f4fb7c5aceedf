"""The writer: a process beside each rank that turns staged bytes into committed checkpoints.

Started as ``python -m lightning_resilience.checkpoint.writer_process SOCKET PIDFD``: inherited descriptors of the
connection to its rank and of the rank itself. It imports neither torch nor the user's script, has no process group and
no device context. It lives as long as its rank, and when the rank dies it finishes what was staged and leaves.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path

from lightning_resilience.checkpoint.attempts import Attempt, Pulse, Record, attempt_of, sweep
from lightning_resilience.checkpoint.commit import Commit, CommitClock, is_committed, write_file
from lightning_resilience.checkpoint.manifest import FileRecord, seal_tail
from lightning_resilience.checkpoint.messages import (
    Attach,
    Done,
    FileImage,
    Message,
    Remove,
    Save,
    Stop,
    Written,
    decode,
    encode,
)
from lightning_resilience.checkpoint.storage import Place, place_for
from lightning_resilience.errors import SaveError

_NICENESS = 10  # training has the processor first
_POLL_S = 0.02


class Link:
    """The rank at the other end of the socket.

    Args:
        connection: The socket.
        rank: A pidfd of the rank. Its death is watched for itself: processes that the rank has forked (data
            loader workers) hold its end of the socket open for a while.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._buffer = b""
        self._poll = select.poll()  # not select(): descriptors keep the numbers they had in a rank with thousands
        for source in (connection.fileno(), rank):
            self._poll.register(source, select.POLLIN)
        self.closed = False

    def receive(self, timeout_s: float | None) -> list[Message]:
        """Messages that have arrived; waits up to ``timeout_s`` seconds for the first (None: for ever)."""
        if self.closed:
            time.sleep(timeout_s or 0.0)
            return []
        ready = {source for source, _ in self._poll.poll(None if timeout_s is None else 1000 * timeout_s)}
        if not ready:
            return []
        if self._connection.fileno() not in ready:
            self.closed = True
            return []
        try:
            data = self._connection.recv(1 << 16)
        except ConnectionResetError:  # it died with an answer of ours unread
            data = b""
        self.closed = not data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [decode(line) for line in lines]

    def send(self, message: Message) -> None:
        """Tell the rank; a rank that is gone does not need to know."""
        try:
            self._connection.sendall(encode(message))
        except OSError:
            self.closed = True


class Arena:
    """The rank's arena, mapped for reading; the lock on it says that somebody still needs the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        self._map = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)
        self.memory = memoryview(self._map)

    def close(self) -> None:
        """Let go of the memory."""
        self.memory.release()
        self._map.close()
        os.close(self._fd)


class Writer:
    """Takes requests in order. Its whole state is what is queued and what waits for other ranks."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._queue: deque[Message] = deque()
        self._in_order: deque[Commit | Remove] = deque()
        self._arena: Arena | None = None
        self._stopping = False
        self._last_save_failed = False
        self._postponed: list[Remove] = []
        self._run_started = 0.0
        self._swept: set[str] = set()
        self._clock = CommitClock()

    def run(self) -> None:
        """Serve until told to stop, or until the rank is gone, and nothing is left to do."""
        while not self._finished:
            self._queue.extend(self._link.receive(self._patience_s()))
            if self._queue:
                self._handle(self._queue.popleft())
            self._work_in_order()
        if self._arena is not None:
            self._arena.close()
            if self._link.closed:
                Path(self._arena.path).unlink(missing_ok=True)  # its owner died and cannot do it

    @property
    def _finished(self) -> bool:
        return (self._stopping or self._link.closed) and not self._queue and not self._in_order

    def _patience_s(self) -> float | None:
        if self._queue:
            return 0.0
        return _POLL_S if self._in_order else None

    def _handle(self, message: Message) -> None:
        if isinstance(message, Attach):
            self._attach(message.arena)
            self._run_started = message.run_started
        elif isinstance(message, Save):
            self._save(message)
        elif isinstance(message, Remove):
            self._in_order.append(message)
        elif isinstance(message, Stop):
            self._stopping = True

    def _attach(self, path: str) -> None:
        if self._arena is not None:
            self._arena.close()
        self._arena = Arena(path)

    def _save(self, request: Save) -> None:
        one_file = request.files[0].name == ""
        attempt = attempt_of(request)
        try:
            if request.staged and not is_committed(request):
                (self._write_file if one_file else self._write_shard)(request, attempt)
        except OSError as error:
            self._finish(request, explain(error))
            return
        self._link.send(Written(request.id))
        if one_file or request.rank != 0:
            self._finish(request, "")
        else:
            self._in_order.append(Commit(request, self._clock, time.monotonic()))

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

    def _work_in_order(self) -> None:
        """Commits and removals happen in the order they were asked for."""
        while self._in_order:
            head = self._in_order[0]
            if isinstance(head, Remove):
                self._remove(head)
            elif not self._commit(head):
                return
            self._in_order.popleft()

    def _commit(self, pending: Commit) -> bool:
        """Whether it is over, one way or the other."""
        try:
            if not pending.advance(time.monotonic(), orphaned=self._link.closed):
                return False
        except (SaveError, OSError) as error:
            pending.abandon()
            self._finish(pending.request, explain(error))
        else:
            self._finish(pending.request, "")
        return True

    def _finish(self, request: Save, error: str) -> None:
        self._last_save_failed = bool(error)
        if not error:
            postponed, self._postponed = self._postponed, []
            for removal in postponed:
                if removal.path != request.path:  # saved anew meanwhile
                    self._delete(removal)
        self._link.send(Done(request.id, error))

    def _remove(self, request: Remove) -> None:
        error = ""
        if self._last_save_failed:  # what should replace it does not exist: keep it until something newer does
            self._postponed.append(request)
        else:
            error = self._delete(request)
        self._link.send(Done(request.id, error))

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
    hint = _HINTS.get(error.errno or 0, "")
    return f"{error.strerror or error}: {error.filename or 'writing'}{hint}"


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
        Writer(Link(connection, rank_pidfd)).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
