"""Snapshots of one rank or two in one process: taken, found again by a successor, chosen, cleaned up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

from lightning_resilience.checkpoint.arena import Arena
from lightning_resilience.checkpoint.candidates import META
from lightning_resilience.checkpoint.envelope import archive
from lightning_resilience.checkpoint.exchange import Exchange
from lightning_resilience.checkpoint.manifest import seal_tail
from lightning_resilience.checkpoint.restore import OPTIMIZERS, Target, apply_optimizers
from lightning_resilience.checkpoint.snapshots import header as header_bytes
from lightning_resilience.checkpoint.snapshots import leftovers, sealing
from lightning_resilience.checkpoint.snapshots.choice import Request, Stored
from lightning_resilience.checkpoint.snapshots.contents import RANK_STATE
from lightning_resilience.checkpoint.snapshots.copies import Copies
from lightning_resilience.checkpoint.snapshots.engine import Snapshots
from lightning_resilience.checkpoint.snapshots.file import take_over
from lightning_resilience.checkpoint.snapshots.points import Restored, State
from lightning_resilience.checkpoint.snapshots.run import RUN_FILE, Run, read_run
from lightning_resilience.checkpoint.snapshots.start import begin_run
from lightning_resilience.checkpoint.state import model_state, optimizer_state
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.errors import ArenaError, LoadError, MismatchedCheckpointError
from tests.unit.test_snapshot_copies import FakeLane

NEWEST_OF_NOTHING = Request(None, asked=True)


class Training:
    """A module and an optimizer, of which every step makes another state."""

    def __init__(self, width: int = 8) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.step = 0

    def go(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.module(torch.randn(4, 3)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def state(self) -> State:
        optimizer = optimizer_state(self.module, self.optimizer)
        steady = {f"state_dict.{name}" for name, _ in self.module.named_parameters()}
        return State(
            {"state_dict": model_state(self.module), "optimizer_0": optimizer},
            steady,
            {META: archive({"global_step": self.step}), RANK_STATE: archive({"seed": self.step})},
        )

    def load(self, rank: Rank, step: int) -> Restored:
        restored = rank.snapshots.load(step, self.target)
        apply_optimizers(self.target, restored.content.pop(OPTIMIZERS), "the snapshot")
        return restored

    @property
    def target(self) -> Target:
        return Target(self.module, [self.optimizer])

    def everything(self) -> dict[str, Any]:
        tensors = {name: value.clone() for name, value in model_state(self.module).items()}
        for name, values in optimizer_state(self.module, self.optimizer)["state"].items():
            tensors.update({f"{name}.{key}": value.clone() for key, value in values.items()})
        return tensors


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Rank:
    """A rank that can be ended as a kill ends it, or well."""

    def __init__(self, folder: Path, copies: Copies | None = None, exchange: Exchange | None = None) -> None:
        self.directory = place_for(folder / "run")
        self.shm = folder / "shm"
        self.shm.mkdir(exist_ok=True)
        self.snapshots = Snapshots(str(self.shm), 1, exchange, copies)

    def start(self, request: Request = NEWEST_OF_NOTHING, newest: Stored | None = None) -> int | None:
        return begin_run(self.snapshots, self.directory, request, lambda: [newest] if newest else [])

    def take(self, training: Training) -> None:
        self.snapshots.take(training.step, training.state)

    def files(self) -> list[str]:
        return sorted(os.listdir(self.shm))


def after_a_kill(rank: Rank, folder: Path) -> Rank:
    """A successor. Of the predecessor there is left what the kernel leaves: the file, without its locks."""
    for file in (rank.snapshots._file, rank.snapshots._outgrown):
        if file is not None:
            file.close(keep=True)
    return Rank(folder)


def test_a_successor_goes_on_from_the_newest_snapshot(tmp_path: Path) -> None:
    training, rank = Training(), Rank(tmp_path)
    assert rank.start() is None
    for _ in range(3):
        training.go()
        rank.take(training)
    kept = training.everything()
    training.go(2)

    successor = after_a_kill(rank, tmp_path)
    assert successor.start() == 3
    assert successor.snapshots.steps() == [3]
    fresh = Training()
    restored = fresh.load(successor, 3)
    assert restored.content == {"global_step": 3}
    assert restored.rank_state == {"seed": 3}
    assert same(fresh.everything(), kept)
    assert not same(fresh.everything(), training.everything())
    successor.snapshots.close(keep=False)
    assert successor.files() == []


def test_the_two_newest_are_held_and_take_turns(tmp_path: Path) -> None:
    training, rank = Training(), Rank(tmp_path)
    rank.start()
    for _ in range(5):
        training.go()
        rank.take(training)
    assert rank.snapshots.steps() == [5, 4]
    with pytest.raises(LoadError, match=r"no snapshot of step 3; it has \[5, 4\]"):
        training.load(rank, 3)
    (name,) = rank.files()
    size = os.stat(rank.shm / name).st_size
    assert size == os.stat(rank.shm / name).st_blocks * 512
    state_bytes = sum(tensor.nbytes for tensor in training.everything().values())
    assert size <= 2 * (state_bytes + (2 << 20)), "two states, and little more"
    assert os.stat(rank.shm / name).st_mode & 0o777 == 0o600
    rank.snapshots.close(keep=False)


def test_a_snapshot_whose_copy_was_cut_is_not_taken(tmp_path: Path) -> None:
    """On a GPU: the copy runs on, beside the next forward, and the process is killed."""
    lanes = Copies(lambda device: FakeLane([]), can_overlap=lambda device: True)
    training, rank = Training(), Rank(tmp_path, lanes)
    rank.start()
    training.go()
    rank.take(training)
    assert rank.snapshots.steps() == []
    rank.snapshots.hold_back()
    assert rank.snapshots.steps() == [1]
    kept = training.everything()
    training.go()
    rank.take(training)

    successor = after_a_kill(rank, tmp_path)
    assert successor.start() == 1
    fresh = Training()
    fresh.load(successor, 1)
    assert same(fresh.everything(), kept)
    successor.snapshots.close(keep=False)


def test_an_update_does_not_overtake_the_copy(tmp_path: Path) -> None:
    lanes = Copies(lambda device: FakeLane([]), can_overlap=lambda device: True)
    training, rank = Training(), Rank(tmp_path, lanes)
    rank.start()
    training.go()
    kept = training.everything()
    rank.take(training)
    training.module(torch.randn(4, 3)).sum().backward()  # changes the statistics of the batch norm
    rank.snapshots.hold_back()
    training.optimizer.step()
    fresh = Training()
    fresh.load(rank, 1)
    assert same(fresh.everything(), kept)
    rank.snapshots.close(keep=False)


@pytest.mark.parametrize("where", ["header", "body of the header", "index", "meta.pt"])
def test_what_is_damaged_is_not_taken(tmp_path: Path, where: str) -> None:
    training, rank = Training(), Rank(tmp_path)
    rank.start()
    for _ in range(2):
        training.go()
        rank.take(training)
    (name,) = rank.files()
    held = rank.snapshots._file
    assert held is not None
    slot, newest = held.snapshots()[0]
    header = slot.offset - header_bytes.SIZE
    position = {
        "header": header + 1,
        "body of the header": header + header_bytes._WORDS + 5,
        "index": slot.offset + newest.parts["index"].offset + 9,
        "meta.pt": slot.offset + newest.parts["meta.pt"].offset + 9,
    }[where]
    successor = after_a_kill(rank, tmp_path)
    flip(rank.shm / name, position)
    assert successor.start() == 1
    successor.snapshots.close(keep=False)


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def sealed(rank: Rank) -> None:
    """What its writer does when it has time."""
    (name,) = rank.files()
    sealing._File(str(rank.shm / name)).seal()


def flip_a_weight(rank: Rank) -> None:
    """In the newest snapshot."""
    file = rank.snapshots._file
    assert file is not None
    slot, _ = file.snapshots()[0]
    slot.destinations[0].view(torch.int32).bitwise_xor_(1)


def test_a_flipped_bit_in_a_weight_is_named_and_the_snapshot_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training, rank = Training(), Rank(tmp_path)
    rank.start()
    for _ in range(2):
        training.go()
        rank.take(training)
        sealed(rank)
    flip_a_weight(rank)
    (name,) = rank.files()
    successor = after_a_kill(rank, tmp_path)
    assert successor.start() == 1
    assert f"DAMAGED SNAPSHOT: rank 0: the tensors in the snapshot of step 2 in {rank.shm / name}" in caplog.text
    successor.snapshots.close(keep=False)


@pytest.mark.parametrize("offset", [0, 7, 40, 200])
def test_a_flipped_bit_in_a_header_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, offset: int) -> None:
    training, rank = Training(), Rank(tmp_path)
    rank.start()
    training.go()
    rank.take(training)
    (name,) = rank.files()
    after_a_kill(rank, tmp_path)
    data = bytearray((rank.shm / name).read_bytes())
    at = offset if data.startswith(header_bytes._MAGIC.to_bytes(8, "little")) else len(data) // 2 + offset
    data[at] ^= 64
    (rank.shm / name).write_bytes(data)
    successor = Rank(tmp_path)
    assert successor.start() is None
    assert ("DAMAGED SNAPSHOT" in caplog.text) == (offset != 7), "byte 7 is the version"
    successor.snapshots.close(keep=False)


def test_a_slot_that_was_being_filled_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training, rank = Training(), Rank(tmp_path)
    rank.start()
    for _ in range(2):
        training.go()
        rank.take(training)
    file = rank.snapshots._file
    assert file is not None
    file.begin()
    successor = after_a_kill(rank, tmp_path)
    assert successor.start() == 2
    assert "DAMAGED" not in caplog.text
    successor.snapshots.close(keep=False)


def test_damage_on_one_rank_keeps_all_from_that_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    threads = Threads(2)
    ranks = [Rank(tmp_path, exchange=threads.of(rank)) for rank in (0, 1)]
    threads.run(lambda rank: assert_equal(ranks[rank].start(), None))
    training = Training()
    training.go()
    for rank in ranks:
        rank.take(training)
    for name in ranks[0].files():
        sealing._File(str(ranks[0].shm / name)).seal()
    flip_a_weight(ranks[1])
    for rank in ranks:
        rank.snapshots.close(keep=True)
    stored = Stored("/run/step=1.ckpt", 1, created_ns=9)  # of the same step
    request = Request(stored.path, asked=True)
    successors = [Rank(tmp_path, exchange=threads.of(rank)) for rank in (0, 1)]
    threads.run(lambda rank: assert_equal(successors[rank].start(request, stored), None))
    assert "DAMAGED SNAPSHOT: rank 1: the tensors" in caplog.text
    for rank in successors:
        rank.snapshots.close(keep=False)


def test_a_seal_is_only_that_of_the_snapshot_it_was_computed_for(tmp_path: Path) -> None:
    training, rank = Training(), Rank(tmp_path)
    rank.start()
    training.go()
    rank.take(training)
    file = rank.snapshots._file
    assert file is not None
    slot, _ = file.snapshots()[0]
    header = file._headers[file.slots.index(slot)]

    def overtaken() -> int:
        training.go(2)
        rank.take(training)
        training.go()
        rank.take(training)
        return 17

    assert file.seal(slot) is None
    assert not header.seal(overtaken)
    assert file.seal(slot) is None
    sealed(rank)
    assert file.seal(slot) is not None
    assert rank.snapshots.verify(training.step) == ""
    rank.snapshots.close(keep=False)


def test_a_state_that_has_grown_gets_a_bigger_file_and_never_loses_the_old_one_before(tmp_path: Path) -> None:
    training, rank = Training(), Rank(tmp_path)
    rank.start()
    training.go()
    rank.take(training)
    big = Training(width=300_000)
    big.go(2)
    rank.snapshots.prepare(big.state())
    assert len(rank.files()) == 2
    assert rank.snapshots.steps() == [1]
    rank.take(big)
    assert len(rank.files()) == 1
    assert rank.snapshots.steps() == [2]
    successor = after_a_kill(rank, tmp_path)
    assert successor.start() == 2
    with pytest.raises(MismatchedCheckpointError, match="belongs to another model"):
        training.load(successor, 2)
    successor.snapshots.close(keep=False)


# --- whose, and which --------------------------------------------------------------------------------------


def killed_after(
    tmp_path: Path, steps: int, request: Request = NEWEST_OF_NOTHING, newest: Stored | None = None
) -> Rank:
    """What a rank leaves that was killed, and its successor."""
    training, rank = Training(), Rank(tmp_path)
    rank.start(request, newest)
    training.go(steps)
    rank.take(training)
    return after_a_kill(rank, tmp_path)


def test_another_run_in_the_same_place_never_gets_it(tmp_path: Path) -> None:
    """A user who empties the directory begins anew."""
    successor = killed_after(tmp_path, 3)
    os.unlink(tmp_path / "run" / RUN_FILE)
    assert successor.start() is None
    assert successor.snapshots.steps() == []
    assert len(successor.files()) == 1  # waits for its own run, for a while
    successor.snapshots.close(keep=False)
    leftovers.sweep(str(successor.shm), kept_s=-1.0)


def test_a_start_that_goes_another_way_makes_older_snapshots_void(tmp_path: Path) -> None:
    checkpoint = Stored("/elsewhere/old.ckpt", 2, 10)
    successor = killed_after(tmp_path, 3)
    assert successor.start(Request("/elsewhere/old.ckpt", asked=False), newest=checkpoint) == 3
    again = after_a_kill(successor, tmp_path)
    assert again.start(Request("/elsewhere/older.ckpt", asked=True), newest=checkpoint) is None
    assert again.start(NEWEST_OF_NOTHING) is None
    again.snapshots.close(keep=False)


def test_a_machine_that_missed_a_start_has_nothing_to_offer(tmp_path: Path) -> None:
    """The run went on elsewhere and came back: what this machine has kept is of another past."""
    successor = killed_after(tmp_path, 3)
    elsewhere = Rank(tmp_path / "run")
    elsewhere.directory = successor.directory
    assert elsewhere.start() is None
    elsewhere.snapshots.close(keep=True)
    assert successor.start() is None
    successor.snapshots.close(keep=False)


def test_a_start_that_is_killed_at_once_loses_nothing(tmp_path: Path) -> None:
    rank = killed_after(tmp_path, 3)
    for _ in range(3):
        assert rank.start() == 3
        rank = after_a_kill(rank, tmp_path)
    run = read_run(rank.directory)
    assert run is not None
    assert run.start == 4
    rank.snapshots.open(Run(run.id, run.start - 1, 0))
    rank.snapshots.keep(3, run.start)  # a kill before the new start was written down
    rank = after_a_kill(rank, tmp_path)
    assert rank.start() == 3
    rank.snapshots.close(keep=False)


def test_a_checkpoint_that_was_committed_after_the_snapshot_is_newer(tmp_path: Path) -> None:
    successor = killed_after(tmp_path, 3)
    checkpoint = stored_at(tmp_path, 5)
    assert successor.start(Request(checkpoint.path, asked=True), checkpoint) is None
    successor.snapshots.close(keep=False)


def stored_at(tmp_path: Path, step: int) -> Stored:
    """A checkpoint with a seal."""
    place = place_for(tmp_path / "run" / f"step={step}.ckpt")
    plain = archive({"global_step": step, "callbacks": {}, "lr_schedulers": []})
    data = plain[:-2]  # but the length of a comment
    Path(place.path).write_bytes(data + seal_tail(len(plain), step, step, xxhash.xxh3_64_hexdigest(data)))
    return Stored(place.path, step, created_ns=step)


def start_with(rank: Rank, *stored: Stored, fall_back: bool = True) -> int | None:
    """Newest first; the newest is asked for."""
    request = Request(stored[0].path, asked=True)
    return begin_run(rank.snapshots, rank.directory, request, lambda: stored, fall_back=fall_back)


def flip_a_byte(checkpoint: Stored) -> None:
    path = Path(checkpoint.path)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def test_a_snapshot_wins_over_the_checkpoint_before_a_damaged_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    successor = killed_after(tmp_path, 3)
    newest, before = stored_at(tmp_path, 5), stored_at(tmp_path, 2)
    flip_a_byte(newest)
    assert start_with(successor, newest, before) == 3
    assert f"DAMAGED CHECKPOINT: {newest.path}" in caplog.text
    successor.snapshots.close(keep=False)


def test_a_whole_checkpoint_before_the_damaged_one_wins_if_the_snapshot_is_older(tmp_path: Path) -> None:
    successor = killed_after(tmp_path, 3)
    newest, before = stored_at(tmp_path, 5), stored_at(tmp_path, 4)
    flip_a_byte(newest)
    assert start_with(successor, newest, before) is None
    successor.snapshots.close(keep=False)


def test_a_snapshot_is_used_when_no_checkpoint_is_whole(tmp_path: Path) -> None:
    successor = killed_after(tmp_path, 3)
    newest, before = stored_at(tmp_path, 5), stored_at(tmp_path, 4)
    flip_a_byte(newest)
    flip_a_byte(before)
    assert start_with(successor, newest, before) == 3
    successor.snapshots.close(keep=False)


def test_damage_that_shall_raise_is_not_covered_up_by_a_snapshot(tmp_path: Path) -> None:
    successor = killed_after(tmp_path, 3)
    newest, before = stored_at(tmp_path, 5), stored_at(tmp_path, 2)
    flip_a_byte(newest)
    assert start_with(successor, newest, before, fall_back=False) is None
    successor.snapshots.close(keep=False)


def test_after_going_back_the_new_snapshots_win_over_the_checkpoints_of_the_old_future(tmp_path: Path) -> None:
    future = Stored("/run/step=100.ckpt", 100, created_ns=99)
    successor = killed_after(tmp_path, 3, Request("/run/step=1.ckpt", asked=False), newest=future)
    assert successor.start(Request(future.path, asked=True), future) == 3
    successor.snapshots.close(keep=False)


# --- several ranks -----------------------------------------------------------------------------------------


class Threads:
    """An exchange of ranks that are threads."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=20.0)
        self.board: list[bytes] = [b""] * world_size

    def of(self, rank: int) -> Exchange:
        return ThreadExchange(self, rank)

    def run(self, act: Callable[[int], None]) -> None:
        failures: list[BaseException] = []

        def guarded(rank: int) -> None:
            try:
                act(rank)
            except BaseException as error:  # shown by the test
                failures.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


