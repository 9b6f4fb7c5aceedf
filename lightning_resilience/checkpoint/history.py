"""How the saves of a rank went: filled by the training thread and by the thread that hears the writer."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveReport:
    """How one save went, seen from this rank.

    Attributes:
        path: Where the checkpoint is, or was to be.
        step: Optimizer steps done when the state was taken.
        bytes: Bytes that this rank staged.
        stall_s: Seconds for which training waited.
        durable_s: Seconds from the call until it was committed (on other ranks than 0: until this rank's part
            was durable); None while that is open or when it failed.
        error: Why it failed, in words; None while it is open or when it succeeded.
    """

    path: str
    step: int
    bytes: int
    stall_s: float
    durable_s: float | None = None
    error: str | None = None


class History:
    """Owned by the engine of one rank.

    Args:
        level: Of the line that a save gets in the log.
    """

    def __init__(self, level: int) -> None:
        self._level = level
        self._reports: dict[int, SaveReport] = {}
        self._lock = threading.Lock()

    @property
    def reports(self) -> list[SaveReport]:
        """Of all saves, oldest first."""
        with self._lock:
            return [self._reports[key] for key in sorted(self._reports)]

    def staged(self, request_id: int, report: SaveReport) -> None:
        """A save was handed to the writer."""
        with self._lock:
            self._reports[request_id] = report

    def finished(self, request_id: int, began: float, error: str) -> None:
        """It is committed, or has failed."""
        seconds = time.monotonic() - began
        with self._lock:
            report = self._reports[request_id]
            outcome: dict[str, Any] = {"error": error} if error else {"durable_s": seconds}
            self._reports[request_id] = dataclasses.replace(report, **outcome)
        if error:
            log.error("the checkpoint %s (step %d) was NOT saved: %s", report.path, report.step, error)
            return
        log.log(
            self._level,
            "checkpoint %s (step %d): %.1f MB staged in %.1f ms, durable after %.2f s",
            report.path,
            report.step,
            report.bytes / 1e6,
            1e3 * report.stall_s,
            seconds,
        )
