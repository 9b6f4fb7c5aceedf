"""The writer's work inside the training process, for a storage that no other process can see (``memory://``).

Training waits for it. What is in memory dies with the process, so this is for trying things out, and for tests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from lightning_resilience.checkpoint.messages import Attach, Begin, Done, Message, Request, Save, Stop
from lightning_resilience.checkpoint.writer_process import Writer


def do_here(request: Request, arena: str | None) -> Done:
    """Carry out one request and return how it went.

    Args:
        request: With nothing before it that is still open.
        arena: Where the bytes of a save lie.
    """
    messages: list[Message] = [] if arena is None else [Attach(arena, time.time())]
    messages.append(request)
    if isinstance(request, Save):
        messages.append(Begin(request.id))
    here = _Here([*messages, Stop()])
    Writer(here).run()
    assert here.done is not None
    return here.done


class _Here:
    """Stands where the connection to a rank is otherwise: everything has been said already."""

    closed = False

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = list(messages)
        self.done: Done | None = None

    def receive(self, timeout_s: float | None) -> list[Message]:
        """All messages the first time, none afterwards."""
        messages, self._messages = self._messages, []
        return messages

    def send(self, message: Message) -> None:
        """Remember the outcome."""
        if isinstance(message, Done):
            self.done = message
