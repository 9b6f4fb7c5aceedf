"""How long a rank that is a step behind is waited for."""

from __future__ import annotations

from lightning_resilience.restart.settling import Straggler


def test_who_computes_has_all_the_time() -> None:
    straggler = Straggler(settle_s=10, ready_s=0.5, now=100)
    assert straggler.may_come(ready=False, now=109.9)
    assert not straggler.may_come(ready=False, now=110)


def test_who_hangs_just_before_its_update_is_not_waited_for() -> None:
    straggler = Straggler(settle_s=10, ready_s=0.5, now=100)
    assert straggler.may_come(ready=True, now=100.4)
    assert not straggler.may_come(ready=True, now=100.5)


def test_time_counts_from_when_it_became_ready() -> None:
    straggler = Straggler(settle_s=10, ready_s=0.5, now=100)
    assert straggler.may_come(ready=False, now=103)
    assert straggler.may_come(ready=True, now=103.4)
    assert straggler.may_come(ready=False, now=103.6)  # the update has begun
    assert straggler.may_come(ready=False, now=105)
