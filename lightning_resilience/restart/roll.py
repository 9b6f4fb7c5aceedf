"""Which ranks are still there: each gives a pulse in the control store now and then, and looks at that of others.

A rank looks at the two after it, and further along when those are lost, so that every rank is looked at by somebody
however many there are; processes of the same machine are looked at by all ranks there, see `lookout`. Who is lost is
lost for good: should it come back, it finds that the others have gone on without it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from lightning_resilience.restart.peers import Neighbour, Place

_WATCHED = 2


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """What a rank says of itself, again and again.

    Attributes:
        count: Grows with each.
        section: What its main thread does.
        may_be_silent_s: How long it may say nothing: its threads cannot run while C code holds the interpreter's lock.
    """

    count: int
    section: str
    may_be_silent_s: float

    def to_json(self) -> str:
        """For the control store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Pulse:
        """The inverse."""
        return cls(**json.loads(text))


class Board(Protocol):
    """What ranks know of each other, in the control store. May raise `dist.DistError`, and may block."""

    def announce(self, place: Place) -> None:
        """Say where this rank runs."""
        ...

    def place(self, rank: int) -> Place | None:
        """Where a rank runs, if it has said so."""
        ...

    def places_on(self, machine: str) -> list[Place]:
        """All ranks that said that they run there."""
        ...

    def beat(self, rank: int, pulse: Pulse) -> None:
        """Say something."""
        ...

    def pulse(self, rank: int) -> Pulse | None:
        """The newest of a rank."""
        ...


class Silence:
    """How long something has not changed, in time that this process was there to see.

    A process that is stopped itself, or held up, sees the clock jump; that says nothing of others.

    Args:
        clock: In seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._value: object = None
        self._looked_at: float | None = None
        self.seconds = 0.0

    def see(self, value: object, turn_s: float) -> float:
        """Look at it, about every `turn_s` seconds; returns for how long it has been the same."""
        now = self._clock()
        if self._looked_at is None or value != self._value:
            self.seconds = 0.0
        else:
            self.seconds += min(now - self._looked_at, 2 * turn_s)
        self._value, self._looked_at = value, now
        return self.seconds


class Roll:
    """Of one rank. `exchange` is called by the watchdog's thread, everything else by any.

    Args:
        place: Of this rank.
        world_size: How many ranks there are.
        stopped_s: After how long a process that somebody has stopped is lost.
        clock: In seconds.
    """

    def __init__(
        self, place: Place, world_size: int, stopped_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.place = place
        self.stopped_s = stopped_s
        self.neighbours: dict[int, Neighbour] = {}
        self.lost: dict[int, str] = {}
        self._places: dict[int, Place] = {}
        self._world_size = world_size
        self._clock = clock
        self._count = 0
        self._exchanged_at: float | None = None
        self._may_be_silent_s = 0.0
        self._silence: dict[int, Silence] = {}

    def lose(self, rank: int, why: str) -> None:
        """A rank is lost for good. The first reason counts."""
        self.lost.setdefault(rank, why)

    def name(self, rank: int) -> str:
        """A rank with what is known of its process."""
        return str(self._places.get(rank, f"rank {rank}"))

    def exchange(self, board: Board, section: str, may_be_silent_s: float) -> None:
        """Give a pulse and look at those of others, if it is time.

        Args:
            board: Where.
            section: What the main thread does.
            may_be_silent_s: How long this rank may say nothing from now on.
        """
        turn_s = min(1.0, self.stopped_s / 10)
        now = self._clock()
        is_known = may_be_silent_s == self._may_be_silent_s
        if is_known and self._exchanged_at is not None and now - self._exchanged_at < turn_s:
            return
        self._exchanged_at, self._may_be_silent_s = now, may_be_silent_s
        self._count += 1
        board.beat(self.place.rank, Pulse(count=self._count, section=section, may_be_silent_s=may_be_silent_s))
        self._meet_neighbours(board)
        for rank in self._watched():
            self._look_at(rank, board, turn_s)

    def close(self) -> None:
        """Forget the processes."""
        for neighbour in self.neighbours.values():
            neighbour.close()

    def _meet_neighbours(self, board: Board) -> None:
        for place in board.places_on(self.place.machine):
            if place.rank != self.place.rank and place.rank not in self.neighbours:
                self._places[place.rank] = place
                self.neighbours[place.rank] = Neighbour(place)

    def _watched(self) -> list[int]:
        others = [(self.place.rank + offset) % self._world_size for offset in range(1, self._world_size)]
        return [rank for rank in others if rank not in self.lost][:_WATCHED]

    def _look_at(self, rank: int, board: Board, turn_s: float) -> None:
        if rank not in self._places and (place := board.place(rank)) is not None:
            self._places[rank] = place
        pulse = board.pulse(rank)
        if pulse is None:  # has not begun
            return
        silent_s = self._silence.setdefault(rank, Silence(self._clock)).see(pulse.count, turn_s)
        neighbour = self.neighbours.get(rank)
        if neighbour is not None and neighbour.stopped:
            if silent_s > min(self.stopped_s, pulse.may_be_silent_s):
                self.lose(rank, f"{self.name(rank)} is stopped ({neighbour.state}), silent for {silent_s:.1f} s")
        elif silent_s > pulse.may_be_silent_s:
            state = f"; its state is {neighbour.state}" if neighbour is not None else ""
            self.lose(
                rank,
                f"{self.name(rank)} has said nothing for {silent_s:.1f} s, last in {pulse.section}{state}: C code that"
                " holds the interpreter's lock, or a machine or network that is gone",
            )
