"""How the saves of a rank went: filled by the training thread and by the thread that hears the writer."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from lightning_resilience.checkpoint.events import (
    CheckpointFailed,
    CheckpointReplaced,
    CheckpointSaved,
    CheckpointSkipped,
    CheckpointStaged,
)
from lightning_resilience.events import Event

log = logging.getLogger(__name__)

Outcome = Literal["pending", "saved", "failed", "replaced", "skipped"]


@dataclass(frozen=True)
class SaveReport:
    """How one save went, seen from this rank.

    Attributes:
        path: Where the checkpoint is, or was to be.
        step: Optimizer steps done when the state was taken.
        bytes: Bytes that this rank staged.
        stall_s: Seconds for which training waited, all in all.
        waited_s: Seconds of these for which it waited for a free slot.
        durable_s: Seconds from the call until it was committed (on other ranks than 0: until this rank's part
            was durable); None while that is open or when it was not saved.
        outcome: "pending"; "saved"; "failed"; "replaced" by a newer one while it waited for its turn; "skipped"
            because storage was busy.
        error: Why it failed, in words; None if it did not.
        retried: How many requests to a remote storage failed in passing and were sent again by this rank's writer.
        tag: What the caller calls it.
    """

    path: str
    step: int
    bytes: int = 0
    stall_s: float = 0.0
    waited_s: float = 0.0
    durable_s: float | None = None
    outcome: Outcome = "pending"
    error: str | None = None
    retried: int = 0
    tag: int = 0


@dataclass(frozen=True)
class Verdict:
    """What became of a save, as all ranks are told.

    Attributes:
        tag: What the caller calls the save.
        outcome: See :class:`SaveReport`.
        error: Why it failed, in words.
    """

    tag: int
    outcome: Outcome
    error: str = ""


@dataclass(frozen=True)
class SaveCounts:
    """How many saves ended how, and what waiting for storage has cost training.

    Attributes:
        saved: Committed.
        replaced: Given up for a newer one while they waited.
        skipped: Not taken, as storage was busy.
        failed: Taken but not saved.
        waited_s: Seconds for which training waited for a free slot.
    """

    saved: int = 0
    replaced: int = 0
    skipped: int = 0
    failed: int = 0
    waited_s: float = 0.0

    @classmethod
    def of(cls, reports: Iterable[SaveReport]) -> SaveCounts:
        """Count them."""
        reports = list(reports)
        outcomes = [report.outcome for report in reports]
        return cls(
            saved=outcomes.count("saved"),
            replaced=outcomes.count("replaced"),
            skipped=outcomes.count("skipped"),
            failed=outcomes.count("failed"),
            waited_s=sum(report.waited_s for report in reports),
        )


class History:
    """Owned by the engine of one rank.

    Args:
        level: Of the line that a save gets in the log.
        emit: Told what happens, on the thread on which it happens.
    """

    def __init__(self, level: int, emit: Callable[[Event], None]) -> None:
        self._level = level
        self._emit = emit
        self._reports: dict[int, SaveReport] = {}
        self._news: list[Verdict] = []
        self._lock = threading.Lock()

    @property
    def reports(self) -> list[SaveReport]:
        """Of all saves, oldest first."""
        with self._lock:
            return [self._reports[key] for key in sorted(self._reports)]

    def take_news(self) -> list[Verdict]:
        """What became of saves since the last call, in the order in which it was known."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def put_back(self, news: list[Verdict]) -> None:
        """They could not be told."""
        with self._lock:
            self._news = [*news, *self._news]

    def staged(self, number: int, report: SaveReport) -> None:
        """A save was handed to the writer."""
        with self._lock:
            self._reports[number] = report
        self._emit(
            CheckpointStaged(
                path=report.path,
                step=report.step,
                bytes=report.bytes,
                stall_s=report.stall_s,
                waited_s=report.waited_s,
            )
        )

    def finished(self, number: int, began: float, error: str, retried: int = 0) -> None:
        """It is committed, or has failed."""
        if error:
            report = self._settle(number, "failed", error=error, retried=retried)
            log.error("the checkpoint %s (step %d) was NOT saved: %s", report.path, report.step, error)
            self._emit(CheckpointFailed(path=report.path, step=report.step, error=error, retried=retried))
            return
        seconds = time.monotonic() - began
        report = self._settle(number, "saved", durable_s=seconds, retried=retried)
        log.log(
            self._level,
            "checkpoint %s (step %d): %.1f MB staged in %.1f ms, durable after %.2f s%s",
            report.path,
            report.step,
            report.bytes / 1e6,
            1e3 * report.stall_s,
            seconds,
            f", {retried} request(s) tried again" if retried else "",
        )
        self._emit(CheckpointSaved(path=report.path, step=report.step, durable_s=seconds, retried=retried))

    def replaced(self, number: int, by_step: int) -> Verdict:
        """It waited for its turn, and a newer one has its slot now; all ranks know, so it is not in the news."""
        report = self._settle(number, "replaced")
        log.log(
            self._level,
            "storage is behind: the checkpoint %s (step %d) is given up for that of step %d",
            report.path,
            report.step,
            by_step,
        )
        self._emit(CheckpointReplaced(path=report.path, step=report.step, by_step=by_step))
        return Verdict(report.tag, "replaced")

    def skipped(self, number: int, report: SaveReport, reason: str) -> Verdict:
        """It was not taken; all ranks know, so it is not in the news."""
        with self._lock:
            self._reports[number] = dataclasses.replace(report, outcome="skipped")
        log.log(self._level, "the checkpoint %s (step %d) is skipped: %s", report.path, report.step, reason)
        self._emit(CheckpointSkipped(path=report.path, step=report.step, reason=reason))
        return Verdict(report.tag, "skipped")

    def _settle(self, number: int, outcome: Outcome, error: str = "", **facts: Any) -> SaveReport:
        with self._lock:
            report = dataclasses.replace(self._reports[number], outcome=outcome, error=error or None, **facts)
            self._reports[number] = report
            if outcome != "replaced":
                self._news.append(Verdict(report.tag, outcome, error))
        return report
