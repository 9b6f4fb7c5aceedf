"""How long a step takes, and how much longer while a checkpoint is being written. Pure: the time is passed in."""

from __future__ import annotations

import statistics
from collections import deque

_REMEMBERED = 64
_ENOUGH = 8


class Pace:
    """Owned by the callback that decides how often to save; told of each batch by the training thread."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._idle: deque[float] = deque(maxlen=_REMEMBERED)
        self._busy: deque[float] = deque(maxlen=_REMEMBERED)
        self.total_s = 0.0

    def tick(self, step: int, now_s: float, *, busy: bool) -> bool:
        """A batch has ended; True when an optimizer step was done since the last one.

        Args:
            step: Optimizer steps done.
            now_s: Monotonic time.
            busy: A checkpoint is being written.
        """
        if self._last is None:
            self._last = step, now_s
            return False
        before, since_s = self._last
        if step <= before:
            return False
        (self._busy if busy else self._idle).append((now_s - since_s) / (step - before))
        self.total_s += now_s - since_s
        self._last = step, now_s
        return True

    def pause(self, now_s: float) -> None:
        """What passed since the last tick was no step."""
        if self._last is not None:
            self.total_s += now_s - self._last[1]
            self._last = self._last[0], now_s

    def step_s(self) -> float:
        """Seconds of a step, typically; 0 while unknown. Validations and first steps do not count, being rare."""
        steps = [*self._idle, *self._busy]
        return statistics.median(steps) if steps else 0.0

    def slowdown(self) -> float:
        """Share of the time lost while a checkpoint is being written; 0 until both kinds of steps were seen."""
        if min(len(self._idle), len(self._busy)) < _ENOUGH:
            return 0.0
        return max(0.0, 1.0 - statistics.median(self._idle) / statistics.median(self._busy))
