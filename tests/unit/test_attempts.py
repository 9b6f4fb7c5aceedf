"""Whose an attempt is: what is swept, what is waited for, and what it is called."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path

import pytest

from lightning_resilience.checkpoint.attempts import Attempt, Pulse, live_attempts, sweep
from lightning_resilience.checkpoint.messages import Save
from lightning_resilience.checkpoint.storage import place_for


def swept(directory: Path, now: float, before: float = 2**40) -> None:
    sweep(place_for(directory), now, before)


def alive(directory: Path, now: float) -> list[str]:
    return [str(place) for place in live_attempts(place_for(directory), now)]


def an_attempt(directory: Path, pid: int, host: str | None = None) -> Path:
    place = directory / ".step=1.ckpt.dead.incomplete"
    place.mkdir()
    (place / "rank_0.owner").write_text(json.dumps({"host": host or socket.gethostname(), "pid": pid}))
    return place


def test_the_sweep_takes_what_a_dead_writer_left(tmp_path: Path) -> None:
    an_attempt(tmp_path, pid=2**22 + 1)  # beyond the largest process id
    (tmp_path / ".old.ckpt.removed").mkdir()
    swept(tmp_path, now=os.stat(tmp_path).st_mtime + 5)
    assert os.listdir(tmp_path) == []


def test_the_sweep_leaves_what_this_run_has_written_though_its_writer_is_gone(tmp_path: Path) -> None:
    place = an_attempt(tmp_path, pid=2**22 + 1)
    written = os.stat(place).st_mtime
    swept(tmp_path, now=written + 60, before=written - 1)
    assert place.exists()
    swept(tmp_path, now=written + 60, before=written + 1)
    assert not place.exists()


def test_the_sweep_leaves_what_another_host_may_be_working_on(tmp_path: Path) -> None:
    place = an_attempt(tmp_path, pid=1, host="another-node")
    written = max(os.stat(place / "rank_0.owner").st_mtime, os.stat(place).st_mtime)
    swept(tmp_path, now=written + 1800)
    assert alive(tmp_path, now=written + 30) == [str(place)]
    assert alive(tmp_path, now=written + 90) == []
    swept(tmp_path, now=written + 7200)
    assert not place.exists()


def test_a_single_file_belongs_to_whoever_locks_it(tmp_path: Path) -> None:
    draft = tmp_path / ".full.ckpt.abc.incomplete"
    draft.write_text("half")
    later = os.stat(draft).st_mtime + 3600
    with open(draft, "rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_SH)
        swept(tmp_path, now=later)
        assert alive(tmp_path, now=later) == [str(draft)]
    swept(tmp_path, now=later)
    assert not draft.exists()


def test_an_attempt_that_was_just_opened_is_given_time_to_say_by_whom(tmp_path: Path) -> None:
    place = tmp_path / ".step=1.ckpt.new.incomplete"
    place.mkdir()
    opened = os.stat(place).st_mtime
    assert alive(tmp_path, now=opened + 1) == [str(place)]
    assert alive(tmp_path, now=opened + 5) == []


def test_an_owner_that_was_never_written_keeps_nothing_alive(tmp_path: Path) -> None:
    place = tmp_path / ".step=1.ckpt.abc.incomplete"
    place.mkdir()
    (place / "rank_0.owner").touch()
    later = os.stat(place).st_mtime + 3
    assert alive(tmp_path, now=later) == []
    swept(tmp_path, now=later)
    assert os.listdir(tmp_path) == []


def test_a_failure_before_there_is_a_directory_is_nobodys_to_hear(tmp_path: Path) -> None:
    Attempt(place_for(tmp_path / "missing" / "a.ckpt"), "a1").report_failure(1, ["x"], "Permission denied")
    assert os.listdir(tmp_path) == []


def test_a_reused_process_id_does_not_keep_an_attempt_alive(tmp_path: Path) -> None:
    an_attempt(tmp_path, pid=os.getpid())  # alive, but no writer
    assert alive(tmp_path, now=os.stat(tmp_path).st_mtime + 5) == []


def test_the_name_of_an_attempt_fits_however_long_the_checkpoints_is(tmp_path: Path) -> None:
    names = ["v" * 250 + ".ckpt", "v" * 249 + "w.ckpt", "é" * 124 + ".ckpt"]
    attempts = [Attempt(place_for(tmp_path / name), "0123456789ab") for name in names]
    for attempt in attempts:
        attempt.open(0)
        (attempt.files / "manifest.json").put(b"{}")
        attempt.target.storage.publish(str(attempt.scaffolding), str(attempt.target))
    assert len({str(attempt.scaffolding) for attempt in attempts}) == 3
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    for attempt in attempts:
        attempt.target.delete()
    assert os.listdir(tmp_path) == []


def test_time_runs_out_between_two_pieces(tmp_path: Path) -> None:
    times = iter([0.0, 0.0, 99.0, 101.0])
    request = Save(1, str(tmp_path / "a.ckpt"), "a1", 1, 0, 1, (), deadline_s=100.0)
    pulse = Pulse(Attempt(place_for(tmp_path / "a.ckpt"), "a1"), request, clock=lambda: next(times))
    pulse()
    with pytest.raises(TimeoutError, match="more than the 100 s"):
        pulse()
