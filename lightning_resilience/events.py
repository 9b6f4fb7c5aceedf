"""What happened, as frozen dataclasses, and the file they are appended to: one JSON object a line.

The file is the one source for whoever counts, reports or draws later; nothing else keeps a history. Every line has
``kind``, ``time`` (seconds since the epoch) and ``rank``, and the fields of its event.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

log = logging.getLogger(__name__)

FILE = "events.jsonl"
_WAITING = 10_000  # events; more than that and the file system has been stuck for long
_LAST_WORDS_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events; ``kind`` tells them apart in the file. Fields are what JSON can say."""

    kind: ClassVar[str]


class EventLog:
    """Appends events to a file from a thread of its own, so that slow storage never holds training up.

    Any thread may call :meth:`write`. Lines of several processes do not mix: each is one append. What cannot be
    written is counted and told once; an event is never worth an error in training.

    Args:
        path: The file; its directory is made.
        rank: Goes into every line.
        now: Seconds since the epoch.
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int, now: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._rank = rank
        self._now = now
        self._lines: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self.lost = 0
        self._thread = threading.Thread(target=self._append_all, name="lightning-resilience-events", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Append ``event``, soon."""
        fields = {"kind": event.kind, "time": self._now(), "rank": self._rank, **dataclasses.asdict(event)}
        try:
            self._lines.put_nowait(json.dumps(fields, default=str).encode() + b"\n")
        except queue.Full:
            self._lose("its file system does not keep up")

    def renumber(self, rank: int) -> None:
        """From now on this is another rank."""
        self._rank = rank

    def close(self, timeout_s: float = _LAST_WORDS_S) -> None:
        """Write what is waiting and end the thread; give up after ``timeout_s`` seconds."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _append_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._append(line)
            except OSError as error:
                self._lose(f"{error.strerror or error}")

    def _append(self, line: bytes) -> None:
        """Opened for every line: events are rare, and a log that was moved away must not be written to for ever."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def _lose(self, why: str) -> None:
        self.lost += 1
        if self.lost == 1:
            log.warning("events are missing from %s: %s", self.path, why)


def event_file(run_directory: str) -> Path:
    """Where events of a run go: into its directory, or into the current one where that is a URL.

    Object stores cannot append, and a log of faults must not depend on what may be at fault.
    """
    local = run_directory.removeprefix("file://")
    return Path(FILE).absolute() if "://" in local else Path(local) / FILE


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All whole lines of an event file, in order; a last line that was cut by a kill is left out."""
    events: list[dict[str, Any]] = []
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events
