"""Notices that this rank makes no progress.

The main thread says what it is doing; a thread looks on every turn whether that has been going on for too long. A
rank that is late by itself is at fault. One that waits in a collective is not: others may be busy with something that
takes its time. It says that it is late; when every rank is, nobody is busy, and that is a hang. When the collective is
over, its own time begins anew.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch.distributed as dist

from lightning_resilience._torch import cuda_in_use
from lightning_resilience._torch_groups import collectives_begun
from lightning_resilience.restart.control import Generation
from lightning_resilience.restart.policy import Fault
from lightning_resilience.restart.timeouts import Section, Timeouts
from lightning_resilience.restart.witness import Statement

_SHORTEST_TURN_S, _LONGEST_TURN_S = 0.02, 1.0
_TURNS = 20
"""A limit is looked at this often within its duration, so that it is not exceeded by much."""


class Beat(NamedTuple):
    """What the main thread is doing, and since when."""

    section: Section
    since: float


class Heart:
    """Written by the main thread at every change of section, read by the watchdog.

    Args:
        timeouts: Which learn from it.
        clock: In seconds.
    """

    def __init__(self, timeouts: Timeouts, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeouts = timeouts
        self._clock = clock
        self.beat = Beat(Section.SETUP, clock())

    def enter(self, section: Section) -> Section:
        """Something new is being done; returns what was done before."""
        before, now = self.beat, self._clock()
        self.beat = Beat(section, now)
        self._timeouts.took(before.section, now - before.since)
        return before.section

    def statement(self, rank: int) -> Statement:
        """Where this rank is. Any thread."""
        beat, stack = self.beat, main_thread_stack()
        return Statement(
            rank=rank,
            section=beat.section.value,
            seconds=self._clock() - beat.since,
            waits=waits_for_others(beat.section, stack),
            collectives=collectives_begun(),
            stack=[f"{frame.filename}:{frame.lineno} {frame.name}" for frame in stack],
        )


class Watchdog:
    """A thread for one generation.

    Args:
        heart: Of this rank.
        timeouts: How long each section may take.
        generation: A connection that nobody else uses.
        describe: Makes a fault of this rank out of a message.
        turn: Around each turn.
        clock: In seconds.
    """

    def __init__(
        self,
        heart: Heart,
        timeouts: Timeouts,
        generation: Generation,
        describe: Callable[[str], Fault],
        turn: Callable[[Generation], AbstractContextManager[None]] = lambda generation: contextlib.nullcontext(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heart = heart
        self._timeouts = timeouts
        self._generation = generation
        self._describe = describe
        self._turn = turn
        self._clock = clock
        self._stopped = self._raised = False
        self._wake = threading.Event()
        self._late: Beat | None = None
        self._waited_at = -math.inf
        self._thread = threading.Thread(target=self._run, name="lightning-resilience-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._wake.set()
        self._thread.join()

    def wake(self) -> None:
        """Take the next turn now."""
        self._wake.set()

    def _run(self) -> None:
        """Until it is stopped: also after an alarm others want to know whether this rank is there."""
        try:
            while not self._stopped:
                with self._turn(self._generation):
                    self._raised = self._raised or self.look(self._waits())
                if self._wake.wait(self._turn_s()) and not self._stopped:
                    self._wake.clear()
        except dist.DistError:  # the edge of the thread: the control store is gone, which the monitor notices too
            return

    def look(self, waits: bool) -> bool:
        """One turn; whether this rank raised the alarm.

        Args:
            waits: Whether the main thread is inside a collective.
        """
        beat, now = self._heart.beat, self._clock()
        limit = self._timeouts.limit_s(beat.section)
        own_since = beat.since if waits else max(beat.since, self._waited_at)  # it pays for nobody else's time
        late = now - own_since > limit
        if waits:
            self._waited_at = now
        if self._late is not None and not (waits and beat is self._late):
            self._generation.call_late(late=False)
            self._late = None
        if not late:
            return False
        if waits:
            if self._late is None:
                self._late = beat
                self._generation.call_late(late=True)
            if not self._generation.all_late():
                return False
        where = "in a collective, as all ranks are" if waits else "outside of any collective"
        self._generation.raise_alarm(self._describe(f"no progress for {limit:.3g} s, {where}"))
        return True

    def _waits(self) -> bool:
        return waits_for_others(self._heart.beat.section, main_thread_stack())

    def _turn_s(self) -> float:
        """Not longer in a section that may last, as the next one may not."""
        limit = min(self._timeouts.limit_s(self._heart.beat.section), self._timeouts.stopped_s)
        return min(max(limit / _TURNS, _SHORTEST_TURN_S), _LONGEST_TURN_S)


def waits_for_others(section: Section, stack: Iterable[traceback.FrameSummary]) -> bool:
    """Whether the main thread is where only other ranks can bring it out.

    On CUDA collectives run beside the main thread, which may wait for them anywhere.
    """
    return cuda_in_use() or section is Section.WAITING or in_collective(stack)


def main_thread_stack() -> list[traceback.FrameSummary]:
    """Where the main thread is, innermost last, without source lines."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return list(reversed(summary))


def in_collective(stack: Iterable[traceback.FrameSummary]) -> bool:
    """Whether the innermost frames are torch's collectives, or a wait for one."""
    innermost = list(stack)[-4:]
    return any("torch/distributed/" in frame.filename for frame in innermost)
