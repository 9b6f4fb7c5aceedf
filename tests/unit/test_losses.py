"""Who is lost, decided from what a rank sees of others: with clocks, a store in memory, and a real process or two."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from lightning_resilience.errors import RankLost
from lightning_resilience.restart.control import Control, Generation, StoreBoard
from lightning_resilience.restart.lookout import Lookout
from lightning_resilience.restart.peers import Neighbour, Place, _stat, own_place
from lightning_resilience.restart.policy import Fault
from lightning_resilience.restart.reports import Report, Standing
from lightning_resilience.restart.roll import Pulse, Roll, Silence
from lightning_resilience.restart.timeouts import Section, Timeouts


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Of another rank, as far as this test goes."""
    started = subprocess.Popen(["sleep", "60"])
    yield started
    started.kill()
    started.wait()


def place_of(process: subprocess.Popen[bytes], rank: int = 1) -> Place:
    found = _stat(process.pid)
    assert found is not None
    return dataclasses.replace(own_place(rank), pid=process.pid, began=found[1])


def until_state(neighbour: Neighbour, letters: str) -> None:
    deadline = time.monotonic() + 20
    while neighbour.state not in letters:
        assert time.monotonic() < deadline, neighbour.state
        time.sleep(0.001)


def test_a_process_is_told_from_a_later_one_of_the_same_number(process: subprocess.Popen[bytes]) -> None:
    place = place_of(process)
    assert Place.from_json(place.to_json()) == place
    assert not Neighbour(place).ended
    assert Neighbour(dataclasses.replace(place, began=place.began - 1)).ended


def test_stopped_and_ended_processes(process: subprocess.Popen[bytes]) -> None:
    neighbour = Neighbour(place_of(process))
    os.kill(process.pid, signal.SIGSTOP)
    until_state(neighbour, "T")
    assert (neighbour.stopped, neighbour.ended) == (True, False)
    process.kill()
    until_state(neighbour, "X")
    assert (neighbour.stopped, neighbour.ended) == (False, True)
    neighbour.close()


def test_time_in_which_nobody_looked_is_no_silence() -> None:
    now = [0.0]
    silence = Silence(lambda: now[0])
    assert silence.see("a", 1.0) == 0.0
    now[0] = 1.0
    assert silence.see("a", 1.0) == 1.0
    now[0] = 1000.0  # stopped itself, or a machine that slept
    assert silence.see("a", 1.0) == 3.0
    assert silence.see("b", 1.0) == 0.0


