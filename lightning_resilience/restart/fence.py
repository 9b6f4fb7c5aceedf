"""Keep an optimizer's update in one piece.

An interruption that arrives between the start of an update and the commit after it waits until the commit. If that
does not come within a bound, it is let through, and the state is known to be torn.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Fence:
    """Written by the main thread, read by any.

    Args:
        limit_s: How long an interruption may be held back.
        clock: In seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._since: float | None = None

    def close(self) -> None:
        """An update begins."""
        self._since = self._clock()

    def open(self) -> None:
        """The update is committed."""
        self._since = None

    @property
    def closed(self) -> bool:
        """Whether an update has begun and is not committed."""
        return self._since is not None

    def holds(self) -> bool:
        """Whether an interruption must wait."""
        since = self._since
        return since is not None and self._clock() - since < self._limit_s
