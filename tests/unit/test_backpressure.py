"""What becomes of a save while storage is behind: the same on all ranks, whatever each of them sees."""

from __future__ import annotations

import itertools

import pytest

from lightning_resilience.checkpoint.backpressure import POLICIES, Action, Decision, OnBusy, Staged, decide


def queue(*saves: str) -> list[Staged]:
    """Each save is its step, "!" for required, "*" for begun."""
    return [
        Staged(f"at{text.replace('*', '')}", int(text.strip("!*")), required="!" in text, begun="*" in text)
        for text in saves
    ]


TAKE, WAIT, SKIP = Decision(Action.TAKE), Decision(Action.WAIT), Decision(Action.SKIP)


def replace(attempt: str) -> Decision:
    return Decision(Action.REPLACE, attempt)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [[queue()], [queue("1*")], [queue("1"), queue()], [queue("1*"), queue("1")]])
def test_a_free_slot_on_every_rank_is_taken(policy: OnBusy, ranks: list[list[Staged]]) -> None:
    assert decide(policy, 2, 5, False, ranks) == TAKE


@pytest.mark.parametrize(("policy", "expected"), [("latest", replace("at2")), ("skip", SKIP), ("wait", WAIT)])
def test_each_policy_when_one_is_written_and_one_waits(policy: OnBusy, expected: Decision) -> None:
    assert decide(policy, 2, 3, False, [queue("1*", "2")]) == expected


def test_one_rank_that_is_behind_decides_for_all() -> None:
    ahead, behind = queue("2"), queue("1*", "2")
    assert decide("skip", 2, 3, False, [ahead, behind]) == SKIP
    assert decide("latest", 2, 3, False, [ahead, behind]) == replace("at2")
    assert decide("latest", 2, 3, False, [behind, ahead]) == replace("at2")


def test_what_any_rank_has_begun_or_written_is_not_replaced() -> None:
    assert decide("latest", 2, 3, False, [queue("1*", "2"), queue("2*")]) == SKIP
    assert decide("latest", 2, 3, False, [queue("1*", "2"), queue()]) == SKIP
    assert decide("latest", 1, 3, False, [queue("1*")]) == SKIP


def test_of_several_that_wait_the_oldest_gives_way() -> None:
    assert decide("latest", 4, 9, False, [queue("1*", "2", "3", "4")]) == replace("at2")


def test_a_required_save_is_neither_replaced_nor_skipped() -> None:
    assert decide("latest", 2, 3, False, [queue("1*", "2!")]) == SKIP
    assert decide("latest", 2, 3, True, [queue("1*", "2!")]) == WAIT
    assert decide("latest", 2, 3, True, [queue("1*", "2")]) == replace("at2")
    assert decide("skip", 2, 3, True, [queue("1*", "2")]) == WAIT


def test_another_name_for_the_same_step_does_not_replace_it() -> None:
    """``save_last=True`` saves each state twice; the second must not push the first out."""
    assert decide("latest", 2, 2, False, [queue("1*", "2")]) == SKIP


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_the_queues_the_outcome_fits_and_does_not_depend_on_who_asks(policy: OnBusy) -> None:
    queues = [queue(*saves) for saves in ((), ("1*",), ("2",), ("1*", "2"), ("1*", "2!"), ("1*", "2*"), ("2",))]
    for first, second in itertools.product(queues, queues):
        decision = decide(policy, 2, 3, False, [first, second])
        assert decision == decide(policy, 2, 3, False, [second, first])
        if decision.action is Action.REPLACE:
            assert all(any(s.attempt == decision.replaced and not s.begun for s in q) for q in (first, second))
        if decision.action in (Action.TAKE, Action.REPLACE):
            gone = decision.action is Action.REPLACE
            assert all(len(held) - gone < 2 for held in (first, second))
