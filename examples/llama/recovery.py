"""What the demo makes of a step log that holds a killed run and the run that went on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


def split_runs(events: Sequence[Event]) -> list[list[Event]]:
    """The events of each start of the job, in order."""
    runs: list[list[Event]] = []
    for event in events:
        if event["event"] == "start":
            runs.append([])
        runs[-1].append(event)
    return runs


def losses(run: Sequence[Event]) -> dict[int, float]:
    """Training loss by step."""
    return {event["step"]: event["loss"] for event in run if event["event"] == "step"}


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A kill and a resume, as the step log saw them.

    Args:
        killed_at: the last step that the killed run finished.
        resumed_from: the step of the checkpoint that the second run started with.
        before: losses of the killed run by step.
        after: losses of the second run by step.
        steps: how many steps the job had to do.
        stalls_ms: how long each save held training, in milliseconds.
        failed_saves: steps whose checkpoint did not become durable.
    """

    killed_at: int
    resumed_from: int
    before: Mapping[int, float]
    after: Mapping[int, float]
    steps: int
    stalls_ms: tuple[float, ...]
    failed_saves: tuple[int, ...] = ()

    @property
    def redone(self) -> list[int]:
        """Steps that both runs did."""
        return sorted(set(self.before) & set(self.after))

    @property
    def different(self) -> list[int]:
        """Steps whose loss the second run did not reproduce to the last bit."""
        return [step for step in self.redone if self.before[step] != self.after[step]]

    def problems(self) -> list[str]:
        """Everything that is not as promised; empty when all is well."""
        expected = list(range(self.resumed_from + 1, self.steps + 1))
        checks = {
            "the second run began at step 0: no checkpoint of the first was used": self.resumed_from == 0,
            "the second run did not do each step from its checkpoint to the end": sorted(self.after) != expected,
            "no step was done twice, so nothing shows that the resume is exact": not self.redone,
            f"steps {self.different} have another loss than before the kill": bool(self.different),
            "no save was reported": not self.stalls_ms,
            f"the saves of steps {self.failed_saves} failed": bool(self.failed_saves),
        }
        return [text for text, failed in checks.items() if failed]


def recovery(events: Sequence[Event], steps: int) -> Recovery:
    """Read a log of exactly two runs.

    Raises:
        ValueError: the log holds another number of runs, or a run without a step.
    """
    runs = split_runs(events)
    if len(runs) != 2 or not all(losses(run) for run in runs):
        raise ValueError(f"expected two runs with steps in the log, found {len(runs)} starts")
    saves = [event for event in events if event["event"] == "save"]
    before, after = losses(runs[0]), losses(runs[1])
    return Recovery(
        killed_at=max(before),
        resumed_from=runs[1][0]["step"],
        before=before,
        after=after,
        steps=steps,
        stalls_ms=tuple(1e3 * event["stall_s"] for event in saves),
        failed_saves=tuple(event["step"] for event in saves if event["error"]),
    )
