"""From the notes of the ranks to the table and the targets."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.restarts.plan import METHODS, Plan
from lightning_resilience.events import FILE, read_events


@dataclass(frozen=True)
class Outcome:
    """What a job showed.

    Attributes:
        method: Who recovered.
        kind: What from.
        ranks: How many.
        millions: Parameters in millions.
        deadline_s: When no progress counts as a hang, in seconds.
        step_s: Median seconds of an undisturbed step.
        stood_still_s: For each fault, seconds from it until every rank had done a step again.
        noticed_s: For each fault, seconds from it until recovery began on the first rank; empty if not noted.
        phases_s: Median seconds of each phase of the recovery, by name.
        redone: Steps that were done more than once, over all faults.
        failure: Why there are no figures.
    """

    method: str
    kind: str
    ranks: int
    millions: int
    deadline_s: float
    step_s: float
    stood_still_s: tuple[float, ...]
    noticed_s: tuple[float, ...]
    phases_s: dict[str, float]
    redone: int
    failure: str = ""

    @property
    def recovery_s(self) -> float:
        """Median seconds from the end of detection until the next step was done everywhere.

        An exception is noticed when it is raised; a hang not before its deadline.
        """
        wait = self.deadline_s if self.kind == "hang" else 0.0
        return median(self.stood_still_s) - wait


def outcome(plan: Plan, failure: str) -> Outcome:
    """Read the notes of all ranks."""
    notes = [_notes(Path(plan.directory, f"rank{rank}.jsonl")) for rank in range(plan.ranks)]
    faults = sorted((note["step"], note["at"]) for rank in notes for note in rank if note["what"] == "fault")
    still = tuple(_until_done(notes, step, at) for step, at in faults) if not failure else ()
    path = Path(plan.directory, FILE)
    events = [event for event in read_events(path) if event["kind"] == "restarted"] if path.exists() else []
    return Outcome(
        method=plan.method,
        kind=plan.kind,
        ranks=plan.ranks,
        millions=plan.millions,
        deadline_s=plan.deadline_s,
        step_s=_step_s(notes[0], {step for step, _ in faults}),
        stood_still_s=still,
        noticed_s=tuple(_noticed([*_recoveries_begun(events), *_times_noted(notes)], faults)),
        phases_s=_phases(events),
        redone=sum(count - 1 for count in _times_done(notes[0]).values()),
        failure=failure or ("" if len(faults) == plan.faults else f"only {len(faults)} of {plan.faults} faults struck"),
    )


def _notes(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _until_done(notes: Sequence[Sequence[dict[str, Any]]], step: int, at: float) -> float:
    return max(_first_done(rank, step) for rank in notes) - at


def _first_done(notes: Sequence[dict[str, Any]], step: int) -> float:
    return min(float(note["at"]) for note in notes if note["what"] == "step" and note["step"] == step)


def _step_s(notes: Sequence[dict[str, Any]], disturbed: set[int]) -> float:
    steps = [note for note in notes if note["what"] == "step"]
    pairs = pairwise(steps)
    times = [later["at"] - earlier["at"] for earlier, later in pairs if later["step"] not in disturbed]
    return median(times) if times else float("nan")


def _noticed(times: Sequence[float], faults: Sequence[tuple[int, float]]) -> Iterator[float]:
    """For each fault, seconds until the first recovery that began after it."""
    for _, at in faults:
        if later := [moment for moment in times if moment > at]:
            yield min(later) - at


def _times_noted(notes: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    return [note["at"] for rank in notes for note in rank if note["what"] == "noticed"]


def _recoveries_begun(events: Sequence[dict[str, Any]]) -> list[float]:
    """An event is written at the end of a recovery, in seconds of the wall clock, with how long its phases took."""
    ahead = time.time() - time.monotonic()
    return [event["time"] - sum(event["phases"].values()) - ahead for event in events]


def _times_done(notes: Sequence[dict[str, Any]]) -> dict[int, int]:
    counts: dict[int, int] = defaultdict(int)
    for note in notes:
        if note["what"] == "step":
            counts[note["step"]] += 1
    return counts


def _phases(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    gathered: dict[str, list[float]] = defaultdict(list)
    for event in events:
        for name, seconds in event["phases"].items():
            gathered[name].append(seconds)
    return {name: median(values) for name, values in gathered.items()}


def print_report(console: Console, outcomes: Sequence[Outcome]) -> None:
    """The table, phases and targets."""
    table = Table(title="Seconds from a fault until every rank has done a step again", title_justify="left")
    for column in ("job", "method", "median", "min", "max", "after notice", "against ours", "redone", "step"):
        table.add_column(column, justify="left" if column in ("job", "method") else "right")
    for result in outcomes:
        table.add_row(*_row(result, _ours(outcomes, result)))
    console.print(table)
    for result in outcomes:
        if result.phases_s:
            phases = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in result.phases_s.items())
            console.print(f"phases of {_job(result)}, median ms: {phases}", highlight=False, markup=False)
        if result.failure:
            console.print(f"{METHODS[result.method]}, {_job(result)}: {result.failure}", highlight=False, markup=False)
    for line in targets(outcomes):
        console.print(line, highlight=False, markup=False)


def _row(result: Outcome, ours: Outcome | None) -> Sequence[str]:
    name = METHODS[result.method]
    if result.failure or not result.stood_still_s:
        return (_job(result), name, "failed", "", "", "", "", "", "")
    ratio = f"{result.recovery_s / ours.recovery_s:.1f} x" if ours and ours.stood_still_s else ""
    times = result.stood_still_s
    figures = (median(times), min(times), max(times), result.recovery_s)
    return (
        _job(result),
        name,
        *(f"{value:.2f}" for value in figures),
        ratio,
        str(result.redone),
        f"{result.step_s:.3f}",
    )


def _job(result: Outcome) -> str:
    return f"{result.kind}, {result.ranks} ranks, {result.millions} M"


def _ours(outcomes: Sequence[Outcome], like: Outcome) -> Outcome | None:
    same = ("kind", "ranks", "millions")
    return next(
        (
            other
            for other in outcomes
            if other.method == "ours" and all(getattr(other, name) == getattr(like, name) for name in same)
        ),
        None,
    )


def targets(outcomes: Sequence[Outcome]) -> list[str]:
    """What was aimed at, and whether it was met."""
    found = []
    for result in outcomes:
        if result.method != "ours" or not result.stood_still_s:
            continue
        found.append(_line(f"{_job(result)}: recovery <= 0.5 s", result.recovery_s, result.recovery_s <= 0.5, "s"))
        found.append(_line(f"{_job(result)}: no step redone", result.redone, result.redone == 0, ""))
        if result.kind == "hang" and result.noticed_s:
            late = median(result.noticed_s) / result.deadline_s
            found.append(_line(f"{_job(result)}: noticed within 1.2 x the deadline", late, late <= 1.2, "x"))
    for result in outcomes:
        ours = _ours(outcomes, result)
        if result.method != "ours" and ours and result.stood_still_s and ours.stood_still_s:
            least, ratio = (2 if result.method == "nvrx-tuned" else 10), result.recovery_s / ours.recovery_s
            label = f"{_job(result)}: at least {least} x faster than {METHODS[result.method]}"
            found.append(_line(label, ratio, ratio >= least, "x"))
    sizes = [r for r in outcomes if r.method == "ours" and r.kind == "exception" and r.ranks == 2 and r.stood_still_s]
    if len(sizes) == 2:
        small, large = (result.recovery_s - result.step_s for result in sizes)
        ratio = large / small
        label = f"recovery besides the step itself, {sizes[1].millions} M against {sizes[0].millions} M: within 30 %"
        found.append(_line(label, ratio, abs(ratio - 1) <= 0.3, "x"))
    return found


def _line(label: str, value: float, met: bool, unit: str) -> str:
    return f"{label}: {value:.2f} {unit} {'met' if met else 'missed'}"
