"""Ranks that come, ranks that do not, and ranks that come too late: all are told the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch._C._distributed_c10d import HashStore

from lightning_resilience.checkpoint.roll_call import RollCall

NEVER_S, SHORT_S = 60.0, 0.05


def together(calls: Sequence[RollCall], occasions: Sequence[str]) -> list[bool]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda pair: pair[0](pair[1]), zip(calls, occasions, strict=True)))


def test_all_come_again_and_again() -> None:
    store = HashStore()
    calls = [RollCall(store, 3, NEVER_S) for _ in range(3)]
    for _ in range(3):  # the same occasion
        assert together(calls, ["step 5"] * 3) == [True] * 3


def test_who_is_alone_is_told_no_and_so_is_whoever_comes_late() -> None:
    store = HashStore()
    first, second = RollCall(store, 2, SHORT_S), RollCall(store, 2, NEVER_S)
    assert not first("step 5")
    assert not second("step 5")
    second._patience = first._patience
    assert together([first, second], ["step 6"] * 2) == [True, True]


def test_ranks_at_different_steps_do_not_save_together() -> None:
    store = HashStore()
    calls = [RollCall(store, 2, SHORT_S) for _ in range(2)]
    assert together(calls, ["step 5", "step 6"]) == [False, False]


def test_however_close_the_race_all_are_told_the_same() -> None:
    store = HashStore()
    for occasion in range(200):
        calls = [RollCall(store, 2, 0.001) for _ in range(2)]
        gate = threading.Barrier(2)

        def late(call: RollCall, gate: threading.Barrier = gate, name: str = f"{occasion}") -> bool:
            gate.wait()
            return call(name)

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(late, calls))
        assert answers in ([True, True], [False, False])


def test_a_store_that_is_gone_means_no() -> None:
    class Gone(HashStore):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection reset by peer")

    assert not RollCall(Gone(), 2, NEVER_S)("step 5")
