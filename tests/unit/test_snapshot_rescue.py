"""What writers make of snapshots when their ranks are gone: two of them in one process, with real files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_resilience.checkpoint.candidates import brought_up_to_date, newest_checkpoint
from lightning_resilience.checkpoint.commit import CommitClock
from lightning_resilience.checkpoint.messages import Rescue
from lightning_resilience.checkpoint.restore import apply_optimizers, restore
from lightning_resilience.checkpoint.snapshots import gathering, leftovers, sealing
from lightning_resilience.checkpoint.snapshots import rescue as rescues
from lightning_resilience.checkpoint.snapshots.run import Run, write_run
from lightning_resilience.checkpoint.storage import Place, place_for
from lightning_resilience.errors import SaveError
from tests.unit.test_snapshots import Rank, Threads, Training, assert_equal, flip_a_weight, same


class Job:
    """Two ranks of one run that are killed, and their writers."""

    def __init__(self, folder: Path) -> None:
        threads = Threads(2)
        self.folder = folder
        self.ranks = [Rank(folder, exchange=threads.of(rank)) for rank in (0, 1)]
        self.directory = self.ranks[0].directory
        threads.run(lambda rank: assert_equal(self.ranks[rank].start(), None))
        run = self.ranks[0].snapshots.run
        assert run is not None
        self.run = run
        where = self.directory.path, str(self.ranks[0].shm), run.id, run.start, run.base_ns
        self.orders = [Rescue(*where, rank, 2, 20.0) for rank in (0, 1)]
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    def go(self, *steps: int) -> None:
        """Each rank takes so many steps, with a snapshot after each."""
        for rank, count in zip(self.ranks, steps, strict=True):
            rank.snapshots.open(self.run)
            training = Training()
            for _ in range(count):
                torch.manual_seed(training.step)
                training.go()
                rank.take(training)
                self.states[training.step] = training.everything()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.snapshots.close(keep=True)

    def rescue(self) -> list[str]:
        """What became of it at each writer: a path, nothing, or an error."""
        found = ["", ""]

        def act(rank: int) -> None:
            try:
                found[rank] = rescues.rescue(self.orders[rank], CommitClock())
            except SaveError as error:
                found[rank] = str(error)

        threads = [threading.Thread(target=act, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "run").iterdir() if not path.name.startswith("."))

    @property
    def unfinished(self) -> list[str]:
        return [path.name for path in (self.folder / "run").iterdir() if path.name.endswith(".incomplete")]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    leftovers.sweep(str(tmp_path / "shm"), kept_s=-1.0)


def test_the_newest_step_that_all_have_becomes_a_checkpoint(job: Job) -> None:
    job.go(3, 2)  # rank 1 was killed before the third
    job.kill()
    path = str(job.folder / "run" / "rescued-step=2.ckpt")
    assert job.rescue() == [path, ""]
    assert newest_checkpoint(job.folder / "run", wait_s=0.0) == path
    assert job.unfinished == []
    fresh = Training()
    restored = restore(place_for(path), fresh.target, fall_back=False)
    apply_optimizers(fresh.target, restored.content["optimizer_states"], restored.place)
    assert restored.content["global_step"] == 2
    assert restored.rank_state == {"seed": 2}
    assert same(fresh.everything(), job.states[2])


def test_only_the_newest_rescue_stays(job: Job) -> None:
    job.go(1, 1)
    job.kill()
    job.rescue()
    job.go(2, 2)
    job.kill()
    job.rescue()
    assert job.checkpoints == ["rescued-step=2.ckpt"]


def test_nothing_is_written_when_a_checkpoint_is_as_new(job: Job) -> None:
    job.go(2, 2)
    job.kill()
    job.rescue()
    before = os.stat(job.folder / "run" / "rescued-step=2.ckpt").st_ino
    assert job.rescue() == ["", ""]
    assert os.stat(job.folder / "run" / "rescued-step=2.ckpt").st_ino == before


def test_nothing_is_written_when_the_ranks_have_no_step_in_common(job: Job) -> None:
    job.go(4, 1)
    job.kill()
    assert job.rescue() == ["", ""]
    assert job.checkpoints == job.unfinished == []


def test_a_damaged_snapshot_is_not_rescued_and_the_one_before_is(job: Job) -> None:
    job.go(2, 2)
    for path in (job.folder / "shm").iterdir():
        sealing._File(str(path)).seal()
    flip_a_weight(job.ranks[1])
    job.kill()
    job.rescue()
    assert job.checkpoints == ["rescued-step=1.ckpt"]


def test_a_start_that_came_meanwhile_goes_on_by_itself(job: Job) -> None:
    job.go(2, 2)
    job.kill()
    write_run(job.directory, Run(job.orders[0].run, job.orders[0].start + 1, 0))
    assert job.rescue() == ["", ""]
    assert job.checkpoints == job.unfinished == []


def test_while_a_rank_lives_the_writers_of_the_others_wait_in_vain(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_QUIET_S", 0.3)
    job.go(2, 2)
    job.ranks[0].snapshots.close(keep=True)
    with pytest.raises(SaveError, match=r"nothing came from rank 1 in 0 s"):
        rescues.rescue(job.orders[0], CommitClock())
    assert job.checkpoints == job.unfinished == []
    job.ranks[1].snapshots.close(keep=False)


def test_a_successor_that_takes_over_while_its_snapshot_is_read_makes_it_void(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.go(2, 2)
    job.kill()
    write = rescues._write

    def taken_over(order: Rescue, directory: Place, held: rescues._Held, whole: bytes) -> None:
        if order.rank == 1:
            held.file.begin()  # the slot of step 1
            held.file.void()
        write(order, directory, held, whole)

    monkeypatch.setattr(rescues, "_write", taken_over)
    result = job.rescue()
    assert "rank 1: its rank has a successor" in result[0]
    assert job.checkpoints == job.unfinished == []


def test_a_file_that_somebody_owns_is_told_from_one_that_nobody_owns(job: Job) -> None:
    job.go(1, 1)
    job.kill()
    (path,) = leftovers.files(job.orders[0].shm_dir, f"{job.orders[0].run}-rank0-")
    with open(path, "r+b") as file:
        assert not rescues._is_taken(file.fileno())
        code = (
            "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX);"
            "print(1, flush=True); input()"
        )
        owner = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert owner.stdout is not None
        assert owner.stdout.readline() == "1\n"
        assert rescues._is_taken(file.fileno())
        owner.communicate("\n")


def test_what_newest_checkpoint_has_said_is_brought_up_to_date_once(job: Job) -> None:
    """The rescue may end between that call and the start of `fit`."""
    directory = job.folder / "run"
    assert newest_checkpoint(directory, wait_s=0.0) is None
    job.go(2, 2)
    job.kill()
    (path, _) = job.rescue()
    assert brought_up_to_date(None, place_for(job.folder / "elsewhere")) is None
    assert brought_up_to_date(None, place_for(directory)) == path
    assert brought_up_to_date(None, place_for(directory)) is None, "begin anew"
