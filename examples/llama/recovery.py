"""What the demo makes of the logs of a run with faults that was killed, and of the run that went on from it."""

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
class Restart:
    """A fault that the job got over in its processes.

    Args:
        kind: "exception" or "hang".
        rank: where it happened.
        step: the last step before it.
        noticed_s: seconds from the fault until it was noticed.
        recovered_s: seconds from then until the last rank trained again.
        phases: what the rank at fault did in them, in seconds, in order; the first is until it had left its batch.
        next_step: the first step after it.
    """

    kind: str
    rank: int
    step: int
    noticed_s: float
    recovered_s: float
    phases: Mapping[str, float]
    next_step: int

    @property
    def redone(self) -> int:
        """How many steps were done again."""
        return self.step - self.next_step + 1


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Faults, a kill and a resume, as the logs saw them.

    Args:
        restarts: what the killed run got over before.
        planned: how many faults it was given.
        killed_at: the last step that the killed run finished.
        resumed_from: the step of the checkpoint that the second run started with.
        started_s: seconds from the last step of the killed run until the second one trained.
        order: steps in the order in which the killed run did them.
        before: losses of the killed run by step.
        after: losses of the second run by step.
        steps: how many steps the job had to do.
        stalls_ms: how long each save held training, in milliseconds.
        failed_saves: steps whose checkpoint did not become durable.
    """

    restarts: tuple[Restart, ...]
    planned: int
    killed_at: int
    resumed_from: int
    started_s: float
    order: tuple[int, ...]
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

    @property
    def unseen(self) -> list[int]:
        """Steps with a fault that no run did without one, so that nothing shows what their loss should be."""
        return [restart.next_step for restart in self.restarts if restart.next_step not in self.after]

    def problems(self) -> list[str]:
        """Everything that is not as promised; empty when all is well."""
        expected = list(range(self.resumed_from + 1, self.steps + 1))
        in_order = tuple(range(1, self.killed_at + 1))
        checks = {
            f"{self.planned} faults were planned, {len(self.restarts)} recovered": len(self.restarts) != self.planned,
            "a fault was noticed before it happened, or recovered from before it was noticed": any(
                min(restart.noticed_s, restart.recovered_s) < 0 for restart in self.restarts
            ),
            "the first run lost steps or did some twice": self.order != in_order,
            "the second run began at step 0: no checkpoint of the first was used": self.resumed_from == 0,
            "the second run did not do each step from its checkpoint to the end": sorted(self.after) != expected,
            "no step was done twice, so nothing shows that the resume is exact": not self.redone,
            f"steps {self.unseen} were done only with a fault: nothing to compare with": bool(self.unseen),
            f"steps {self.different} have another loss than before the kill": bool(self.different),
            "no save was reported": not self.stalls_ms,
            f"the saves of steps {self.failed_saves} failed": bool(self.failed_saves),
        }
        return [text for text, failed in checks.items() if failed]


def recovery(events: Sequence[Event], restarted: Sequence[Event], steps: int) -> Recovery:
    """Read the logs of exactly two runs.

    Args:
        events: the step log.
        restarted: what `events.jsonl` says of restarts, by all ranks.
        steps: how many the job had to do.

    Raises:
        ValueError: the step log holds another number of runs, or a run without a step.
    """
    runs = split_runs(events)
    if len(runs) != 2 or not all(losses(run) for run in runs):
        raise ValueError(f"expected two runs with steps in the log, found {len(runs)} starts")
    saves = [event for event in events if event["event"] == "save"]
    faults = [event for event in runs[0] if event["event"] == "fault"]
    before, after = losses(runs[0]), losses(runs[1])
    last = max(event["time"] for event in runs[0] if event["event"] == "step")
    return Recovery(
        restarts=tuple(restarts(faults, runs[0], restarted)),
        planned=len(faults),
        killed_at=max(before),
        resumed_from=runs[1][0]["step"],
        started_s=runs[1][0]["time"] - last,
        order=tuple(event["step"] for event in runs[0] if event["event"] == "step"),
        before=before,
        after=after,
        steps=steps,
        stalls_ms=tuple(1e3 * event["stall_s"] for event in saves),
        failed_saves=tuple(event["step"] for event in saves if event["error"]),
    )


def restarts(faults: Sequence[Event], run: Sequence[Event], restarted: Sequence[Event]) -> list[Restart]:
    """For each planned fault of a run the restart after it, if there was one."""
    found = [(fault, restart_after(fault, run, restarted)) for fault in faults]
    return [restart for _, restart in found if restart is not None]


def restart_after(fault: Event, run: Sequence[Event], restarted: Sequence[Event]) -> Restart | None:
    """How the job got over this fault; None if it did not."""
    mine = [
        (event, report)
        for event in restarted
        for report in event["faults"]
        if event["rank"] == report["rank"] == fault["rank"] and report["step"] == fault["step"]
    ]
    later = [event["step"] for event in run if event["event"] == "step" and event["time"] > fault["time"]]
    if not mine or not later:
        return None
    event, report = mine[0]
    noticed_s = report["at_s"] - fault["time"]  # both of the machine's clock
    done = max(other["time"] for other in restarted if other["number"] == event["number"])
    interrupt_s = event["time"] - sum(event["phases"].values()) - fault["time"] - noticed_s
    return Restart(
        kind=report["kind"],
        rank=report["rank"],
        step=report["step"],
        noticed_s=noticed_s,
        recovered_s=done - fault["time"] - noticed_s,
        phases={"interrupt": max(0.0, interrupt_s), **event["phases"]},
        next_step=later[0],
    )
