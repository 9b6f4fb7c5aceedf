"""The parts of a restart, each alone: with fakes for clocks and stores, without processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from lightning_resilience.checkpoint.engine import EngineOptions
from lightning_resilience.errors import ConfigurationError, RestartSignal
from lightning_resilience.restart.abort import abort_backends, is_failed_collective
from lightning_resilience.restart.control import Generation
from lightning_resilience.restart.fence import Fence
from lightning_resilience.restart.interrupt import SIGNAL, Interrupter
from lightning_resilience.restart.meeting import FromCommit, FromRestorePoint, FromTheStart, Nowhere, choose_resumption
from lightning_resilience.restart.policy import Fault
from lightning_resilience.restart.reports import Report, Standing, fault_from_json, fault_to_json
from lightning_resilience.restart.timeouts import LearnedTimeouts, Section, Timeouts, hang_seconds
from lightning_resilience.restart.watchdog import Heart, Watchdog

# --- where to go on ------------------------------------------------------------------------------------------


def report(rank: int, step: int, stage: int = 0, **fields: Any) -> Report:
    return Report(rank=rank, standing=Standing(step=step, stage=stage), **fields)


def test_ranks_go_on_from_the_earliest_stage_of_a_step() -> None:
    chosen = choose_resumption([report(0, 7, 1), report(1, 7, 0)])
    assert chosen == FromCommit(standing=Standing(step=7, stage=0))


def test_a_rank_with_complete_gradients_comes_up() -> None:
    chosen = choose_resumption([report(0, 8, 2), report(1, 7, 3, ready=True)])
    assert chosen == FromCommit(standing=Standing(step=8, stage=0))


def test_a_rank_that_is_behind_otherwise_needs_an_older_state() -> None:
    chosen = choose_resumption([report(0, 8), report(1, 7)])
    assert chosen == FromRestorePoint(reason="ranks stand at different steps (rank 0: 8, rank 1: 7)")
    assert isinstance(choose_resumption([report(0, 9), report(1, 7, ready=True)]), FromRestorePoint)


def test_an_update_cut_in_two_needs_an_older_state() -> None:
    chosen = choose_resumption([report(0, 7), report(1, 7, whole=False)])
    assert chosen == FromRestorePoint(reason="the fault struck within an optimizer's update on rank 1")


def test_before_all_train_everything_starts_again() -> None:
    early, built = report(0, -1, trained=False, built=False), report(1, -1, trained=False)
    assert choose_resumption([early, replace(early, rank=1)]) == FromTheStart(built=False)
    assert choose_resumption([early, built]) == FromTheStart(built=True)
    assert choose_resumption([built, report(1, 0, 1)]) == FromTheStart(built=True)


def test_nothing_fits_a_rank_that_sets_up_and_one_that_has_trained() -> None:
    assert isinstance(choose_resumption([report(0, -1, trained=False), report(1, 1, updated=True)]), Nowhere)


# --- what ranks tell each other ------------------------------------------------------------------------------


def test_reports_survive_the_store() -> None:
    fault = Fault(kind="exception", rank=1, step=3, types=("builtins.ValueError",), message="x", where="here")
    assert fault_from_json(fault_to_json(fault)) == fault
    for one in (report(1, 3, 2, fault=fault, whole=False, groups=("0", "1")), report(0, 0)):
        assert Report.from_json(one.to_json()) == one


def generations(store: Any, number: int = 0) -> list[Generation]:
    return [Generation(store, number, rank, 2) for rank in range(2)]


def test_the_first_fault_of_a_generation_is_the_alarm() -> None:
    first, second = generations(HashStore())
    first.raise_alarm(Fault(kind="hang", rank=0, step=1))
    second.raise_alarm(Fault(kind="hang", rank=1, step=1))
    alarms = [generation.wait_for_alarm() for generation in (first, second)]
    assert [alarm.rank for alarm in alarms if alarm] == [0, 0]


def test_a_generation_is_over_when_all_are_through() -> None:
    store = HashStore()
    first, second = generations(store)
    first.finish()
    second.raise_alarm(Fault(kind="hang", rank=1, step=1))
    second.finish()
    assert first.wait_for_alarm() is not None
    for generation in generations(store, number=1):
        generation.finish()
    assert generations(store, number=1)[0].wait_for_alarm() is None


def test_a_meeting_without_a_rank_fails_in_time() -> None:
    first, _ = generations(HashStore())
    with pytest.raises(RuntimeError):  # a HashStore's own; a TCPStore raises dist.DistStoreError
        first.report(report(0, 1), timeout_s=0.05)


# --- the fence -----------------------------------------------------------------------------------------------


def test_an_update_holds_interruptions_back_for_a_while() -> None:
    now = [0.0]
    fence = Fence(10.0, clock=lambda: now[0])
    assert not fence.holds()
    fence.close()
    now[0] = 9.0
    assert fence.holds()
    now[0] = 11.0
    assert not fence.holds()
    assert fence.closed
    fence.open()
    assert not fence.closed


# --- interrupting --------------------------------------------------------------------------------------------


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    made = Interrupter(may_interrupt=lambda: True)
    made.install()
    yield made
    made.uninstall()
    assert signal.getsignal(SIGNAL) == signal.SIG_DFL


def deliver(interrupter: Interrupter, into: list[bool]) -> threading.Thread:
    def run() -> None:
        into.append(interrupter.deliver(grace_s=0.01, every_s=0.01, timeout_s=20.0))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_sleeping_thread_is_woken(interrupter: Interrupter) -> None:
    outcome: list[bool] = []
    interrupter.arm()
    thread = deliver(interrupter, outcome)
    with pytest.raises(RestartSignal):
        time.sleep(60)
    interrupter.disarm()
    thread.join()
    assert outcome == [True]


def test_a_thread_that_swallows_the_signal_is_told_again(interrupter: Interrupter) -> None:
    swallowed = 0
    interrupter.arm()
    thread = deliver(interrupter, [])
    while swallowed < 3:
        try:
            time.sleep(60)
        except BaseException:  # as bad code does
            swallowed += 1
    interrupter.disarm()
    thread.join()
    time.sleep(0)  # nothing is raised outside


def test_outside_of_the_guarded_part_nothing_is_raised(interrupter: Interrupter) -> None:
    interrupter.arm()
    interrupter.disarm()
    interrupter.request()
    signal.raise_signal(SIGNAL)
    interrupter.check()


def test_a_request_is_forgotten(interrupter: Interrupter) -> None:
    interrupter.request()
    interrupter.forget()
    assert not interrupter.requested


def test_a_thread_that_does_not_react_is_given_up(interrupter: Interrupter) -> None:
    held = Interrupter(may_interrupt=lambda: False)
    held.install()
    held.arm()
    assert not held.deliver(grace_s=0.01, every_s=0.01, timeout_s=0.05)
    held.uninstall()


# --- timeouts ------------------------------------------------------------------------------------------------


def test_a_given_timeout_holds_for_steps_and_hooks_but_not_for_saves() -> None:
    timeouts = Timeouts(3.0)
    assert timeouts.limit_s(Section.TRAIN_STEP) == timeouts.limit_s(Section.FIRST_STEP) == 3.0
    assert timeouts.limit_s(Section.CHECKPOINT) == 1800.0


def test_a_save_that_may_wait_for_hours_is_no_hang() -> None:
    """The plugin gives a save up by itself: with `timeout` as long as the watchdog's patience it has the last word."""
    timeouts = Timeouts(3.0)
    patience_s = EngineOptions(deadline_s=7200.0).patience_s
    timeouts.saves_may_wait(patience_s)
    assert timeouts.limit_s(Section.CHECKPOINT) > patience_s > 7200.0
    assert timeouts.limit_s(Section.HOOKS) == 3.0


