"""Which checkpoints may be deleted: never the newest, never a spared one, never one kind for another."""

from __future__ import annotations

import json
import random

import pytest

from lightning_resilience.checkpoint.retention import (
    Committed,
    KeepEvery,
    KeepLatest,
    KeepPolicy,
    checked_policies,
    decode_policies,
    doomed,
    encode_policies,
)
from lightning_resilience.errors import ConfigurationError


def saved(*steps: int, resumable: bool = True) -> list[Committed]:
    return [Committed(f"step={step}", step, number, resumable) for number, step in enumerate(steps)]


def steps(checkpoints: list[Committed]) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints]


def test_the_latest_are_those_committed_last_not_those_of_the_highest_step() -> None:
    assert steps(doomed(saved(10, 20, 30, 40), [KeepLatest(2)])) == [10, 20]
    assert steps(doomed(saved(10, 60, 20, 30), [KeepLatest(2)])) == [10, 60]  # 60 was of a run that diverged


def test_two_files_of_one_step_count_once() -> None:
    checkpoints = [*saved(10, 20, 30), Committed("last", 30, 9)]
    assert steps(doomed(checkpoints, [KeepLatest(2)])) == [10]


def test_every_so_often_one_stays_for_good_also_when_none_falls_on_the_multiple() -> None:
    assert steps(doomed(saved(70, 140, 210, 280, 350), [KeepEvery(100)])) == [70, 280]
    assert steps(doomed(saved(50, 100, 150, 200, 250), [KeepEvery(100)])) == [50, 150]


def test_policies_are_combined_by_listing_them() -> None:
    keep: list[KeepPolicy] = [KeepLatest(1), KeepEvery(100)]
    assert steps(doomed(saved(50, 100, 150, 200, 250), keep)) == [50, 150]
    assert doomed(saved(1, 2), []) == []


def test_a_spared_one_stays() -> None:
    assert steps(doomed(saved(10, 20, 30), [KeepLatest(1)], spared=["step=10"])) == [20]


def test_weights_only_and_resumable_ones_do_not_take_each_others_place() -> None:
    weights = [Committed(f"weights={number}", number, 100 + number, False) for number in range(3)]
    assert [item.path for item in doomed([*saved(1, 2), *weights], [KeepLatest(1)])] == [
        "step=1",
        "weights=0",
        "weights=1",
    ]


@pytest.mark.parametrize("seed", range(50))
def test_whatever_the_history_the_newest_stays_and_deciding_again_deletes_nothing_more(seed: int) -> None:
    """A history: save, prune, save, prune; what is kept for good must never have been deleted before."""
    source = random.Random(seed)
    policies: list[KeepPolicy] = [KeepLatest(source.randint(1, 3)), KeepEvery(source.choice([5, 10, 25]))]
    present: list[Committed] = []
    ever: list[Committed] = []
    step = 0
    for number in range(40):
        step += source.randint(1, 7)
        new = Committed(f"{number}", step, number)
        present.append(new)
        ever.append(new)
        gone = doomed(present, policies)
        assert new not in gone
        present = [item for item in present if item not in gone]
        assert doomed(present, policies) == []
        assert set(present) == set(ever) - set(doomed(ever, policies))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_a_policy_checks_its_number(value: object) -> None:
    with pytest.raises(ConfigurationError, match="KeepLatest"):
        KeepLatest(value)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="KeepEvery"):
        KeepEvery(value)  # type: ignore[arg-type]


def test_only_a_list_of_policies_is_taken() -> None:
    assert checked_policies(None) == ()
    assert checked_policies([KeepLatest(2)]) == (KeepLatest(2),)
    for wrong in (KeepLatest(2), 3, [3], ["KeepLatest"]):
        with pytest.raises(ConfigurationError, match=r"KeepLatest\(3\)"):
            checked_policies(wrong)


def test_policies_travel_as_plain_values() -> None:
    policies: list[KeepLatest | KeepEvery] = [KeepLatest(3), KeepEvery(1000)]
    assert decode_policies(json.loads(json.dumps(encode_policies(policies)))) == policies
