"""What the launcher does when a rank has ended: a pure function of how it ended and what happened before."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREEMPTED = 128 + signal.SIGTERM
EXIT_INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True, kw_only=True)
class Exit:
    """A process of the job has ended.

    Attributes:
        rank: Which.
        code: Its exit code; minus the number of the signal that killed it.
    """

    rank: int
    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"rank {self.rank} ended with code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:  # a real-time signal
            name = f"signal {-self.code}"
        hint = " (the kernel does that too when memory runs out: see dmesg)" if name == "SIGKILL" else ""
        return f"rank {self.rank} was killed by {name}{hint}"


@dataclass(frozen=True)
class GoOn:
    """Nothing is to be done."""


@dataclass(frozen=True)
class RestartAll:
    """End the other ranks of this machine, and start all of them anew."""

    reason: str


@dataclass(frozen=True)
class Stop:
    """End what is left, and leave.

    Attributes:
        code: The launcher's own exit code.
        reason: For people.
    """

    code: int
    reason: str


Action: TypeAlias = GoOn | RestartAll | Stop


def after_exit(exit_: Exit, *, running: int, restarts: int, max_restarts: int) -> Action:
    """What to do when a rank has ended while nothing was wrong.

    Args:
        exit_: How it ended.
        running: How many ranks still run.
        restarts: How many restarts there were.
        max_restarts: How many there may be.
    """
    if exit_.code == 0:
        return GoOn() if running else Stop(0, "all ranks are done")
    if exit_.code == EXIT_PREEMPTED:
        return Stop(EXIT_PREEMPTED, f"rank {exit_.rank} stopped after SIGTERM")
    if restarts >= max_restarts:
        return Stop(EXIT_FAILED, f"{exit_}, and {_used_up(max_restarts)}")
    return RestartAll(str(exit_))


def _used_up(max_restarts: int) -> str:
    return f"--max-restarts {max_restarts} allows no more restarts" if max_restarts else "--max-restarts is 0"


def code_after_stop(stop: Stop, codes: Mapping[int, int], *, exit_zero: bool) -> int:
    """The launcher's exit code.

    Args:
        stop: Why it ends.
        codes: How each rank has ended.
        exit_zero: Whether a stop after SIGTERM counts as success, if every rank has ended by it and not of a fault.
    """
    if stop.code == EXIT_PREEMPTED and exit_zero and set(codes.values()) <= {0, EXIT_PREEMPTED, -signal.SIGTERM}:
        return 0
    return stop.code
