"""What the writer has to do and in which order; no effects. Runs in the writer process."""

from __future__ import annotations

from collections import deque

from lightning_resilience.checkpoint.messages import Begin, Drop, Link, Message, Release, Remove, Retain, Save


class WriterQueue:
    """Saves that wait for their turn, and what waits for saves to be committed."""

    def __init__(self) -> None:
        self._waiting: dict[int, Save] = {}
        self._turns: deque[int] = deque()
        self._open: set[int] = set()
        self._failed: set[int] = set()
        self._after: list[Remove | Link | Retain] = []
        self._held: set[int] = set()

    def __bool__(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._waiting or self._open or self._after)

    def take(self, message: Message) -> None:
        """The rank said this; other messages than those of the queue are ignored."""
        if isinstance(message, Save):
            self._waiting[message.id] = message
            self._open.add(message.id)
        elif isinstance(message, Begin):
            self._turns.append(message.id)
        elif isinstance(message, Drop):
            self._waiting.pop(message.id, None)
            self._open.discard(message.id)
            self._after = [request for request in self._after if message.id not in (request.id, request.after)]
        elif isinstance(message, Release):
            self._held.discard(message.id)
        elif isinstance(message, (Remove, Link, Retain)):
            self._after.append(message)
            if isinstance(message, Remove) and message.held:
                self._held.add(message.id)

    def next_save(self, alone: bool) -> Save | None:
        """The save to write now, if it is the turn of any.

        Args:
            alone: The rank is gone and says no more whose turn it is: what waits is written, oldest first.
        """
        while self._turns:
            if (save := self._waiting.pop(self._turns.popleft(), None)) is not None:
                return save
        if alone and self._waiting:
            return self._waiting.pop(min(self._waiting))
        return None

    @property
    def has_turn(self) -> bool:
        """Whether the rank has said whose turn it is."""
        return bool(self._turns)

    def settle(self, save_id: int, committed: bool) -> None:
        """A save is over."""
        self._open.discard(save_id)
        if not committed:
            self._failed.add(save_id)

    def take_ready(self, alone: bool) -> list[tuple[Remove | Link | Retain, bool]]:
        """What should come after a save that is over, and whether that was committed; no longer in the queue then.

        Args:
            alone: The rank is gone, and what it held is released.
        """
        ready = [request for request in self._after if self._is_ready(request, alone)]
        self._after = [request for request in self._after if request not in ready]
        return [(request, request.after not in self._failed) for request in ready]

    def _is_ready(self, request: Remove | Link | Retain, alone: bool) -> bool:
        if request.after in self._open:
            return False
        return alone or request.id not in self._held or request.after in self._failed