class Ranks:
    """Some ranks on machines of their own, one clock, one store."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.board = StoreBoard(HashStore(), 0)
        self.rolls = [Roll(self._place(rank), count, 10.0, clock=lambda: self.now) for rank in range(count)]
        for roll in self.rolls:
            self.board.announce(roll.place)

    def _place(self, rank: int) -> Place:
        return Place(rank=rank, pid=100 + rank, host=f"host{rank}", machine=f"machine{rank}", began=1)

    def live(self, seconds: int, *, but: set[int], patience_s: float = 20.0) -> None:
        """Let time pass for all ranks but some."""
        for _ in range(seconds):
            self.now += 1.0
            for rank, roll in enumerate(self.rolls):
                if rank not in but:
                    roll.exchange(self.board, "train_step", patience_s)


def test_a_silent_rank_is_lost_after_its_own_patience() -> None:
    ranks = Ranks(2)
    ranks.live(3, but=set())
    ranks.live(20, but={1})
    assert ranks.rolls[0].lost == {}
    ranks.live(2, but={1})
    why = ranks.rolls[0].lost[1]
    assert why.startswith(
        "rank 1 (pid 101 on host1) has said nothing for 21.0 s, last in train_step: C code that holds"
    )


def test_who_has_not_begun_is_not_lost() -> None:
    ranks = Ranks(2)
    ranks.live(100, but={1})
    assert ranks.rolls[0].lost == {}


def test_every_lost_rank_is_seen_though_each_looks_at_few() -> None:
    ranks = Ranks(8)
    ranks.live(3, but=set())
    ranks.live(200, but={2, 3, 4, 5})
    assert {lost for roll in ranks.rolls for lost in roll.lost} == {2, 3, 4, 5}


def test_a_stopped_neighbour_is_lost_sooner(process: subprocess.Popen[bytes]) -> None:
    now = [0.0]
    board = StoreBoard(HashStore(), 0)
    board.announce(place_of(process))
    board.beat(1, Pulse(count=1, section="setup", may_be_silent_s=1800.0))
    roll = Roll(own_place(0), 2, 10.0, clock=lambda: now[0])
    for step in range(12):
        now[0] = step
        roll.exchange(board, "setup", 1800.0)
    assert roll.lost == {}
    os.kill(process.pid, signal.SIGSTOP)
    until_state(roll.neighbours[1], "T")
    now[0] += 1
    roll.exchange(board, "setup", 1800.0)
    assert f"rank 1 (pid {process.pid} on " in roll.lost[1]
    assert "is stopped (T)" in roll.lost[1]
    roll.close()


def test_the_end_of_a_neighbour_is_noticed_without_the_store(process: subprocess.Popen[bytes]) -> None:
    roll = Roll(own_place(0), 2, 10.0)
    roll.neighbours[1] = Neighbour(place_of(process))
    told: list[dict[int, str]] = []
    lookout = Lookout(roll, asking=lambda: None, on_loss=lambda: told.append(dict(roll.lost)))
    lookout.look()
    assert told == []
    process.kill()
    until_state(roll.neighbours[1], "X")
    lookout.look()
    lookout.look()
    assert len(told) == 1
    assert told[0][1].endswith("has ended")
    roll.close()


def test_a_question_without_an_answer_means_that_rank_0_is_lost() -> None:
    roll = Roll(own_place(1), 2, stopped_s=0.0)
    question: list[int | None] = [None]
    lookout = Lookout(roll, asking=lambda: question[0], on_loss=lambda: None)
    for asked in (None, 1, None, 2, 3):
        question[0] = asked
        lookout.look()
    assert roll.lost == {}
    time.sleep(0.001)
    lookout.look()
    assert "rank 0, which serves the control store, has not answered" in roll.lost[0]


# --- what follows in the control store -----------------------------------------------------------------------


def test_nobody_waits_for_a_lost_rank_and_it_is_told() -> None:
    store = HashStore()
    here, gone = (Generation(store, 0, rank, 2) for rank in range(2))
    loss = Fault(kind="lost", rank=1, step=3, message="rank 1 is gone")
    here.declare_lost(loss)
    standing = Standing(step=3, stage=0)
    assert here.stand(standing, timeout_s=5) == [standing]
    here.settle(timeout_s=5)
    meeting = here.report(Report(rank=0, standing=standing), timeout_s=5)
    assert [report.rank for report in meeting.reports] == [0]
    assert meeting.lost == [loss]
    assert gone.wait_for_alarm() == loss
    with pytest.raises(RankLost, match="the other ranks have given this one up: rank 1 is gone"):
        gone.report(Report(rank=1, standing=standing), timeout_s=5)


def test_what_a_rank_has_said_stays_said() -> None:
    store = HashStore()
    first, second = (Generation(store, 0, rank, 2) for rank in range(2))
    with pytest.raises(RuntimeError):  # nobody else is there yet
        second.report(Report(rank=1, standing=Standing(step=1, stage=0)), timeout_s=0.01)
    first.declare_lost(Fault(kind="lost", rank=1, step=1))
    meeting = first.report(Report(rank=0, standing=Standing(step=1, stage=0)), timeout_s=5)
    assert [report.rank for report in meeting.reports] == [0, 1]


def test_a_connection_can_be_cut_under_who_waits() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    control = Control(server, 0, 2).another()
    control.disconnect()
    with pytest.raises(dist.DistError):
        control.generation(0).call_late(late=True)


def test_silence_is_borne_longer_than_lateness() -> None:
    given, learned = Timeouts(3.0), Timeouts(None)
    assert (given.stopped_s, given.silence_s(Section.TRAIN_STEP), given.silence_s(Section.WAITING)) == (3.0, 9.0, 9.0)
    assert given.silence_s(Section.CHECKPOINT) == 1800.0
    assert (learned.stopped_s, learned.silence_s(Section.WAITING)) == (60.0, 60.0)
    assert learned.silence_s(Section.TRAIN_STEP) == 1800.0
