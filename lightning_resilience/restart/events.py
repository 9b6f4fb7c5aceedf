"""What the engine tells people: events for the file, a line of the log for each incident."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_resilience.events import Event
from lightning_resilience.restart.meeting import FromCommit, FromRestorePoint, Resumption
from lightning_resilience.restart.policy import Fault
from lightning_resilience.restart.reports import in_words
from lightning_resilience.restart.witness import Statement
from lightning_resilience.restart.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Restarted(Event):
    """This rank goes on after a fault. ``phases`` are seconds, in order; ``number`` counts the restarts of the run."""

    kind: ClassVar[str] = "restarted"
    number: int
    generation: int
    faults: Sequence[Fault]
    outcome: str
    phases: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class GaveUp(Event):
    """A fault ends the run."""

    kind: ClassVar[str] = "gave_up"
    faults: Sequence[Fault]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Stuck(Event):
    """The training thread of this rank does not react; its process leaves."""

    kind: ClassVar[str] = "stuck"
    alarm: Fault
    where: str


@dataclass(frozen=True, kw_only=True)
class Hang(Event):
    """No progress: where each rank was, and who the others seem to wait for. Of one rank, for all."""

    kind: ClassVar[str] = "hang"
    alarm: Fault
    suspects: Mapping[str, str]
    ranks: Sequence[Statement]


@dataclass(frozen=True, kw_only=True)
class Fewer(Event):
    """Ranks are out for good. ``ranks`` go on, by their old numbers; the position of each is its new one."""

    kind: ClassVar[str] = "fewer_ranks"
    ranks: Sequence[int]
    dropped: Mapping[str, str]


class Incident:
    """A fault and the restart after it, as one rank saw it.

    Attributes:
        number: Counts the restarts of a run, from 1.
        rank: Who saw it.
        faults: What stopped which ranks.
        resumption: Where training goes on.
        world: Who goes on, if some do not.
        phases: Seconds of each phase, in order.
    """

    def __init__(self, *, number: int, rank: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.number = number
        self.rank = rank
        self.faults: list[Fault] = []
        self.resumption: Resumption | None = None
        self.world: World | None = None
        self.phases: dict[str, float] = {}
        self._clock = clock
        self._since = clock()

    def done(self, phase: str) -> None:
        """A phase is over."""
        now = self._clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._since
        self._since = now

    @property
    def seconds(self) -> float:
        """All phases together."""
        return sum(self.phases.values())

    @property
    def cause(self) -> str:
        """The faults in a few words."""
        return "; ".join(map(in_words, self.faults)) or "unknown"

    @property
    def _origin(self) -> str:
        """File, line and function of the first fault."""
        places = [fault.where.rpartition(" > ")[2] for fault in self.faults if fault.where]
        return f" ({places[0]})" if places else ""

    @property
    def goes_on(self) -> str:
        """Where training goes on, in a few words."""
        match self.resumption:
            case FromCommit(standing=standing):
                return f"goes on after step {standing.step}, nothing is lost"
            case FromRestorePoint(reason=reason):
                return f"goes back to an older state, as {reason}"
        return "begins again, nothing was trained yet"

    def tell(self) -> None:
        """One line in the log of rank 0."""
        if self.rank == 0:
            log.warning("%s%s. Restarted in %.2f s: training %s.", self.cause, self._origin, self.seconds, self.goes_on)

    def restarted(self, generation: int) -> Restarted:
        """The event that says the same."""
        phases = {name: round(seconds, 6) for name, seconds in self.phases.items()}
        return Restarted(
            number=self.number, generation=generation, faults=self.faults, outcome=self.goes_on, phases=phases
        )
