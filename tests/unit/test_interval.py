"""How often to save: the formula against a search and against a simulation of faults."""

from __future__ import annotations

import math
import random

import pytest

from lightning_resilience.checkpoint.interval import (
    ASSUMED_MTBF_S,
    IntervalAdvice,
    advise,
    differs,
    lost_share,
    mean_time_between_faults_s,
    next_interval,
    optimal_interval_s,
    round_steps,
    typical,
)
from lightning_resilience.errors import ConfigurationError


def expected_wall_s(interval_s: float, cost_s: float, mtbf_s: float, work_s: float = 1e6) -> float:
    """Daly's complete model (2006, equation 20) without restart time: exact for exponential faults."""
    return mtbf_s * (math.exp((interval_s + cost_s) / mtbf_s) - 1) * work_s / interval_s


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(0.1, 86_400.0), (5.0, 3600.0), (60.0, 1800.0), (300.0, 600.0)])
def test_no_other_interval_is_much_better(cost_s: float, mtbf_s: float) -> None:
    best = min(expected_wall_s(mtbf_s * 1.02**power, cost_s, mtbf_s) for power in range(-500, 100))
    ours = expected_wall_s(optimal_interval_s(cost_s, mtbf_s), cost_s, mtbf_s)
    assert ours <= best * 1.005


def test_an_interval_is_that_of_young_where_faults_are_rare() -> None:
    assert optimal_interval_s(0.5, 86_400.0) == pytest.approx(math.sqrt(2 * 0.5 * 86_400.0), rel=0.01)


def test_a_save_that_costs_more_than_two_faults_are_apart_still_gets_an_interval() -> None:
    assert optimal_interval_s(1000.0, 400.0) == 400.0


def test_the_lost_share_is_what_a_simulation_loses() -> None:
    interval_s, cost_s, write_s, mtbf_s = 100.0, 2.0, 10.0, 3000.0
    source = random.Random(1)
    lost = clock = 0.0
    fault = source.expovariate(1 / mtbf_s)
    durable = done = 0.0  # work that a fault cannot take, work done
    while clock < 5e6:
        pending, begun = done, clock
        end = clock + interval_s + cost_s
        if fault < end:
            clock = fault
            if fault - begun < write_s:  # the save before had not become durable
                pending = durable
            lost += (fault - begun) + (done - pending)
            done = durable = pending
            fault = clock + source.expovariate(1 / mtbf_s)
        else:
            clock, durable, done = end, done, done + interval_s
            lost += cost_s
    assert lost / clock == pytest.approx(lost_share(interval_s, cost_s, write_s, mtbf_s), rel=0.1)


def test_advice_never_asks_for_more_saves_than_can_be_written() -> None:
    assert advise(cost_s=0.01, write_s=600.0, mtbf_s=3600.0).interval_s == 600.0
    assert advise(cost_s=0.0, write_s=0.0).interval_s > 0.0


@pytest.mark.parametrize("wrong", [{"cost_s": -1.0}, {"write_s": math.nan}, {"mtbf_s": 0.0}, {"mtbf_s": math.inf}])
def test_times_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        advise(**{"cost_s": 1.0, "write_s": 1.0, "mtbf_s": 1.0, **wrong})


def test_faults_that_were_seen_outweigh_the_assumption() -> None:
    assert mean_time_between_faults_s(0.0, 0) == ASSUMED_MTBF_S
    assert mean_time_between_faults_s(30 * 86_400.0, 0) > 30 * 86_400.0
    assert mean_time_between_faults_s(100 * 3600.0, 100) == pytest.approx(3600.0, rel=0.25)


def test_the_first_save_is_not_typical() -> None:
    assert typical([9.0, 1.0, 1.1]) == 1.1
    assert typical([100.0] * 50 + [1.0] * 8) == 1.0


def an_advice(interval_s: float) -> IntervalAdvice:
    return IntervalAdvice(interval_s, 1.0, 1.0, 1.0, 0.0)


def test_small_changes_are_no_news() -> None:
    assert differs(None, an_advice(10.0))
    assert not differs(an_advice(10.0), an_advice(19.0))
    assert differs(an_advice(10.0), an_advice(21.0))
    assert differs(an_advice(10.0), an_advice(4.9))


@pytest.mark.parametrize(
    ("steps", "nice"), [(0.3, 1), (1.0, 1), (1.6, 2), (3.0, 2), (3.5, 5), (8.0, 10), (100.0, 100), (640.0, 500)]
)
def test_intervals_in_steps_are_nice_numbers(steps: float, nice: int) -> None:
    assert round_steps(steps) == nice


def test_an_interval_grows_step_by_step_and_then_rests() -> None:
    """A history: little is known at first; once the advice is near the interval does not move."""
    history = [10]
    while len(history) < 8:
        history.append(next_interval(history[-1], an_advice(700.0), step_s=0.1))
    assert history == [10, 100, 1000, 5000, 5000, 5000, 5000, 5000]
    assert next_interval(5000, an_advice(300.0), step_s=0.1) == 5000
    assert next_interval(5000, an_advice(100.0), step_s=0.1) == 1000
    assert next_interval(10, None, step_s=0.1) == 10
