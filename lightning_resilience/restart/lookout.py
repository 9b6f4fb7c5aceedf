"""Notices at once that a process of this machine ends, and that rank 0, which serves the control store, falls silent.

A thread that never asks the control store: a call to a store whose process is stopped does not return.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from lightning_resilience.restart.roll import Roll, Silence

_TURN_S = 0.25


class Lookout:
    """A thread for a `fit`.

    Args:
        roll: Where what is found goes.
        asking: What the thread that asks the control store is waiting for now: a number for each question, None for
            nothing.
        on_loss: Called when a rank is lost.
    """

    def __init__(self, roll: Roll, asking: Callable[[], int | None], on_loss: Callable[[], None]) -> None:
        self._roll = roll
        self._asking = asking
        self._on_loss = on_loss
        self._silence = Silence()
        self._told = 0
        self._stop = os.eventfd(0)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="lightning-resilience-lookout", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stopped = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _run(self) -> None:
        while not self._stopped:
            alive = [n for rank, n in list(self._roll.neighbours.items()) if rank not in self._roll.lost]
            ends = [fd for neighbour in alive if (fd := neighbour.fileno()) is not None]
            select.select([self._stop, *ends], [], [], _TURN_S)
            if not self._stopped:
                self.look()

    def look(self) -> None:
        """One turn."""
        roll = self._roll
        for rank, neighbour in list(roll.neighbours.items()):
            if rank not in roll.lost and neighbour.ended:
                roll.lose(rank, f"the process of {neighbour.place} has ended")
        self._look_at_store()
        if len(roll.lost) > self._told:
            self._told = len(roll.lost)
            self._on_loss()

    def _look_at_store(self) -> None:
        question = self._asking()
        silent_s = self._silence.see(question, _TURN_S)
        if question is None or silent_s <= self._roll.stopped_s:
            return
        server = self._roll.neighbours.get(0)
        stopped = f" is stopped ({server.state}) and" if server is not None and server.stopped else ""
        self._roll.lose(
            0, f"{self._roll.name(0)}, which serves the control store,{stopped} has not answered for {silent_s:.1f} s"
        )
