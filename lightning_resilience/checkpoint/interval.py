"""How often to take a checkpoint: the interval that loses least time, from what was measured. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_resilience.errors import ConfigurationError

ASSUMED_MTBF_S = 86_400.0
"""A fault a day, until faults have been seen: the optimum is flat, four times as many halve the interval."""

_RECENT = 8
_SERIES = (1, 2, 5)


@dataclass(frozen=True)
class IntervalAdvice:
    """How often to save, and why.

    Attributes:
        interval_s: Seconds from one save to the next at which least time is lost.
        cost_s: Seconds that one save takes from training.
        write_s: Seconds until a save is durable.
        mtbf_s: Mean time between faults in seconds.
        lost: Share of the time that is lost to saving and to work done again, at this interval.
    """

    interval_s: float
    cost_s: float
    write_s: float
    mtbf_s: float
    lost: float


def optimal_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves at which the least time is lost.

    Young's first-order optimum ``sqrt(2 * cost * mtbf)`` with Daly's higher-order terms. Sources: J. W. Young, "A first
    order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A higher order estimate of
    the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006, equation 37.

    Args:
        cost_s: Seconds that one save takes from training. For a save that goes on in the background that is the
            stall, not the time of the write: Daly's derivation asks how long the machine does no work.
        mtbf_s: Mean time between faults, in seconds.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def lost_share(interval_s: float, cost_s: float, write_s: float, mtbf_s: float) -> float:
    """Share of the time, to first order, that goes into saving and into work that is done again after faults.

    A fault costs half an interval on average, and the write that was under way: what is not durable yet does not count.
    """
    return min(1.0, cost_s / (interval_s + cost_s) + (interval_s / 2 + write_s) / mtbf_s)


def advise(cost_s: float, write_s: float, mtbf_s: float = ASSUMED_MTBF_S) -> IntervalAdvice:
    """The interval that loses least; never shorter than a write, as saves would only queue.

    Raises:
        ConfigurationError: A time is not a positive number of seconds.
    """
    for name, value in (("cost_s", cost_s), ("write_s", write_s), ("mtbf_s", mtbf_s)):
        if not math.isfinite(value) or value < 0 or (name == "mtbf_s" and value == 0):
            raise ConfigurationError(f"{name}={value!r}: seconds, more than 0")
    interval_s = max(optimal_interval_s(cost_s, mtbf_s), write_s, 1e-3)
    return IntervalAdvice(interval_s, cost_s, write_s, mtbf_s, lost_share(interval_s, cost_s, write_s, mtbf_s))


def typical(values: Sequence[float]) -> float:
    """The median of the latest: the first save, or one beside a validation, is not what the next will cost."""
    return statistics.median(values[-_RECENT:])


def mean_time_between_faults_s(trained_s: float, faults: int, assumed_s: float = ASSUMED_MTBF_S) -> float:
    """Estimate from what was seen, starting from an assumption that weighs as much as one fault.

    The posterior mean of an exponential rate under a gamma prior of shape 1: with nothing seen it is the assumption,
    and after a few faults it is what was measured.

    Args:
        trained_s: Seconds of training so far, over all starts of the run.
        faults: How often it was interrupted in that time.
        assumed_s: What to assume before anything is known.
    """
    return (assumed_s + trained_s) / (1 + faults)


def differs(before: IntervalAdvice | None, now: IntervalAdvice) -> bool:
    """Whether somebody who was told ``before`` should hear of ``now``: the optimum is so flat that less is no news."""
    return before is None or not 0.5 <= now.interval_s / before.interval_s <= 2.0


def round_steps(steps: float) -> int:
    """The nearest of 1, 2, 5, 10, 20, 50, ... by ratio: nice names, and a loss of a few percent of a small loss."""
    if steps <= 1:
        return 1
    power: int = 10 ** int(math.log10(steps))
    choices = [factor * power for factor in (*_SERIES, 10)]
    return min(choices, key=lambda choice: abs(math.log(choice / steps)))


def next_interval(current: int, advice: IntervalAdvice | None, step_s: float) -> int:
    """Steps until the next save.

    It grows at most tenfold at once, as early measurements are poor, and stays where the advice is near enough.

    Args:
        current: The interval now, in steps.
        advice: None while nothing was measured.
        step_s: Seconds of one step.
    """
    if advice is None or step_s <= 0:
        return current
    exact = min(advice.interval_s / step_s, 10.0 * current)
    return current if 0.5 <= exact / current <= 2.0 else round_steps(exact)
