"""What one rank knows of the others during a `fit`, who of them is lost, and who hears of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from lightning_resilience.restart.control import Control, Generation
from lightning_resilience.restart.lookout import Lookout
from lightning_resilience.restart.peers import own_place
from lightning_resilience.restart.policy import Fault
from lightning_resilience.restart.roll import Roll
from lightning_resilience.restart.timeouts import Timeouts
from lightning_resilience.restart.watchdog import Heart


class Company:
    """Owned by the engine. Rank 0 serves the control store: with it the others lose each other, too.

    Args:
        control: A connection for the watchdog's thread.
        run: Tells one `fit` from another.
        heart: Of this rank.
        timeouts: How long ranks may say nothing.
        step: How many optimizer steps are committed.
        on_loss: Called on a thread when a rank is lost, so that the watchdog tells.
        on_store_lost: Called on a thread when the control store is.
    """

    def __init__(
        self,
        control: Control,
        run: int,
        *,
        heart: Heart,
        timeouts: Timeouts,
        step: Callable[[], int],
        on_loss: Callable[[], None],
        on_store_lost: Callable[[], None],
    ) -> None:
        self._control = control
        self._board = control.board(run)
        self._heart = heart
        self._timeouts = timeouts
        self._step = step
        self._on_loss = on_loss
        self._on_store_lost = on_store_lost
        self._roll = Roll(own_place(control.rank), control.world_size, timeouts.stopped_s)
        self._lookout = Lookout(self._roll, asking=lambda: self._question, on_loss=self._lost_somebody)
        self._question: int | None = None
        self._questions = 0
        self._declared: set[tuple[int, int]] = set()

    def start(self) -> None:
        """Say where this rank is, and begin to look; before the watchdog starts, which uses the same connection."""
        self._board.announce(self._roll.place)
        self._lookout.start()

    def close(self) -> None:
        """End it; the watchdog has been stopped before."""
        self._lookout.close()
        self._roll.close()

    @property
    def store_is_lost(self) -> bool:
        """Whether the process that serves the control store is known to be lost."""
        return 0 in self._roll.lost

    def why_lost(self, rank: int) -> str:
        """What is known of a rank that is lost, or else of where it ran."""
        return self._roll.lost.get(rank) or f"{self._roll.name(rank)} has ended or is out of reach"

    @contextlib.contextmanager
    def turn(self, generation: Generation) -> Iterator[None]:
        """Around everything that the watchdog asks of the control store: hear and tell who is there, if it is time.

        Raises:
            DistError: The control store is gone.
        """
        self._questions += 1
        self._question = self._questions
        try:
            section = self._heart.beat.section
            self._roll.exchange(self._board, section.value, self._timeouts.silence_s(section))
            self._declare(generation)
            yield
        finally:
            self._question = None

    def _declare(self, generation: Generation) -> None:
        for rank, why in list(self._roll.lost.items()):
            if (generation.number, rank) not in self._declared:
                self._declared.add((generation.number, rank))
                loss = Fault(kind="lost", rank=rank, step=self._step(), message=why, at_s=time.time())
                generation.declare_lost(loss)

    def _lost_somebody(self) -> None:
        if self.store_is_lost:
            self._on_store_lost()
        else:
            self._on_loss()