class ThreadExchange:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self.rank, self.world_size = threads, rank, threads.world_size

    def all_gather(self, data: bytes) -> list[bytes]:
        self._threads.board[self.rank] = data
        self._threads.barrier.wait()
        found = list(self._threads.board)
        self._threads.barrier.wait()
        return found


def test_ranks_meet_at_the_newest_step_that_all_hold(tmp_path: Path) -> None:
    threads = Threads(2)
    ranks = [Rank(tmp_path, exchange=threads.of(rank)) for rank in (0, 1)]
    threads.run(lambda rank: assert_equal(ranks[rank].start(), None))
    training = Training()
    for step in range(3):
        training.go()
        ranks[0].take(training)
        if step < 2:  # rank 1 is killed before the third
            ranks[1].take(training)
    for rank in ranks:
        rank.snapshots.close(keep=True)
    successors = [Rank(tmp_path, exchange=threads.of(rank)) for rank in (0, 1)]
    threads.run(lambda rank: assert_equal(successors[rank].start(), 2))
    assert [rank.snapshots.steps() for rank in successors] == [[2], [2]]
    for rank in successors:
        rank.snapshots.close(keep=True)

    alone = Rank(tmp_path)
    assert alone.start() is None  # the state of two ranks is no state of one
    assert alone.snapshots.steps() == []
    assert len(alone.files()) == 1  # nobody will be rank 1 of this run
    alone.snapshots.close(keep=False)


