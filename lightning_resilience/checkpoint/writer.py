"""The rank's side of the writer process: starts it, hands it requests, hears when they are durable.

Runs in the training process: requests come from the training thread, answers are taken by one thread here, which
also watches the deadlines. The queue lies with the writer, so that it survives the rank; whose turn it is is said
here, one save at a time, so that what has not begun can still be dropped without asking anybody.

A writer that dies is started again and everything it had not finished is asked for once more; the staged bytes
are still in the arena, and a request that was already committed answers at once. One that misses the deadline of a
save is killed: that save has failed, the others are asked for again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightning_resilience.checkpoint.backpressure import Staged
from lightning_resilience.checkpoint.events import WriterDied, WriterHung
from lightning_resilience.checkpoint.messages import (
    Attach,
    Begin,
    Done,
    Drop,
    Message,
    Release,
    Remove,
    Request,
    Rescue,
    Save,
    Seal,
    Stop,
    Written,
    decode,
    encode,
)
from lightning_resilience.checkpoint.storage import in_process_only
from lightning_resilience.checkpoint.writer_here import do_here
from lightning_resilience.checkpoint.writer_start import start_writer
from lightning_resilience.errors import WriterError
from lightning_resilience.events import Event

log = logging.getLogger(__name__)

_MAX_RESTARTS = 5  # without a request finished in between
_LEAVE_S = 5.0  # for a writer that has nothing left to do; one that hangs is killed then
_REAP_S = 1.0  # between a writer's last word and its end; in an uninterruptible wait even SIGKILL takes longer


def nobody(event: Event) -> None:
    """Where events go by default."""


@dataclass
class _Request:
    """What the writer was asked for.

    Attributes:
        begun: Since when it has been this save's turn, in monotonic seconds; None while it waits.
        written: Its bytes are durable, only the commit is left.
    """

    message: Request
    on_done: Callable[[Done], None]
    begun: float | None = None
    written: bool = False


@dataclass
class _State:
    """Everything both threads touch, guarded by ``changed``."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    requests: dict[int, _Request] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    held: bool = False
    closing: bool = False
    broken: str = ""


