"""Where to go on, decided by every rank alike from what all of them say. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_resilience.restart.reports import Report, Standing


@dataclass(frozen=True, kw_only=True)
class FromCommit:
    """All ranks hold this state: go on from it, no optimizer step is lost."""

    standing: Standing


@dataclass(frozen=True, kw_only=True)
class FromTheStart:
    """No rank had begun to train: set up again."""


@dataclass(frozen=True, kw_only=True)
class FromRestorePoint:
    """What the ranks hold does not fit together or cannot be trusted: use an older state."""

    reason: str


Resumption = FromCommit | FromTheStart | FromRestorePoint


def choose_resumption(reports: Sequence[Report]) -> Resumption:
    """Decide where to go on.

    Parameters change only in updates, so commits of the same step share them, and the earliest stage that a rank
    is at is one that all of them have passed.

    Args:
        reports: Of all ranks, in the order of ranks.
    """
    if not any(report.trained for report in reports):
        return FromTheStart()
    behind = [report.rank for report in reports if not report.trained]
    if behind:
        return FromRestorePoint(reason=f"rank {behind[0]} was still setting up while others trained")
    torn = [report.rank for report in reports if not report.whole]
    if torn:
        return FromRestorePoint(reason=f"the fault struck within an optimizer's update on rank {torn[0]}")
    steps = {report.standing.step for report in reports}
    if len(steps) > 1:
        each = ", ".join(f"rank {report.rank}: {report.standing.step}" for report in reports)
        return FromRestorePoint(reason=f"ranks stand at different steps ({each})")
    return FromCommit(standing=min(report.standing for report in reports))
