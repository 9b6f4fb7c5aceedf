"""The commit as a history: records arrive, or do not, and the clock is ours."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path

import pytest

from lightning_resilience.checkpoint import commit
from lightning_resilience.checkpoint.commit import (
    Commit,
    CommitClock,
    Record,
    attempt_directory,
    is_committed,
    open_attempt,
)
from lightning_resilience.checkpoint.manifest import FileRecord, Manifest, read_manifest
from lightning_resilience.checkpoint.messages import FileImage, Save
from lightning_resilience.errors import SaveError


def a_save(directory: Path, attempt: str = "a1", rank: int = 0, world_size: int = 2) -> Save:
    path = str(directory / "step=30.ckpt")
    return Save(1, path, attempt, 30, rank, world_size, (FileImage(f"__{rank}_0.distcp", 0, 4),), deadline_s=100.0)


def deliver(directory: Path, rank: int, attempt: str = "a1", error: str = "") -> None:
    request = a_save(directory, attempt, rank)
    place = open_attempt(request)
    name = f"__{rank}_0.distcp"
    (place / name).write_text("data")
    Record(rank, {} if error else {name: FileRecord(4, "0" * 16)}, error).write(place)


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
    place = open_attempt(a_save(tmp_path, rank=1))
    (place / "__1_0.distcp").write_text("as far as it came")

    def full(self: Record, directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Record, "write", full)
    commit.report_failure(a_save(tmp_path, rank=1), "No space left on device")
    assert not (place / "__1_0.distcp").exists()
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
    (attempt_directory(tmp_path / "step=30.ckpt", "a1") / "__1_0.distcp").write_text("some")
    assert not pending.advance(59.0, orphaned=True)
    assert not pending.advance(98.0, orphaned=True)  # a minute counts from the last progress
    with pytest.raises(SaveError, match="rank 1"):
        pending.advance(99.5 + 20.0, orphaned=True)


@pytest.mark.parametrize("when", ["manifest", "records gone", "half a manifest"])
def test_a_coordinator_killed_while_it_commits_is_succeeded_by_another(tmp_path: Path, when: str) -> None:
    for rank in (0, 1):
        deliver(tmp_path, rank)
    place = attempt_directory(tmp_path / "step=30.ckpt", "a1")
    files = {f"__{rank}_0.distcp": FileRecord(4, "0" * 16) for rank in (0, 1)}
    manifest = Manifest(30, 2, "a1", 1, files).encode()
    (place / "manifest.json").write_bytes(manifest[:50] if when == "half a manifest" else manifest)
    if when == "records gone":
        (place / "rank_0.record").unlink()
        (place / "rank_0.owner").unlink()
    assert Commit(a_save(tmp_path), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    assert sorted(os.listdir(tmp_path / "step=30.ckpt")) == ["__0_0.distcp", "__1_0.distcp", "manifest.json"]
    assert is_committed(a_save(tmp_path))


def test_a_file_that_another_rank_renames_while_we_count_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(tmp_path, 0)
    monkeypatch.setattr(commit, "_entries", lambda directory: [directory / "rank_1.draft-17"])
    assert not Commit(a_save(tmp_path), CommitClock(), now=0.0).advance(1.0, orphaned=True)


def test_two_attempts_at_one_path_do_not_mix(tmp_path: Path) -> None:
    for rank in (0, 1):
        deliver(tmp_path, rank, "a1")
    deliver(tmp_path, 0, "a2")
    assert Commit(a_save(tmp_path, "a1"), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    assert not Commit(a_save(tmp_path, "a2"), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    manifest = read_manifest(tmp_path / "step=30.ckpt")
    assert manifest is not None
    assert manifest.attempt == "a1"


def test_a_commit_replaces_an_older_checkpoint_of_the_same_name(tmp_path: Path) -> None:
    for attempt in ("a1", "a2"):
        for rank in (0, 1):
            deliver(tmp_path, rank, attempt)
        assert Commit(a_save(tmp_path, attempt), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    manifest = read_manifest(tmp_path / "step=30.ckpt")
    assert manifest is not None
    assert manifest.attempt == "a2"
    assert os.listdir(tmp_path) == ["step=30.ckpt"]


def test_commit_times_increase_even_after_a_host_whose_clock_was_ahead(tmp_path: Path) -> None:
    future = 2**62
    place = tmp_path / "step=10.ckpt"
    place.mkdir()
    (place / "manifest.json").write_bytes(Manifest(10, 1, "x", future, {}).encode())
    clock = CommitClock(now_ns=lambda: 5)
    assert clock.next(tmp_path) == future + 1
    assert clock.next(tmp_path) == future + 2
    assert clock.next(tmp_path / "step=10.ckpt") == 5


def attempt_of(directory: Path, pid: int, host: str | None = None) -> Path:
    place = directory / ".step=1.ckpt.dead.incomplete"
    place.mkdir()
    (place / "rank_0.owner").write_text(json.dumps({"host": host or socket.gethostname(), "pid": pid}))
    return place


def test_the_sweep_takes_what_a_dead_writer_left(tmp_path: Path) -> None:
    attempt_of(tmp_path, pid=2**22 + 1)  # beyond the largest process id
    (tmp_path / ".old.ckpt.removed").mkdir()
    commit.sweep(tmp_path, now=os.stat(tmp_path).st_mtime + 5, before=2**40)
    assert os.listdir(tmp_path) == []


def test_the_sweep_leaves_what_this_run_has_written_though_its_writer_is_gone(tmp_path: Path) -> None:
    place = attempt_of(tmp_path, pid=2**22 + 1)
    written = os.stat(place).st_mtime
    commit.sweep(tmp_path, now=written + 60, before=written - 1)
    assert place.exists()
    commit.sweep(tmp_path, now=written + 60, before=written + 1)
    assert not place.exists()


def test_the_sweep_leaves_what_another_host_may_be_working_on(tmp_path: Path) -> None:
    place = attempt_of(tmp_path, pid=1, host="another-node")
    written = max(os.stat(place / "rank_0.owner").st_mtime, os.stat(place).st_mtime)
    commit.sweep(tmp_path, now=written + 1800, before=2**40)
    assert commit.live_attempts(tmp_path, now=written + 30) == [place]
    assert commit.live_attempts(tmp_path, now=written + 90) == []
    commit.sweep(tmp_path, now=written + 7200, before=2**40)
    assert not place.exists()


def test_a_single_file_belongs_to_whoever_locks_it(tmp_path: Path) -> None:
    draft = tmp_path / ".full.ckpt.abc.incomplete"
    draft.write_text("half")
    later = os.stat(draft).st_mtime + 3600
    with open(draft, "rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_SH)
        commit.sweep(tmp_path, now=later, before=2**40)
        assert commit.live_attempts(tmp_path, now=later) == [draft]
    commit.sweep(tmp_path, now=later, before=2**40)
    assert not draft.exists()


def test_an_attempt_that_was_just_opened_is_given_time_to_say_by_whom(tmp_path: Path) -> None:
    place = tmp_path / ".step=1.ckpt.new.incomplete"
    place.mkdir()
    opened = os.stat(place).st_mtime
    assert commit.live_attempts(tmp_path, now=opened + 1) == [place]
    assert commit.live_attempts(tmp_path, now=opened + 5) == []


def test_an_owner_that_was_never_written_keeps_nothing_alive(tmp_path: Path) -> None:
    place = tmp_path / ".step=1.ckpt.abc.incomplete"
    place.mkdir()
    (place / "rank_0.owner").touch()
    later = os.stat(place).st_mtime + 3
    assert commit.live_attempts(tmp_path, now=later) == []
    commit.sweep(tmp_path, now=later, before=2**40)
    assert os.listdir(tmp_path) == []


def test_a_failure_before_there_is_a_directory_is_nobodys_to_hear(tmp_path: Path) -> None:
    commit.report_failure(a_save(tmp_path / "missing", rank=1), "Permission denied")
    assert os.listdir(tmp_path) == []


def test_a_reused_process_id_does_not_keep_an_attempt_alive(tmp_path: Path) -> None:
    attempt_of(tmp_path, pid=os.getpid())  # alive, but no writer
    assert commit.live_attempts(tmp_path, now=os.stat(tmp_path).st_mtime + 5) == []
