"""The commit as a history: records arrive, or do not, and the clock is ours."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

import pytest

from lightning_resilience.checkpoint.attempts import Attempt, Record, attempt_of
from lightning_resilience.checkpoint.commit import Commit, CommitClock, is_committed
from lightning_resilience.checkpoint.manifest import FileRecord, Manifest, read_manifest
from lightning_resilience.checkpoint.messages import FileImage, Save
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.errors import SaveError


def a_save(directory: Path, attempt: str = "a1", rank: int = 0, world_size: int = 2) -> Save:
    path = str(directory / "step=30.ckpt")
    return Save(1, path, attempt, 30, rank, world_size, (FileImage(f"__{rank}_0.distcp", 0, 4),), deadline_s=100.0)


def deliver(directory: Path, rank: int, attempt: str = "a1", error: str = "") -> None:
    request = a_save(directory, attempt, rank)
    mine = attempt_of(request)
    mine.open(rank)
    name = f"__{rank}_0.distcp"
    (mine.files / name).write(b"data")
    mine.deliver(Record(rank, {} if error else {name: FileRecord(4, "0" * 16)}, error))


def scaffolding(directory: Path, attempt: str = "a1") -> Path:
    return Path(str(attempt_of(a_save(directory, attempt)).scaffolding))


def visible(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


def test_nothing_is_visible_until_every_rank_has_delivered(tmp_path: Path) -> None:
    deliver(tmp_path, 0)
    pending = Commit(a_save(tmp_path), CommitClock(), now=0.0)
    assert not pending.advance(1.0, orphaned=False)
    assert visible(tmp_path) == []
    deliver(tmp_path, 1)
    assert pending.advance(2.0, orphaned=False)
    assert visible(tmp_path) == ["step=30.ckpt"]
    assert sorted(os.listdir(tmp_path / "step=30.ckpt")) == ["__0_0.distcp", "__1_0.distcp", "manifest.json"]
    assert is_committed(a_save(tmp_path))
    assert not is_committed(a_save(tmp_path, attempt="a2"))


def test_an_error_of_one_rank_fails_the_save_and_names_the_rank(tmp_path: Path) -> None:
    deliver(tmp_path, 0)
    deliver(tmp_path, 1, error="No space left on device")
    with pytest.raises(SaveError, match="rank 1: No space left"):
        Commit(a_save(tmp_path), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    assert os.listdir(tmp_path) == []


def test_a_rank_that_has_no_room_to_say_that_it_failed_still_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(tmp_path, 0)
    attempt = attempt_of(a_save(tmp_path, rank=1))
    (attempt.files / "__1_0.distcp").write(b"as far as it came")

    def full(self: Attempt, record: Record) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Attempt, "deliver", full)
    attempt.report_failure(1, ["__1_0.distcp"], "No space left on device")
    assert not (attempt.files / "__1_0.distcp").exists()
    with pytest.raises(SaveError, match="rank 1: its part could not be written"):
        Commit(a_save(tmp_path), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    assert os.listdir(tmp_path) == []


def test_a_rank_that_never_delivers_fails_the_save_at_the_deadline(tmp_path: Path) -> None:
    deliver(tmp_path, 0)
    pending = Commit(a_save(tmp_path), CommitClock(), now=0.0)
    assert not pending.advance(99.0, orphaned=False)
    with pytest.raises(SaveError, match="no bytes came from rank 1"):
        pending.advance(101.0, orphaned=False)
    assert os.listdir(tmp_path) == []


def test_an_orphan_waits_while_there_is_progress_and_gives_up_after_a_minute_of_silence(tmp_path: Path) -> None:
    deliver(tmp_path, 0)
    pending = Commit(a_save(tmp_path), CommitClock(), now=0.0)
    assert not pending.advance(1.0, orphaned=True)
    (scaffolding(tmp_path) / "__1_0.distcp").write_text("some")
    assert not pending.advance(59.0, orphaned=True)
    assert not pending.advance(98.0, orphaned=True)  # a minute counts from the last progress
    with pytest.raises(SaveError, match="rank 1"):
        pending.advance(99.5 + 20.0, orphaned=True)


@pytest.mark.parametrize("when", ["manifest", "records gone", "half a manifest"])
def test_a_coordinator_killed_while_it_commits_is_succeeded_by_another(tmp_path: Path, when: str) -> None:
    for rank in (0, 1):
        deliver(tmp_path, rank)
    place = scaffolding(tmp_path)
    files = {f"__{rank}_0.distcp": FileRecord(4, "0" * 16) for rank in (0, 1)}
    manifest = Manifest(30, 2, "a1", 1, files).encode()
    (place / "manifest.json").write_bytes(manifest[:50] if when == "half a manifest" else manifest)
    if when == "records gone":
        (place / "rank_0.record").unlink()
        (place / "rank_0.owner").unlink()
    assert Commit(a_save(tmp_path), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    assert sorted(os.listdir(tmp_path / "step=30.ckpt")) == ["__0_0.distcp", "__1_0.distcp", "manifest.json"]
    assert is_committed(a_save(tmp_path))


def test_of_many_ranks_only_what_is_new_is_read_and_ever_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    original = Attempt.new_records

    def counted(self: Attempt, known: Container[int]) -> list[Record]:
        found = original(self, known)
        looks.append(len(found))
        return found

    monkeypatch.setattr(Attempt, "new_records", counted)
    for rank in range(98):
        deliver(tmp_path, rank)
    pending = Commit(a_save(tmp_path, world_size=100), CommitClock(), now=0.0)
    for millisecond in range(0, 10_000, 20):
        assert not pending.advance(millisecond / 1000, orphaned=False)
    assert looks[0] == 98
    assert sum(looks) == 98
    assert len(looks) < 40
    deliver(tmp_path, 98)
    deliver(tmp_path, 99)
    assert pending.advance(11.0, orphaned=False)


def test_two_attempts_at_one_path_do_not_mix(tmp_path: Path) -> None:
    for rank in (0, 1):
        deliver(tmp_path, rank, "a1")
    deliver(tmp_path, 0, "a2")
    assert Commit(a_save(tmp_path, "a1"), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    assert not Commit(a_save(tmp_path, "a2"), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    manifest = read_manifest(place_for(tmp_path / "step=30.ckpt"))
    assert manifest is not None
    assert manifest.attempt == "a1"


def test_a_commit_replaces_an_older_checkpoint_of_the_same_name(tmp_path: Path) -> None:
    for attempt in ("a1", "a2"):
        for rank in (0, 1):
            deliver(tmp_path, rank, attempt)
        assert Commit(a_save(tmp_path, attempt), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    manifest = read_manifest(place_for(tmp_path / "step=30.ckpt"))
    assert manifest is not None
    assert manifest.attempt == "a2"
    assert os.listdir(tmp_path) == ["step=30.ckpt"]


def test_commit_times_increase_even_after_a_host_whose_clock_was_ahead(tmp_path: Path) -> None:
    future = 2**62
    place = tmp_path / "step=10.ckpt"
    place.mkdir()
    (place / "manifest.json").write_bytes(Manifest(10, 1, "x", future, {}).encode())
    clock = CommitClock(now_ns=lambda: 5)
    assert clock.next(place_for(tmp_path)) == future + 1
    assert clock.next(place_for(tmp_path)) == future + 2
    assert clock.next(place_for(tmp_path / "step=10.ckpt")) == 5