class WriterClient:
    """Owned by the checkpoint engine of a rank; lives from the start of ``fit`` to :meth:`close`.

    Args:
        start: Makes the writer process from the descriptor it shall inherit; tests pass their own.
        emit: Told of deaths and missed deadlines, on the listening thread.
    """

    def __init__(
        self,
        start: Callable[[int], subprocess.Popen[bytes]] = start_writer,
        emit: Callable[[Event], None] = nobody,
    ) -> None:
        self._start = start
        self._emit = emit
        self._state = _State()
        self._arena: str | None = None
        self._rescue: Rescue | None = None
        self._restarts = 0
        self._born = time.time()
        self._unsent = bytearray()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._spawn()
        self._listener = threading.Thread(target=self._listen, name="lightning-resilience-writer", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Process id of the writer that runs now."""
        return self._process.pid

    # --- asking ------------------------------------------------------------------------------------------------

    def attach(self, arena: str) -> None:
        """Use the arena file at this path from now on."""
        with self._state.changed:
            self._arena = arena
            self._send(Attach(arena, self._born))

    def detach(self) -> None:
        """There is no arena any more; only when nothing is unfinished."""
        self.attach("")

    def seal(self, path: str) -> None:
        """A snapshot in this file is complete. Nobody is told what becomes of it."""
        with self._state.changed:
            if not self._unsent:  # to a writer that hangs nothing is said again and again
                self._send(Seal(path))

    def rescue(self, order: Rescue) -> None:
        """What to do with snapshots should this process end without :meth:`close`."""
        with self._state.changed:
            self._rescue = order
            self._send(order)

    def submit(self, message: Request, on_done: Callable[[Done], None]) -> None:
        """Ask for it and return at once.

        Args:
            message: The request.
            on_done: Called once with the outcome, on the listening thread or before this returns; not for a save
                that is dropped.

        Raises:
            WriterError: The writer died too often to be trusted with another request.
        """
        with self._state.changed:
            if self._state.broken:
                raise WriterError(self._state.broken)
            void = not isinstance(message, Save) and message.after in self._state.failed
            here = in_process_only(message.path)
            if not void and not here:
                self._state.requests[message.id] = _Request(message, on_done)
                self._send(self._as_of_now(message))
                self._dispatch()
        if void:
            on_done(Done(message.id, void=True))
        elif here:
            on_done(self._do_here(message))

    def _do_here(self, message: Request) -> Done:
        done = do_here(message if isinstance(message, Save) else replace(message, after=0), self._arena)
        with self._state.changed:
            if done.error and isinstance(message, Save):
                self._state.failed.add(message.id)
        return done

    @contextlib.contextmanager
    def held(self) -> Iterator[list[Staged]]:
        """No waiting save begins inside this block; gives the saves whose bytes still fill a slot, oldest first."""
        with self._state.changed:
            self._state.held = True
            staged = [
                Staged(save.attempt, save.step, save.required, begun=request.begun is not None)
                for save, request in self._saves()
                if not request.written
            ]
        try:
            yield staged
        finally:
            with self._state.changed:
                self._state.held = False
                self._dispatch()

    def drop(self, attempt: str) -> int | None:
        """Give up a save that waits, and what should have come after it; only inside :meth:`held`.

        Returns:
            The number of its request; None when it has just failed by itself.
        """
        with self._state.changed:
            number = next((save.id for save, request in self._saves() if save.attempt == attempt), None)
            if number is None:
                return None
            del self._state.requests[number]
            self._state.failed.add(number)
            self._send(Drop(number))
            void = self._take_dependents(number)
            self._state.changed.notify_all()
        for request in void:
            request.on_done(Done(request.message.id, void=True))
        return number

    def release(self, number: int) -> None:
        """Let a held removal happen."""
        with self._state.changed:
            request = self._state.requests.get(number)
            if request is not None and isinstance(request.message, Remove):
                request.message = replace(request.message, held=False)
                self._send(Release(number))

    def cancel(self, number: int) -> None:
        """Forget a held removal."""
        with self._state.changed:
            if self._state.requests.pop(number, None) is not None:
                self._send(Drop(number))

    # --- waiting -----------------------------------------------------------------------------------------------

    def is_written(self, request_id: int) -> bool:
        """Whether the staged bytes of a save are no longer needed."""
        with self._state.changed:
            return self._is_written(request_id)

    def wait_written(
        self, request_ids: Sequence[int | None], how_many: Callable[[Iterable[bool]], bool], timeout_s: float
    ) -> bool:
        """Wait until the staged bytes of ``any`` or ``all`` of these saves are no longer needed.

        Returns:
            False when time ran out.
        """
        return self._wait(
            lambda: how_many(number is None or self._is_written(number) for number in request_ids), timeout_s
        )

    def wait_idle(self, timeout_s: float | None = None, path: str | None = None) -> bool:
        """Wait until all requests (or those for ``path``) but held removals are finished; False when time ran out."""
        return self._wait(lambda: not self._unfinished(path), timeout_s)

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        with self._state.changed:
            return self._state.changed.wait_for(condition, timeout_s)

    def _is_written(self, request_id: int) -> bool:
        request = self._state.requests.get(request_id)
        return request is None or request.written  # a finished one is forgotten

    def _unfinished(self, path: str | None) -> bool:
        messages = [request.message for request in self._state.requests.values()]
        return any(path in (None, message.path) for message in messages if not _is_held(message))

    # --- the end -----------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> bool:
        """Let the writer finish and leave; False if it was left with work, which it goes on with alone.

        A second call changes nothing and answers the same.

        Args:
            timeout_s: How long to wait for it, in seconds.
        """
        if self._state.closing:
            return not self._state.requests
        finished = self.wait_idle(timeout_s)
        with self._state.changed:
            self._state.closing = True
            self._send(Stop())
        if finished:
            self._await_end()
        self._hang_up()
        self._listener.join()
        self._connection.close()
        os.close(self._wake)
        self._reap(_REAP_S if finished else 0.0)
        return finished

    def _await_end(self) -> None:
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:  # it has nothing left to do and still does not leave
            self._process.kill()

    def _hang_up(self) -> None:
        """End the connection: to the writer it looks as if the rank were gone, and to the listener the other way."""
        with contextlib.suppress(OSError):  # the writer may have been given up already
            self._connection.shutdown(socket.SHUT_RDWR)

    def _reap(self, patience_s: float) -> int | None:
        """The exit code of a writer that is about to end; a thread waits for one that takes its time."""
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            name = "lightning-resilience-reaper"
            threading.Thread(target=self._process.wait, name=name, daemon=True).start()
            return None

    # --- talking, with the lock held ---------------------------------------------------------------------------

    def _saves(self) -> list[tuple[Save, _Request]]:
        pairs = ((request.message, request) for request in self._state.requests.values())
        return [(message, request) for message, request in pairs if isinstance(message, Save)]

    def _dispatch(self) -> None:
        """Begin the oldest waiting save unless another one is being written."""
        saves = self._saves()
        if self._state.held or any(request.begun is not None and not request.written for _, request in saves):
            return
        for save, request in saves:
            if request.begun is None:
                self._begin(save.id, request)
                return

    def _begin(self, request_id: int, request: _Request) -> None:
        request.begun = time.monotonic()
        self._send(Begin(request_id))
        os.eventfd_write(self._wake, 1)  # there is a deadline to watch now

    def _take_dependents(self, save_id: int) -> list[_Request]:
        """Forget and return what should have come after a save."""
        requests = self._state.requests
        found = [number for number, request in requests.items() if _after(request.message) == save_id]
        return [requests.pop(number) for number in found]

    def _as_of_now(self, message: Request) -> Request:
        """A writer that was started later knows nothing of saves that are finished."""
        if not isinstance(message, Save) and message.after not in self._state.requests:
            return replace(message, after=0)
        return message

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = self._start(theirs.fileno())
        theirs.close()
        self._connection = ours
        self._unsent.clear()

    def _send(self, message: Message) -> None:
        self._unsent += encode(message)
        self._flush()

    def _flush(self) -> None:
        """Never blocks, even when the writer hangs and its socket is full: the listener sends the rest."""
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            os.eventfd_write(self._wake, 1)
        except OSError:
            self._unsent.clear()  # it just died: the listener starts another and repeats what is unfinished

    # --- listening ---------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        buffer = b""
        while True:
            data = self._receive()
            if data is None:
                self._check_deadlines()
            elif data:
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._hear(decode(line))
            else:
                buffer = b""
                if not self._revive():
                    return

    def _receive(self) -> bytes | None:
        """What the writer says; empty when it is gone, None when it is time to look at the deadlines."""
        poll = select.poll()
        with self._state.changed:
            poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            patience = self._milliseconds_left()
        poll.register(self._wake, select.POLLIN)
        ready = dict(poll.poll(patience)).get(self._connection.fileno(), 0)
        if ready & select.POLLOUT:
            with self._state.changed:
                self._flush()
        if not ready & ~select.POLLOUT:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            return None
        try:
            return self._connection.recv(1 << 16)
        except OSError:
            return b""

    def _milliseconds_left(self) -> float | None:
        deadlines = [deadline for _, deadline in self._deadlines()]
        return max(0.0, 1000 * (min(deadlines) - time.monotonic())) + 1 if deadlines else None

    def _deadlines(self) -> list[tuple[Save, float]]:
        return [(save, _deadline(save, request.begun)) for save, request in self._saves() if request.begun is not None]

    def _hear(self, message: Message) -> None:
        if isinstance(message, Written):
            with self._state.changed:
                if message.id in self._state.requests:
                    self._state.requests[message.id].written = True
                self._dispatch()
                self._state.changed.notify_all()
        elif isinstance(message, Done):
            self._restarts = 0
            self._finish(message)

    def _finish(self, done: Done) -> None:
        with self._state.changed:
            request = self._state.requests.get(done.id)
            if done.error and request is not None and isinstance(request.message, Save):
                self._state.failed.add(done.id)
        if request is None:
            return
        request.on_done(done)  # before it counts as finished: whoever waits for it sees the result
        with self._state.changed:
            self._state.requests.pop(done.id, None)
            self._dispatch()
            self._state.changed.notify_all()

    def _check_deadlines(self) -> None:
        with self._state.changed:
            overdue = [save for save, deadline in self._deadlines() if time.monotonic() > deadline]
            if not overdue or self._state.closing:
                return
            pid = self.pid
            self._process.kill()
            self._reap(_REAP_S)
            self._connection.close()
            self._restart(overdue)
        for save in overdue:
            log.error("the checkpoint writer process %d hangs in %s and was killed", pid, save.path)
            self._emit(WriterHung(pid=pid, path=save.path, deadline_s=save.deadline_s))
            self._fail(save.id, _too_late(save))

    def _fail(self, save_id: int, error: str) -> None:
        """A save has failed without the writer saying so."""
        self._finish(Done(save_id, error))
        with self._state.changed:
            void = self._take_dependents(save_id)
        for request in void:
            request.on_done(Done(request.message.id, void=True))

    def _revive(self) -> bool:
        """After the writer's death: start another and repeat; False when there is nothing more to listen to."""
        with self._state.changed:
            if self._state.closing:
                return False
            pid, code = self.pid, self._reap(_REAP_S)
            self._connection.close()
            given_up = self._restarts >= _MAX_RESTARTS
            unfinished = len(self._state.requests)
            if given_up:
                self._state.broken = f"the checkpoint writer process died {self._restarts + 1} times (exit {code})"
            else:
                self._restarts += 1
                self._restart([])
        self._emit(WriterDied(pid=pid, exit_code=code, repeated=0 if given_up else unfinished))
        if given_up:
            for request_id in list(self._state.requests):
                self._finish(Done(request_id, self._state.broken))
            return False
        log.warning(
            "the checkpoint writer process %d died (exit %s); starting another, repeating %d request(s)",
            pid,
            code,
            unfinished,
        )
        return True

    def _restart(self, lost: list[Save]) -> None:
        """A new writer, and everything unfinished once more, but for what is lost; the lock is held."""
        self._spawn()
        if self._arena is not None:
            self._send(Attach(self._arena, self._born))
        if self._rescue is not None:
            self._send(self._rescue)
        for save in lost:
            self._send(replace(save, abandoned=_too_late(save)))
        for number, request in self._state.requests.items():
            message = self._as_of_now(request.message)
            if {number, _after(message)} & {save.id for save in lost}:
                continue
            self._send(replace(message, staged=not request.written) if isinstance(message, Save) else message)
            if request.begun is not None:
                self._begin(number, request)


def _is_held(message: Request) -> bool:
    return isinstance(message, Remove) and message.held


def _after(message: Request) -> int:
    return 0 if isinstance(message, Save) else message.after


def _deadline(save: Save, begun: float) -> float:
    """When a save that began then must be finished; the writer, which counts itself, gets the first word."""
    return begun + 1.05 * save.deadline_s + 0.5


def _too_late(save: Save) -> str:
    return (
        f"it was not durable {save.deadline_s:.0f} s after its turn came, and its writer process was killed. Look at"
        " the storage's speed, or raise AsyncCheckpointIO(timeout=...)."
    )
