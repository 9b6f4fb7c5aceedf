"""The connections of gloo groups, whose ends bring out whoever waits in a collective.

gloo (torch 2.11 to 2.13) tells every operation that a connection has ended but one: a send that was begun and could not
be finished, because the other side had closed (``EPIPE``, ``ECONNRESET``) or does not read. Its collective never
returns. So no connection is ended for both sides. Each rank ends what it *reads*, which fails its own operations; it
first lets its sends be finished, and takes in what others still send to it until all of them have left.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable

from lightning_resilience._torch_groups import Descriptor, duplicate, sockets_being_written

_GLANCE_S = 0.002
_CHUNK = 1 << 20


class Connections:
    """Those that were ended, kept open under numbers of their own. Used by the monitor and by the main thread.

    Args:
        flush_s: How long sends may take to be finished; then they are left to their fate.
    """

    def __init__(self, flush_s: float = 1.0) -> None:
        self._flush_s = flush_s
        self._lock = threading.Lock()
        self._held: dict[Descriptor, socket.socket] = {}
        self._let_go = threading.Event()

    def cut(self, sockets: Iterable[Descriptor]) -> int:
        """End what is read from these; returns how many there were that had not been cut before."""
        with self._lock:
            new = {item: copy for item in sockets if item not in self._held and (copy := _connection(item)) is not None}
            if new and not self._held:
                self._let_go = threading.Event()
                threading.Thread(target=self._drain, args=(self._let_go,), name="drain", daemon=True).start()
            self._held |= new
        deadline = time.monotonic() + self._flush_s
        left = list(new.items())
        while left:
            writing = sockets_being_written() if time.monotonic() < deadline else set()
            waiting = [(item, copy) for item, copy in left if item.fd in writing and item.is_open()]
            for item, copy in left:
                if (item, copy) not in waiting:
                    with contextlib.suppress(OSError):  # it has ended already
                        copy.shutdown(socket.SHUT_RD)
            left = waiting
            if left:
                time.sleep(_GLANCE_S)
        return len(new)

    def let_go(self) -> None:
        """All ranks have left their collectives, or nobody waits for them any more."""
        with self._lock:
            self._let_go.set()
            held, self._held = self._held, {}
            for copy in held.values():
                copy.close()

    def _drain(self, let_go: threading.Event) -> None:
        """What nobody here reads any more, so that it can be sent."""
        while not let_go.wait(_GLANCE_S):
            with self._lock:
                for item, copy in self._held.items():
                    if not item.is_open():
                        _take_in(copy)


def _connection(item: Descriptor) -> socket.socket | None:
    """The same connection under another number; None if it is none, or closed."""
    copy = duplicate(item)
    if copy is not None and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo aborts the process then
        copy.close()
        return None
    return copy


def _take_in(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # nothing is there, or it has ended
        while connection.recv(_CHUNK, socket.MSG_DONTWAIT):
            pass
