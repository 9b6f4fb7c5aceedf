"""The event file: whole lines, from several writers, and never an error in training."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from lightning_resilience import events
from lightning_resilience.events import Event, EventLog, event_file, read_events


@dataclass(frozen=True, kw_only=True)
class Noted(Event):
    kind: ClassVar[str] = "noted"
    step: int
    seconds: dict[str, float]


def test_an_event_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    log = EventLog(path, rank=3, now=lambda: 12.5)
    log.write(Noted(step=7, seconds={"unblock": 0.25}))
    log.close()
    assert read_events(path) == [{"kind": "noted", "time": 12.5, "rank": 3, "step": 7, "seconds": {"unblock": 0.25}}]
    assert path.stat().st_mode & 0o777 == 0o644 & ~_umask()


def test_several_ranks_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    logs = [EventLog(path, rank=rank) for rank in range(4)]
    for step in range(50):
        for log in logs:
            log.write(Noted(step=step, seconds={"a" * 500: 1.0}))
    for log in logs:
        log.close()
    found = read_events(path)
    for rank in range(4):
        assert [event["step"] for event in found if event["rank"] == rank] == list(range(50))


def test_a_cut_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "a"}\n{"kind": "b", "st')
    assert read_events(path) == [{"kind": "a"}]


def test_what_cannot_be_written_is_counted_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    log = EventLog(tmp_path / "file" / "events.jsonl", rank=0)
    for step in range(3):
        log.write(Noted(step=step, seconds={}))
    log.close()
    assert log.lost == 3
    assert len(caplog.records) == 1


def test_a_stuck_file_system_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_WAITING", 2)
    reading, writing = os.pipe()
    os.set_blocking(writing, True)
    log = EventLog(tmp_path / "events.jsonl", rank=0)
    monkeypatch.setattr(log, "_append", lambda line: os.read(reading, 1))
    for step in range(10):
        log.write(Noted(step=step, seconds={}))
    assert log.lost >= 7
    os.write(writing, b"x" * 20)
    log.close()
    os.close(reading)
    os.close(writing)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("run_directory", "expected"),
    [
        ("/runs/a", "/runs/a/events.jsonl"),
        ("file:///runs/a", "/runs/a/events.jsonl"),
        ("s3://bucket/a", "{here}/events.jsonl"),
        ("simplecache::s3://bucket/a", "{here}/events.jsonl"),
    ],
)
def test_events_of_a_run_on_a_url_go_to_the_current_directory(
    run_directory: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(event_file(run_directory)) == expected.format(here=tmp_path)