def assert_equal(one: object, other: object) -> None:
    assert one == other


# --- what is left ------------------------------------------------------------------------------------------


def test_leftovers_are_kept_for_a_while_unless_somebody_needs_the_room(tmp_path: Path) -> None:
    rank = killed_after(tmp_path, 1)
    (name,) = rank.files()
    arena = Arena(str(rank.shm), 4096, 1, "rank0")
    assert name in rank.files()
    arena.close()
    os.utime(rank.shm / name, (1.0, 1.0))  # of long ago
    arena = Arena(str(rank.shm), 4096, 1, "rank0")
    assert name not in rank.files()
    arena.close()


def test_room_for_the_living_is_taken_from_what_nobody_came_back_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = killed_after(tmp_path, 1)
    monkeypatch.setattr(leftovers, "_free", lambda directory: 0)
    other = Rank(tmp_path)
    other.snapshots.open(Run("another", 1, 0))
    other.take(Training())
    assert [name.split("-")[3] for name in other.files()] == ["another"]
    other.snapshots.close(keep=False)
    del rank


def test_no_room_is_an_error_that_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, rank = Training(), Rank(tmp_path)
    rank.start()
    training.go()

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError, match="--shm-size"):
        rank.take(training)
    rank.snapshots.close(keep=False)
    assert rank.files() == []


def test_files_that_are_not_ours_are_never_opened_as_snapshots(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.start()
    run = read_run(rank.directory)
    assert run is not None
    start = f"{leftovers.PREFIX}{run.id}-rank0-"
    (rank.shm / f"{start}short").write_bytes(b"x")
    os.chmod(rank.shm / f"{start}short", 0o600)
    (rank.shm / f"{start}link").symlink_to(tmp_path / "run" / RUN_FILE)
    (rank.shm / f"{start}open").write_bytes(bytes(1 << 20))
    os.chmod(rank.shm / f"{start}open", 0o666)  # anybody may have written it
    assert take_over(str(rank.shm), run.id, 0) is None
    assert rank.files() == [f"{start}link", f"{start}open"]
    assert (tmp_path / "run" / RUN_FILE).exists()
