"""The engine while its storage is behind. A stopped writer is the slowest storage there is."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resilience.checkpoint.engine import CheckpointEngine, EngineOptions
from lightning_resilience.checkpoint.history import SaveCounts, Verdict
from lightning_resilience.checkpoint.reader import ShardReader
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.errors import SaveError
from lightning_resilience.events import Event


class Rig:
    """An engine, what it has said, and a way to stop its storage."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        (folder / "shm").mkdir()
        self.events: list[Event] = []
        self.engine = CheckpointEngine(EngineOptions(shm_dir=str(folder / "shm"), **options), emit=self.events.append)

    def save(self, step: int, **arguments: Any) -> None:
        state = {"state_dict": {"weight": torch.full((100, 100), float(step))}}
        self.engine.save_sharded(str(self.folder / f"{step}.ckpt"), step, state, {}, tag=step, **arguments)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        os.kill(self.engine.writer_pid, signal.SIGSTOP)
        yield
        os.kill(self.engine.writer_pid, signal.SIGCONT)

    def found(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.ckpt"))

    def outcomes(self) -> dict[int, str]:
        return {report.step: report.outcome for report in self.engine.history}

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def rig(**options: Any) -> Rig:
        rigs.append(Rig(tmp_path, **options))
        return rigs[-1]

    yield rig
    for made in rigs:
        made.engine.close()
    assert os.listdir(tmp_path / "shm") == []


def test_a_newer_one_takes_the_place_of_one_that_waits(make: Callable[..., Rig]) -> None:
    rig = make()
    with rig.stopped():
        for step in range(1, 7):
            rig.save(step)
    assert rig.engine.wait(timeout_s=30)
    assert rig.found() == [1, 6]
    assert rig.outcomes() == {1: "saved", 2: "replaced", 3: "replaced", 4: "replaced", 5: "replaced", 6: "saved"}
    assert SaveCounts.of(rig.engine.history) == SaveCounts(saved=2, replaced=4)
    assert rig.kinds().count("checkpoint_replaced") == 4
    assert rig.engine.take_verdicts() == [Verdict(step, "replaced") for step in (2, 3, 4, 5)]
    assert rig.engine.take_news() == [Verdict(1, "saved"), Verdict(6, "saved")]
    weight = torch.empty(100, 100)
    ShardReader(place_for(rig.folder / "6.ckpt")).read_into({"state_dict.weight": weight})
    assert weight.eq(6).all()


def test_with_skip_the_new_one_is_not_taken(make: Callable[..., Rig]) -> None:
    rig = make(on_busy="skip")
    with rig.stopped():
        for step in range(1, 6):
            rig.save(step)
    assert rig.engine.wait(timeout_s=30)
    assert rig.found() == [1, 2]
    assert SaveCounts.of(rig.engine.history) == SaveCounts(saved=2, skipped=3)
    assert rig.kinds().count("checkpoint_skipped") == 3


def test_with_wait_training_waits_and_every_one_is_saved(make: Callable[..., Rig]) -> None:
    rig = make(on_busy="wait")
    for step in range(1, 6):
        rig.save(step)
    assert rig.engine.wait(timeout_s=30)
    assert rig.found() == [1, 2, 3, 4, 5]
    assert SaveCounts.of(rig.engine.history).saved == 5


def test_a_required_save_waits_and_is_not_replaced(make: Callable[..., Rig]) -> None:
    rig = make()
    with rig.stopped():
        rig.save(1)
        rig.save(2, required=True)
        rig.save(3)  # nothing may be replaced, nothing may wait
    rig.save(4, required=True)
    assert rig.engine.wait(timeout_s=30)
    assert rig.found() == [1, 2, 4]
    assert rig.outcomes()[3] == "skipped"


def test_what_should_follow_a_replaced_save_follows_the_next_one(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.save(1)
    rig.engine.wait()
    with rig.stopped():
        rig.save(2)
        rig.save(3)
        rig.engine.remove(str(rig.folder / "1.ckpt"))
        rig.save(4)
        assert 1 in rig.found()
    assert rig.engine.wait(timeout_s=30)
    assert rig.found() == [2, 4]


def test_a_link_names_what_is_committed_or_stays_as_it_is(make: Callable[..., Rig]) -> None:
    rig = make()
    last = rig.folder / "last.ckpt"

    def save(step: int) -> None:
        rig.save(step)
        rig.engine.link(str(rig.folder / f"{step}.ckpt"), str(last))

    save(1)
    rig.engine.wait()
    assert os.readlink(last) == "1.ckpt"
    with rig.stopped():
        save(2)
        save(3)
        save(4)  # in place of 3, and its link in place of that of 3
        assert os.readlink(last) == "1.ckpt"
    rig.engine.wait()
    assert os.readlink(last) == "4.ckpt"
    assert sorted(name for name in os.listdir(rig.folder)) == ["1.ckpt", "2.ckpt", "4.ckpt", "last.ckpt", "shm"]
    last.unlink()


def test_so_many_failures_in_a_row_are_an_error(make: Callable[..., Rig]) -> None:
    rig = make(max_consecutive_failures=2)
    (rig.folder / "file").write_text("")

    def fail(step: int) -> None:
        state = {"state_dict": {"weight": torch.zeros(3)}}
        rig.engine.save_sharded(str(rig.folder / "file" / f"{step}.ckpt"), step, state, {})
        rig.engine.wait()

    fail(1)
    rig.save(2)  # in between one succeeds
    rig.engine.wait()
    fail(3)
    fail(4)
    with pytest.raises(SaveError, match=r"2 checkpoints in a row were not saved.*Not a directory"):
        rig.save(5)
    rig.save(6)
    rig.engine.wait()
    assert rig.found() == [2, 6]


def test_a_writer_that_hangs_fails_its_save_and_no_other(make: Callable[..., Rig]) -> None:
    rig = make(deadline_s=1.0)
    rig.save(1)
    rig.engine.wait()
    hung = rig.engine.writer_pid
    os.kill(hung, signal.SIGSTOP)
    rig.save(2)
    rig.save(3)
    assert rig.engine.wait(timeout_s=60)
    assert rig.outcomes() == {1: "saved", 2: "failed", 3: "saved"}
    assert rig.found() == [1, 3]
    (report,) = (report for report in rig.engine.history if report.step == 2)
    assert re.search("not durable 1 s after its turn came, and its writer process was killed", report.error or "")
    assert rig.engine.writer_pid != hung
    assert "writer_hung" in rig.kinds()
    assert "writer_died" not in rig.kinds()
    assert [path.name for path in rig.folder.glob(".*")] == []


def test_training_is_not_held_up_while_storage_hangs_for_ever(make: Callable[..., Rig]) -> None:
    """Every save is staged in the time of a copy, however often; the socket of a hung writer may fill up, too."""
    rig = make(deadline_s=120.0)
    rig.save(0)
    rig.engine.wait()
    with rig.stopped():
        began = time.monotonic()
        for step in range(1, 1500):
            rig.save(step)
        assert time.monotonic() - began < 60  # less than the deadline: it was never waited for
        assert SaveCounts.of(rig.engine.history).waited_s == 0
    assert rig.engine.wait(timeout_s=60)
    assert rig.found() == [0, 1, 1499]
