"""How often a snapshot is taken: every so many optimizer steps, or as often as a share of the time allows.

Pure, but for the clock that is passed in. Used by the training thread.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

SHARE = 0.01  # of training's time, with "auto"
_WARM_UP = 5  # optimizer steps before the first two snapshots with "auto"
_ROUNDING = 1e-6
_LONGEST = 100_000
_NOTABLE = 1.25


@dataclass(frozen=True)
class Measured:
    """What one rank has measured.

    Attributes:
        cost_s: Seconds that a snapshot takes from training.
        step_s: Seconds of an optimizer step in which there is none; 0 while unknown.
    """

    cost_s: float
    step_s: float


def interval(measured: Sequence[Measured], share: float = SHARE) -> int:
    """Optimizer steps between two snapshots, so that they take at most ``share`` of the time on every rank."""
    return max(_interval(one, share) for one in measured)


def _interval(measured: Measured, share: float) -> int:
    if measured.step_s <= 0:
        return _WARM_UP
    return min(_LONGEST, max(1, math.ceil(measured.cost_s / (share * measured.step_s) - _ROUNDING)))


class Pace:
    """Owned by the snapshot engine of one rank; gives the same answers on all ranks.

    Args:
        every: Optimizer steps, or "auto".
        clock: Seconds.
    """

    def __init__(self, every: int | Literal["auto"], clock: Callable[[], float] = time.monotonic) -> None:
        self.automatic = every == "auto"
        self.every = _WARM_UP if every == "auto" else every
        self._clock = clock
        self._costs: deque[float] = deque(maxlen=8)
        self._plain_steps: deque[float] = deque(maxlen=64)
        self._steps_after: deque[float] = deque(maxlen=8)
        self._taken = 0
        self.begin(0)

    def begin(self, step: int) -> None:
        """Training goes on from here; what was measured stays."""
        self._last_step = self._last_taken = step
        self._last_time: float | None = None
        self._follows_snapshot = False

    def batch_done(self, step: int) -> bool:
        """Note the end of a batch.

        Args:
            step: Optimizer steps done; unchanged while gradients are accumulated.

        Returns:
            Whether a snapshot is due.
        """
        if step <= self._last_step:
            return False
        self._note_duration(step - self._last_step)
        self._last_step = step
        if self.automatic:
            return step - self._last_taken >= self.every
        return step // self.every > self._last_taken // self.every

    def taken(self, stall_s: float) -> None:
        """A snapshot was taken at the step noted last, and training stood still for so long."""
        self._taken += 1
        if self._taken > 1:  # the first had to plan
            self._costs.append(stall_s)
        self._last_taken = self._last_step
        self._last_time = self._clock()
        self._follows_snapshot = True

    @property
    def measured(self) -> Measured:
        """What this rank has seen: the stall, and by how much the step after it is longer than others."""
        if not self._costs or not self._plain_steps:
            return Measured(0.0, 0.0)
        step_s = statistics.median(self._plain_steps)
        behind = 0.0
        if len(self._steps_after) >= 3:
            behind = max(0.0, statistics.median(self._steps_after) - step_s)
        return Measured(statistics.median(self._costs) + behind, step_s)

    def adapt(self, measured: Sequence[Measured]) -> bool:
        """With what all ranks have measured, change the interval; True when it is worth a word."""
        before, self.every = self.every, interval(measured)
        return not before / _NOTABLE <= self.every <= before * _NOTABLE

    def _note_duration(self, steps: int) -> None:
        now = self._clock()
        if self._last_time is not None:
            durations = self._steps_after if self._follows_snapshot else self._plain_steps
            durations.append((now - self._last_time) / steps)
        self._last_time, self._follows_snapshot = now, False
