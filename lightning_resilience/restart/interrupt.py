"""Bring the thread that trains out of what it does.

A signal handler raises `RestartSignal` there: between two bytecodes, or out of a system call such as `time.sleep`.
Python runs signal handlers in the main thread only, and only while that thread runs; so the handler and the code it
interrupts never race, and switching the interruption off is one assignment. Raised where it is swallowed (a
`__del__`, a bare `except`), the signal is raised again until the thread has left the guarded part.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning_resilience.errors import RestartSignal

SIGNAL = signal.SIGURG
"""Ignored by default, so that it harms no process in which the handler is not installed."""

_UNBLOCK_EVERY_S = 0.5


class Interrupter:
    """Owned by the engine. `arm` to `check` are called by the main thread, `deliver` by another.

    Args:
        may_interrupt: Asked in the main thread whether this is a moment at which it may be interrupted.
    """

    def __init__(self, may_interrupt: Callable[[], bool]) -> None:
        self._may_interrupt = may_interrupt
        self._armed = False
        self._wanted = False
        self._left = threading.Event()
        self._handler: Any = None

    def install(self) -> None:
        """Take over the signal."""
        self._handler = signal.signal(SIGNAL, self._on_signal)

    def uninstall(self) -> None:
        """Give it back."""
        signal.signal(SIGNAL, self._handler)

    def arm(self) -> None:
        """The guarded part begins; or a guarded part within it.

        Raises:
            RestartSignal: The thread is wanted outside already.
        """
        self._left.clear()
        self._armed = True
        self.check()

    def disarm(self) -> None:
        """The guarded part is left: from here on nothing is raised."""
        self._armed = False
        self._left.set()

    def forget(self) -> None:
        """The thread has come; what it does next is no consequence of the request."""
        self._wanted = False

    def request(self) -> None:
        """From now on `check` raises."""
        self._wanted = True

    @property
    def requested(self) -> bool:
        """Whether the thread is wanted outside."""
        return self._wanted

    @property
    def left(self) -> bool:
        """Whether the thread is outside."""
        return self._left.is_set()

    def check(self) -> None:
        """A good moment to leave.

        Raises:
            RestartSignal: The thread is wanted outside.
        """
        if self._wanted and self._armed:
            raise RestartSignal("another rank has a fault")

    def deliver(
        self, *, grace_s: float, every_s: float, timeout_s: float, unblock: Callable[[], None] = lambda: None
    ) -> bool:
        """Until the main thread has left the guarded part; False when it does not within `timeout_s`.

        Args:
            grace_s: How long to wait for it to leave by itself: the collective it is in fails by now.
            every_s: How long it may take to leave before it is told again.
            timeout_s: When to give up.
            unblock: Done again now and then: the thread may get into another wait, which no signal ends.
        """
        began = unblocked_at = time.monotonic()
        self.request()
        pause = grace_s
        while not self._left.wait(pause):
            now = time.monotonic()
            if now > began + timeout_s:
                return False
            if now > unblocked_at + _UNBLOCK_EVERY_S:
                unblock()
                unblocked_at = now
            signal.pthread_kill(_main_thread(), SIGNAL)
            pause = every_s
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._may_interrupt():
            self.check()


def _main_thread() -> int:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident
