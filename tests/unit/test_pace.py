"""How long a step takes, told from when batches end; and what is said of it."""

from __future__ import annotations

import pytest

from lightning_resilience.checkpoint.adviser import Adviser, advice_from, duration
from lightning_resilience.checkpoint.interval import advise
from lightning_resilience.checkpoint.pace import Pace


def test_batches_that_are_accumulated_make_one_step() -> None:
    pace = Pace()
    assert [pace.tick(step, now, busy=False) for step, now in [(0, 0.0), (0, 1.0), (1, 2.0), (1, 3.0), (2, 4.0)]] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert pace.step_s() == 2.0
    assert pace.total_s == 4.0


def test_a_save_or_a_validation_is_no_step() -> None:
    pace = Pace()
    now = 0.0
    for step in range(20):
        pace.tick(step, now, busy=False)
        if step == 10:
            now += 100.0
            pace.pause(now)
        now += 50.0 if step == 15 else 1.0
    assert pace.step_s() == 1.0
    assert pace.total_s == pytest.approx(18 + 50 + 100)


def test_the_slowdown_beside_a_write_is_a_share_of_the_time() -> None:
    pace = Pace()
    now = 0.0
    for step in range(40):
        busy = step % 2 == 1
        pace.tick(step, now, busy=busy)
        now += 1.0 if busy else 1.25  # what ends at an odd step began at an even one
    assert pace.slowdown() == pytest.approx(0.2)


def test_nothing_is_known_of_a_slowdown_until_both_were_seen() -> None:
    pace = Pace()
    for step in range(40):
        pace.tick(step, float(step), busy=False)
    assert pace.slowdown() == 0.0
    assert Pace().step_s() == 0.0


def test_there_is_advice_when_a_save_is_durable() -> None:
    assert advice_from([0.1], []) is None
    assert advice_from([], []) is None
    advice = advice_from([0.1, 0.1], [2.0], slowdown_s=0.4)
    assert advice == advise(0.5, 2.0)


def test_what_is_advised_is_said_once_and_again_when_it_changes() -> None:
    adviser = Adviser()
    advice = advise(cost_s=0.5, write_s=2.0)  # about five minutes
    assert adviser.news(advice) == ""  # no pace yet
    adviser.saved(100, 0.0)
    adviser.saved(100, 0.5)  # last.ckpt of the same step
    adviser.saved(200, 10.0)
    text = adviser.news(advice)
    assert "about 2,000 steps" in text
    assert "a save every 4.9 min" in text
    assert "a fault every 24 h" in text
    assert "the last two are 9.5 s (100 steps) apart, which loses 5.0" in text
    assert adviser.news(advise(cost_s=0.6, write_s=2.0)) == ""
    assert "durable after 900 s" in adviser.news(advise(cost_s=0.5, write_s=900.0))
    assert adviser.news(None) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.42 s"), (12.0, "12 s"), (294.0, "4.9 min"), (86_400.0, "24 h"), (3e5, "3 d")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
