"""How long a section of training may take before it counts as a hang: given, or learned from what was seen. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from lightning_resilience.durations import checked_seconds


class Section(str, Enum):
    """What the training thread is doing."""

    SETUP = "setup"
    RESTORE = "restore"
    FIRST_STEP = "first_step"
    TRAIN_STEP = "train_step"
    DATA_WAIT = "data_wait"
    OPTIMIZER = "optimizer"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    HOOKS = "hooks"
    WAITING = "waiting"
    """For the other ranks, at the end of training: makes no progress by itself."""


STEADY = frozenset({Section.TRAIN_STEP, Section.DATA_WAIT, Section.OPTIMIZER, Section.VALIDATION})
"""Sections that come again and again, so that their durations say what is usual."""

_SHORTEST_STOP_S, _SHORTEST_SILENCE_S = 1.0, 5.0


@dataclass(frozen=True, kw_only=True)
class LearnedTimeouts:
    """How timeouts follow from durations.

    Attributes:
        factor: A steady section may take this many times as long as the longest one remembered.
        floor_s: It may always take this long.
        unknown_s: It may take this long before enough of them were seen, as may all other sections.
        enough: How many must be seen.
        remembered: How many are remembered; an exception is forgotten after as many.
    """

    factor: float = 10.0
    floor_s: float = 60.0
    unknown_s: float = 1800.0
    enough: int = 5
    remembered: int = 200


class Timeouts:
    """Of one rank. `took` is called by the main thread, `limit_s` by the watchdog.

    Args:
        hang_timeout_s: For steady sections, the first step and hooks; None to learn.
        learned: How to.
    """

    def __init__(self, hang_timeout_s: float | None, learned: LearnedTimeouts | None = None) -> None:
        self._given = hang_timeout_s
        self._how = learned or LearnedTimeouts()
        self._save_wait_s = 0.0
        self._seen: dict[Section, deque[float]] = {name: deque(maxlen=self._how.remembered) for name in STEADY}

    def took(self, section: Section, seconds: float) -> None:
        """A section is over."""
        if self._given is None and section in STEADY:
            self._seen[section].append(seconds)

    def saves_may_wait(self, seconds: float) -> None:
        """So long a save may wait for storage that stalls, by itself, before it is an error."""
        self._save_wait_s = seconds

    def limit_s(self, section: Section) -> float:
        """How long a section may take."""
        how = self._how
        if section is Section.CHECKPOINT:
            return self._save_wait_s + how.unknown_s
        if section is Section.WAITING:
            return 0.0
        if self._given is not None and section in STEADY | {Section.FIRST_STEP, Section.HOOKS}:
            return self._given
        seen = list(self._seen.get(section, ()))
        if len(seen) < how.enough:
            return how.unknown_s
        return min(max(how.floor_s, how.factor * max(seen)), how.unknown_s)

    @property
    def stopped_s(self) -> float:
        """How long a process may be stopped, or a machine out of reach."""
        return self._how.floor_s if self._given is None else max(self._given, _SHORTEST_STOP_S)

    def silence_s(self, section: Section) -> float:
        """How long a rank may say nothing while in a section. Code in C may hold the interpreter's lock for a while,
        and who is given up does not come back: so this is longer than what makes a hang."""
        given = self._how.floor_s if self._given is None else 3 * self._given
        return max(self.limit_s(section), min(max(given, _SHORTEST_SILENCE_S), self._how.floor_s))


def hang_seconds(value: float | timedelta | None) -> float | None:
    """The option `hang_timeout` in seconds.

    Raises:
        ConfigurationError: It cannot be a duration.
    """
    return None if value is None else checked_seconds(value, "hang_timeout={}", ", or None")