def test_timeouts_are_learned_and_exceptions_forgotten() -> None:
    timeouts = Timeouts(None, LearnedTimeouts(factor=10, floor_s=2, unknown_s=100, enough=2, remembered=3))
    assert timeouts.limit_s(Section.TRAIN_STEP) == 100
    for seconds in (0.01, 1.0):
        timeouts.took(Section.TRAIN_STEP, seconds)
    assert timeouts.limit_s(Section.TRAIN_STEP) == 10.0
    timeouts.took(Section.TRAIN_STEP, 50.0)
    assert timeouts.limit_s(Section.TRAIN_STEP) == 100
    for _ in range(3):
        timeouts.took(Section.TRAIN_STEP, 0.01)
    assert timeouts.limit_s(Section.TRAIN_STEP) == 2


@pytest.mark.parametrize("value", [0, -1.0, True, "1", float("nan")])
def test_a_timeout_that_cannot_be(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="hang_timeout"):
        hang_seconds(value)


# --- the watchdog --------------------------------------------------------------------------------------------


class Ward:
    """Two ranks' watchdogs over one store, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timeouts = Timeouts(5.0)
        self.generations = generations(HashStore())
        self.hearts = [Heart(self.timeouts, clock=lambda: self.now) for _ in range(2)]
        self.dogs = [self._dog(rank) for rank in range(2)]
        for heart in self.hearts:
            heart.enter(Section.TRAIN_STEP)

    def _dog(self, rank: int) -> Watchdog:
        def describe(message: str) -> Fault:
            return Fault(kind="hang", rank=rank, step=0, message=message)

        return Watchdog(self.hearts[rank], self.timeouts, self.generations[rank], describe, clock=lambda: self.now)


def test_a_rank_that_sleeps_raises_the_alarm() -> None:
    ward = Ward()
    ward.now = 4.9
    assert not ward.dogs[1].look(waits=False)
    ward.now = 5.1
    assert ward.dogs[1].look(waits=False)
    alarm = ward.generations[0].wait_for_alarm()
    assert alarm is not None
    assert (alarm.rank, alarm.message) == (1, "no progress for 5 s, outside of any collective")


def test_a_rank_that_waits_for_a_busy_one_is_patient() -> None:
    ward = Ward()
    ward.now = 20.0
    ward.hearts[1].enter(Section.CHECKPOINT)
    assert not ward.dogs[0].look(waits=True)
    assert not ward.dogs[1].look(waits=False)
    ward.hearts[0].enter(Section.TRAIN_STEP)  # it was let go
    assert not ward.dogs[0].look(waits=True)
    assert not ward.generations[0].all_late()


def test_what_others_took_is_not_a_ranks_own_time() -> None:
    ward = Ward()
    ward.now = 20.0
    assert not ward.dogs[0].look(waits=True)
    ward.now = 20.2  # the collective is over, its section goes on
    assert not ward.dogs[0].look(waits=False)
    ward.hearts[1].enter(Section.CHECKPOINT)
    assert not ward.dogs[1].look(waits=False)
    assert not ward.generations[0].all_late()
    ward.now = 24.9
    assert not ward.dogs[0].look(waits=False)
    ward.now = 25.1
    assert ward.dogs[0].look(waits=False)


def test_all_ranks_waiting_are_a_hang() -> None:
    ward = Ward()
    ward.now = 6.0
    assert not ward.dogs[0].look(waits=True)
    assert ward.dogs[1].look(waits=True)


# --- ending collectives --------------------------------------------------------------------------------------


def test_communicators_are_aborted_at_the_same_time() -> None:
    """Each blocks until the other is aborted too, as NCCL's may."""
    together = threading.Barrier(2, timeout=20)

    class Communicator:
        aborted = False

        def abort(self) -> None:
            together.wait()
            self.aborted = True

    communicators = [Communicator(), Communicator()]
    abort_backends(communicators, timeout_s=20)
    assert all(one.aborted for one in communicators)


def test_what_says_only_that_another_rank_is_gone() -> None:
    assert is_failed_collective(dist.DistNetworkError("closed"))
    assert not is_failed_collective(RuntimeError("mine"))
