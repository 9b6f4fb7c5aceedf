"""The rank's side of the writer process: starts it, hands it requests, hears when they are durable.

Runs in the training process: requests come from the training thread, answers are taken by one thread here.
A writer that dies is started again and everything it had not finished is asked for once more; the staged bytes
are still in the arena, and a request that was already committed answers at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_resilience.checkpoint.messages import (
    Attach,
    Done,
    Message,
    Remove,
    Save,
    Stop,
    Written,
    decode,
    encode,
)
from lightning_resilience.errors import WriterError

log = logging.getLogger(__name__)

_MODULE = "lightning_resilience.checkpoint.writer_process"
_MAX_RESTARTS = 5  # without a request finished in between


@dataclass
class _Request:
    message: Save | Remove
    on_done: Callable[[str], None]
    written: bool = False


@dataclass
class _State:
    """Everything both threads touch, guarded by ``changed``."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    requests: dict[int, _Request] = field(default_factory=dict)
    closing: bool = False
    broken: str = ""


class WriterClient:
    """Owned by the checkpoint engine of a rank; lives from the start of ``fit`` to :meth:`close`.

    Args:
        start: Makes the writer process from the descriptor it shall inherit; tests pass their own.
    """

    def __init__(self, start: Callable[[int], subprocess.Popen[bytes]] | None = None) -> None:
        self._start = start or _start_process
        self._state = _State()
        self._arena: str | None = None
        self._restarts = 0
        self._born = time.time()
        self._spawn()
        self._listener = threading.Thread(target=self._listen, name="lightning-resilience-writer", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Process id of the writer that runs now."""
        return self._process.pid

    def attach(self, arena: str) -> None:
        """Use the arena file at this path from now on."""
        with self._state.changed:
            self._arena = arena
            self._send(Attach(arena, self._born))

    def submit(self, message: Save | Remove, on_done: Callable[[str], None]) -> None:
        """Ask for it and return at once.

        Args:
            message: The request.
            on_done: Called once, on the listening thread, with the error in words or an empty string.

        Raises:
            WriterError: The writer died too often to be trusted with another request.
        """
        with self._state.changed:
            if self._state.broken:
                raise WriterError(self._state.broken)
            self._state.requests[message.id] = _Request(message, on_done)
            self._send(message)

    def wait_written(self, request_id: int, timeout_s: float) -> bool:
        """Wait until the staged bytes of a save are no longer needed; False when time ran out."""
        return self._wait(lambda: self._is_written(request_id), timeout_s)

    def wait_idle(self, timeout_s: float | None = None, path: str | None = None) -> bool:
        """Wait until all requests (or those for ``path``) are finished; False when time ran out."""
        return self._wait(lambda: not self._unfinished(path), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Let the writer finish and leave; False if it was left with work, which it goes on with alone.

        Args:
            timeout_s: How long to wait for it, in seconds.
        """
        finished = self.wait_idle(timeout_s)
        with self._state.changed:
            self._state.closing = True
            self._send(Stop())
            if not finished:
                self._hang_up()
        self._listener.join()
        self._connection.close()
        if finished:
            self._process.wait()
        else:  # reaped whenever it is done
            name = "lightning-resilience-reaper"
            threading.Thread(target=self._process.wait, name=name, daemon=True).start()
        return finished

    def _hang_up(self) -> None:
        """End the connection: to the writer it looks as if the rank were gone."""
        with contextlib.suppress(OSError):  # the writer may have been given up already
            self._connection.shutdown(socket.SHUT_RDWR)

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        with self._state.changed:
            return self._state.changed.wait_for(condition, timeout_s)

    def _is_written(self, request_id: int) -> bool:
        request = self._state.requests.get(request_id)
        return request is None or request.written  # a finished one is forgotten

    def _unfinished(self, path: str | None) -> bool:
        return any(path in (None, request.message.path) for request in self._state.requests.values())

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = self._start(theirs.fileno())
        theirs.close()
        self._connection = ours

    def _send(self, message: Message) -> None:
        try:
            self._connection.sendall(encode(message))
        except OSError:
            pass  # it just died: the listener starts another and repeats what is unfinished

    def _listen(self) -> None:
        buffer = b""
        while True:
            try:
                data = self._connection.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                buffer = b""
                if not self._revive():
                    return
                continue
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._hear(decode(line))

    def _hear(self, message: Message) -> None:
        if isinstance(message, Written):
            with self._state.changed:
                if message.id in self._state.requests:
                    self._state.requests[message.id].written = True
                self._state.changed.notify_all()
        elif isinstance(message, Done):
            self._restarts = 0
            self._finish(message.id, message.error)

    def _finish(self, request_id: int, error: str) -> None:
        with self._state.changed:
            request = self._state.requests.get(request_id)
        if request is None:
            return
        request.on_done(error)  # before it counts as finished: whoever waits for it sees the result
        with self._state.changed:
            del self._state.requests[request_id]
            self._state.changed.notify_all()

    def _revive(self) -> bool:
        """After the writer's death: start another and repeat; False when there is nothing more to listen to."""
        with self._state.changed:
            if self._state.closing:
                return False
            code = self._process.wait()
            self._connection.close()
            if self._restarts >= _MAX_RESTARTS:
                self._state.broken = f"the checkpoint writer process died {self._restarts + 1} times (exit {code})"
            else:
                self._restart(code)
                return True
        for request_id in list(self._state.requests):
            self._finish(request_id, self._state.broken)
        return False

    def _restart(self, code: int) -> None:
        self._restarts += 1
        requests = list(self._state.requests.values())
        log.warning(
            "the checkpoint writer process %d died (exit %d); starting another, repeating %d request(s)",
            self._process.pid,
            code,
            len(requests),
        )
        self._spawn()
        if self._arena is not None:
            self._send(Attach(self._arena, self._born))
        for request in requests:
            message = request.message
            self._send(replace(message, staged=not request.written) if isinstance(message, Save) else message)


def _start_process(fd: int) -> subprocess.Popen[bytes]:
    """The real writer, in a session of its own so that Ctrl-C in the terminal does not reach it."""
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    ourselves = os.pidfd_open(os.getpid())  # opened here: the rank may be dead before the writer has started
    try:
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(fd), str(ourselves)],
            pass_fds=(fd, ourselves),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    finally:
        os.close(ourselves)
