"""What ties a writer process to its rank: the socket, the arena, and knowing when the rank is gone."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lightning_resilience.checkpoint.messages import Message, decode, encode

_QUIET_S = 60.0  # a writer whose rank is gone leaves when it has not got on for so long
_LOOK_S = 1.0


class Connection:
    """The rank at the other end of the socket.

    Args:
        connection: The socket.
        rank: A pidfd of the rank. Its death is watched for itself: processes that the rank has forked (data
            loader workers) hold its end of the socket open for a while.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._rank = rank
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

    def wait_gone(self) -> None:
        """Wait until the rank is dead or has hung up. Called by a thread of its own."""
        poll = select.poll()
        poll.register(self._rank, select.POLLIN)
        poll.register(self._connection.fileno(), select.POLLRDHUP)
        poll.poll()


class Arena:
    """The rank's arena, mapped for reading; the lock on it says that somebody still needs the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        self._map = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)
        self.memory = memoryview(self._map)

    def close(self) -> None:
        """Let go of the memory. Views of it that are still held keep it until they are dropped."""
        self.memory.release()
        try:
            self._map.close()
        except BufferError:  # an error that somebody keeps holds the calls that it has ended, and these the views
            gc.collect()
            with contextlib.suppress(BufferError):
                self._map.close()
        os.close(self._fd)


def leave_when_stuck(
    connection: Connection, arena: Callable[[], str | None], doing: Callable[[], str], quiet_s: float = _QUIET_S
) -> None:
    """End this process when the rank is gone and storage lets nothing through any more.

    Nobody is left who would kill a writer that hangs, and it holds shared memory.

    Args:
        connection: To the rank.
        arena: Path of the arena that then is nobody's.
        doing: What it is about, for the last words.
        quiet_s: Seconds without any progress.
    """

    def watch() -> None:
        connection.wait_gone()
        seen, since = _progress(), time.monotonic()
        while time.monotonic() < since + quiet_s:
            time.sleep(min(_LOOK_S, quiet_s / 4))
            if (now := _progress()) != seen:
                seen, since = now, time.monotonic()
        say(f"checkpoint writer {os.getpid()} leaves: no progress for {quiet_s:.0f} s{doing()}")
        if (path := arena()) is not None:
            Path(path).unlink(missing_ok=True)
        os._exit(1)

    threading.Thread(target=watch, name="leave-when-stuck", daemon=True).start()


def say(text: str) -> None:
    """Words for the log of the job, when there is no rank left to say them."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _progress() -> tuple[str, int]:
    """What changes while bytes flow: how many went to files, and processor time, which hashing and sending need."""
    written = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar"))
    return written, int(time.process_time() / 0.05)
