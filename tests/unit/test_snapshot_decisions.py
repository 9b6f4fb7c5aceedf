"""Snapshots, decided: how often they are taken, and when a new start goes on from one."""

from __future__ import annotations

import itertools

import pytest

from lightning_resilience.checkpoint.snapshots.choice import (
    Request,
    Stored,
    is_as_new,
    is_newer,
    may_stand_in,
    newest_common,
)
from lightning_resilience.checkpoint.snapshots.pace import Measured, Pace, interval


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# --- how often ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost_s", "step_s", "steps"),
    [
        (0.001, 1.0, 1),  # a tenth of a percent of a step: at every step
        (0.010, 1.0, 1),
        (0.011, 1.0, 2),
        (0.100, 0.1, 100),
        (5.0, 0.0001, 100_000),
        (0.1, 0.0, 5),  # nothing is known yet
    ],
)
def test_the_interval_keeps_the_cost_below_one_percent(cost_s: float, step_s: float, steps: int) -> None:
    assert interval([Measured(cost_s, step_s)]) == steps
    if 0 < steps < 100_000 and step_s:
        assert cost_s / (steps * step_s) <= 0.01


def test_the_rank_that_pays_most_decides_for_all() -> None:
    assert interval([Measured(0.01, 1.0), Measured(0.05, 1.0), Measured(0.01, 0.5)]) == 5


def test_every_third_step_is_counted_from_zero_also_after_a_resume() -> None:
    pace = Pace(3, Clock())
    pace.begin(7)
    due = []
    for step in range(8, 17):
        if pace.batch_done(step):
            due.append(step)
            pace.taken(0.1)
    assert due == [9, 12, 15]


def test_batches_that_only_accumulate_gradients_are_no_steps() -> None:
    pace = Pace(2, Clock())
    pace.begin(0)
    assert [pace.batch_done(step) for step in (0, 0, 1, 1, 1, 2)] == [False, False, False, False, False, True]


def test_two_optimizers_may_step_over_the_step_at_which_one_is_due() -> None:
    pace = Pace(3, Clock())
    pace.begin(0)
    assert [pace.batch_done(step) for step in (2, 4)] == [False, True]


def train(pace: Pace, clock: Clock, steps: range, step_s: float, stall_s: float, after_s: float = 0.0) -> list[int]:
    """Steps at which a snapshot was taken, while each costs so much."""
    taken: list[int] = []
    for step in steps:
        clock.now += step_s + (after_s if taken and taken[-1] == step - 1 else 0.0)
        if pace.batch_done(step):
            clock.now += stall_s
            pace.taken(stall_s)
            pace.adapt([pace.measured])
            taken.append(step)
    return taken


def test_auto_measures_and_keeps_to_one_percent() -> None:
    clock = Clock()
    pace = Pace("auto", clock)
    pace.begin(0)
    taken = train(pace, clock, range(1, 1001), step_s=0.1, stall_s=0.02)
    assert taken[:3] == [5, 10, 30]  # one to plan, one to measure, then every 20 steps
    assert {b - a for a, b in itertools.pairwise(taken[2:])} == {20}


def test_auto_adapts_when_steps_become_slower() -> None:
    clock = Clock()
    pace = Pace("auto", clock)
    pace.begin(0)
    train(pace, clock, range(1, 200), step_s=0.1, stall_s=0.1)
    assert pace.every == 100
    train(pace, clock, range(200, 600), step_s=1.0, stall_s=0.1)
    assert pace.every == 10


def test_auto_counts_what_the_copy_costs_the_step_after_it() -> None:
    """On a GPU the call returns at once, and the update waits for the copy."""
    clock = Clock()
    pace = Pace("auto", clock)
    pace.begin(0)
    train(pace, clock, range(1, 300), step_s=0.1, stall_s=0.001, after_s=0.01)
    assert pace.every == 11


def test_the_first_snapshot_which_plans_does_not_count() -> None:
    clock = Clock()
    pace = Pace("auto", clock)
    pace.begin(0)
    for step in range(1, 6):
        clock.now += 0.1
        due = pace.batch_done(step)
    assert due
    pace.taken(30.0)
    pace.adapt([pace.measured])
    assert pace.every == 5


def test_a_small_change_of_the_interval_is_not_worth_a_word() -> None:
    pace = Pace("auto", Clock())
    pace.every = 100
    assert not pace.adapt([Measured(1.1, 1.0)])
    assert pace.adapt([Measured(2.0, 1.0)])


# --- from what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "step"),
    [
        ([[40, 39], [40, 39]], 40),
        ([[40, 39], [39, 38]], 39),  # one was killed before it had copied everything
        ([[40], [39]], None),
        ([[40, 39], []], None),  # a rank on a new machine
        ([[7]], 7),
    ],
)
def test_the_newest_step_that_all_hold_is_taken(held: list[list[int]], step: int | None) -> None:
    assert newest_common(held) == step


NEWEST = Stored("/runs/a/step=30.ckpt", 30, created_ns=1000)


@pytest.mark.parametrize(
    ("step", "base_ns", "newer"),
    [
        (37, 0, True),
        (30, 0, False),  # the same state
        (25, 0, False),  # a save after it was committed by the writers alone
        (25, 1000, True),  # the run went back to an older checkpoint: the one of step 30 is of another future
    ],
)
def test_newer_than_the_newest_checkpoint(step: int, base_ns: int, newer: bool) -> None:
    assert is_newer(step, NEWEST, base_ns) is newer


def test_of_the_same_step_memory_is_taken_which_is_there_already() -> None:
    assert is_as_new(30, NEWEST, 0)
    assert not is_as_new(29, NEWEST, 0)


def test_without_any_checkpoint_a_snapshot_is_newer() -> None:
    assert is_newer(1, None, 0)


def test_a_checkpoint_that_does_not_say_its_step_is_not_passed_over() -> None:
    assert not is_newer(37, Stored("/runs/a/stock.ckpt", None, 1000), 0)


RUN = "/runs/a"
OLDER, ELSEWHERE = "/runs/a/step=20.ckpt", "/models/pretrained.ckpt"


@pytest.mark.parametrize(
    ("path", "asked", "newest", "may"),
    [
        (NEWEST.path, True, NEWEST, True),
        (NEWEST.path, False, NEWEST, True),
        (RUN, False, NEWEST, True),
        (OLDER, True, NEWEST, False),  # the user goes back
        (ELSEWHERE, True, NEWEST, False),
        (None, True, NEWEST, False),  # the user begins anew
        (None, True, None, True),  # killed before its first checkpoint
        (ELSEWHERE, True, None, True),  # newest_checkpoint(...) or "pretrained.ckpt"
        (None, False, None, False),  # nobody spoke of resuming
        (ELSEWHERE, False, None, False),
    ],
)
def test_a_snapshot_stands_in_only_for_the_newest_state(
    path: str | None, asked: bool, newest: Stored | None, may: bool
) -> None:
    assert may_stand_in(Request(path, asked), newest, RUN) is may
