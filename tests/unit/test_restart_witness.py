"""Who is suspected of a hang, from what the ranks say of themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_resilience.restart.witness import Statement, suspects, whereabouts

_THEIR_CODE = "/home/someone/model.py:12 forward"
_TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:3000 all_reduce"


def _told(rank: int, *, waits: bool, count: int = 5, seconds: float = 60.0, group: str = "0") -> Statement:
    return Statement(
        rank=rank,
        section="train_step",
        seconds=seconds,
        waits=waits,
        collectives={group: count},
        stack=[_THEIR_CODE, *([_TORCH] if waits else [])],
    )


def test_who_is_not_in_a_collective_while_others_are_is_suspected() -> None:
    found = suspects(0, [_told(0, waits=True), _told(1, waits=False), _told(2, waits=True)])
    assert list(found) == [1]
    assert found[1] == f"in train_step for 60 s and not in a collective, at {_THEIR_CODE}"


def test_when_nobody_waits_it_is_the_rank_that_noticed() -> None:
    assert list(suspects(2, [_told(0, waits=False), _told(1, waits=False), _told(2, waits=False)])) == [2]


def test_when_all_wait_it_is_who_has_begun_fewer_collectives() -> None:
    found = suspects(0, [_told(0, waits=True, count=9), _told(1, waits=True, count=8)])
    assert found == {1: f"has begun 8 collectives of process group 0, others 9, at {_THEIR_CODE}"}


def _in_two_groups(rank: int, user: int, sharding: int) -> Statement:
    told = _told(rank, waits=True)
    return replace(told, collectives={"0 (default_pg)": sharding, "7": user})


def test_with_two_ranks_that_wait_in_different_groups_either_may_be_wrong() -> None:
    found = suspects(1, [_in_two_groups(0, user=1, sharding=19), _in_two_groups(1, user=0, sharding=20)])
    assert found[0].startswith("has begun 19 collectives of process group 0 (default_pg), others 20")
    assert found[1].startswith("has begun 0 collectives of process group 7, others 1")


def test_with_more_it_is_the_one_that_differs() -> None:
    told = [_in_two_groups(rank, user=1, sharding=19) for rank in (0, 2, 3)]
    found = suspects(1, [*told, _in_two_groups(1, user=0, sharding=20)])
    assert list(found) == [1]
    assert found[1].startswith("has begun 20 collectives of process group 0 (default_pg), others 19")


def test_only_members_of_a_group_are_compared() -> None:
    told = [_told(rank, waits=True, count=3 + rank, group=f"group-{rank}") for rank in (0, 1)]
    assert suspects(0, told) == {}


@pytest.mark.parametrize("told", [[], [_told(0, waits=True), _told(1, waits=True)]])
def test_nobody_is_suspected_without_a_reason(told: list[Statement]) -> None:
    assert suspects(0, told) == {}


def test_a_statement_survives_the_control_store() -> None:
    told = _told(3, waits=True)
    assert Statement.from_json(told.to_json().encode()) == told


def test_the_place_is_in_the_users_code_where_there_is_some() -> None:
    assert _told(0, waits=True).where == _THEIR_CODE
    lost = Statement(rank=0, section="setup", seconds=1.0, waits=True, collectives={}, stack=[_TORCH])
    assert lost.where == _TORCH
    nowhere = Statement(rank=0, section="setup", seconds=1.0, waits=True, collectives={}, stack=[])
    assert nowhere.where == "an unknown place"


def test_ranks_in_one_place_share_a_line_and_many_are_counted() -> None:
    told = [_told(rank, waits=True) for rank in range(12)] + [_told(12, waits=False)]
    text = whereabouts(suspects(0, told), told, missing=[13])
    suspect, missing, many, one = text.splitlines()
    assert suspect.startswith("suspect: rank 12, in train_step for 60 s")
    assert missing == "rank 13 could not say where it is"
    assert many == f"12 ranks (0, 1, ... 11) in train_step: {_THEIR_CODE} > {_TORCH}"
    assert one == f"rank 12 in train_step: {_THEIR_CODE}"
