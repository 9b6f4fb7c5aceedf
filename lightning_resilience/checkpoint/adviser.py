"""Remembers how fast training goes and what was advised, and says so when there is news; one per checkpoint plugin."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_resilience.checkpoint.interval import (
    ASSUMED_MTBF_S,
    IntervalAdvice,
    advise,
    differs,
    lost_share,
    round_steps,
    typical,
)


def advice_from(
    stalls_s: Sequence[float], writes_s: Sequence[float], mtbf_s: float = ASSUMED_MTBF_S, slowdown_s: float = 0.0
) -> IntervalAdvice | None:
    """Advice from the saves so far; None before the first is durable.

    Args:
        stalls_s: Seconds that each save made training wait.
        writes_s: Seconds until each was durable, of those that are.
        mtbf_s: Mean time between faults.
        slowdown_s: Seconds that the steps beside one write take longer in all.
    """
    if not stalls_s or not writes_s:
        return None
    return advise(typical(stalls_s) + slowdown_s, typical(writes_s), mtbf_s)


class Adviser:
    """Owned by the checkpoint plugin of rank 0; called by the training thread at each save."""

    def __init__(self) -> None:
        self._told: IntervalAdvice | None = None
        self._last: tuple[int, float] | None = None
        self._pace: list[tuple[int, float]] = []

    def saved(self, step: int, now_s: float) -> None:
        """A save of this step was asked for at this monotonic time; two of one step tell no pace."""
        if self._last is not None and step > self._last[0]:
            self._pace.append((step - self._last[0], now_s - self._last[1]))
            del self._pace[:-32]
        self._last = step, now_s

    def news(self, advice: IntervalAdvice | None) -> str:
        """What to log; empty when there is nothing new."""
        if advice is None or not self._pace or not differs(self._told, advice):
            return ""
        self._told = advice
        steps, seconds = self._pace[-1]
        step_s = typical([gap / count for count, gap in self._pace])
        at_present = lost_share(seconds, advice.cost_s, advice.write_s, advice.mtbf_s)
        return (
            f"a save costs training {advice.cost_s:.3g} s and is durable after {advice.write_s:.3g} s: with a fault"
            f" every {duration(advice.mtbf_s)} a save every {duration(advice.interval_s)} (about"
            f" {round_steps(advice.interval_s / step_s):,} steps) loses least, {advice.lost:.2%} of the time; the last"
            f" two are {duration(seconds)} ({steps:,} steps) apart, which loses {at_present:.2%}."
            ' ResilientModelCheckpoint(every_n_train_steps="auto") follows this by itself'
        )


def duration(seconds: float) -> str:
    """For people: 0.4 s, 12 s, 5 min, 3 h, 2 d."""
    for limit, unit_s, unit in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172_800.0, 3600.0, "h")):
        if seconds < limit:
            value = seconds / unit_s
            return f"{value:.2g} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{seconds / 86_400.0:.0f} d"
