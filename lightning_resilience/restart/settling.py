"""How long the others wait for a rank that is a step behind them, before collectives end. Pure."""

from __future__ import annotations


class Straggler:
    """A rank that is a step behind.

    Args:
        settle_s: How long it may take in all.
        ready_s: How long it may take to begin an update for which it is ready. Nothing is missing then but its own
            code, so if that does not come to it, it hangs there; the update can be done after the meeting as well.
        now: In seconds of a clock that only goes forward.
    """

    def __init__(self, settle_s: float, ready_s: float, now: float) -> None:
        self._deadline = now + settle_s
        self._ready_s = ready_s
        self._busy = now

    def may_come(self, *, ready: bool, now: float) -> bool:
        """Whether to wait longer.

        Args:
            ready: Whether its gradients are complete and its update has not begun.
            now: See above.
        """
        if not ready:
            self._busy = now
        return now < self._deadline and now - self._busy < self._ready_s
