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
    """Some rank had not begun to train, so none has done an update: run `fit` again from its beginning.

    Attributes:
        built: Whether the model of every rank is set up already; what it is made of stays.
    """

    built: bool


@dataclass(frozen=True, kw_only=True)
class FromRestorePoint:
    """What the ranks hold does not fit together or cannot be trusted: use an older state."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Nowhere:
    """No state fits all ranks; only parameters that ranks update without each other lead here."""

    reason: str


Resumption = FromCommit | FromTheStart | FromRestorePoint | Nowhere


def choose_resumption(reports: Sequence[Report]) -> Resumption:
    """Decide where to go on.

    Parameters change only in updates, so commits of the same step share them, and the earliest stage that a rank
    is at is one that all of them have passed. A rank that was stopped just before an update which others have done
    does it now: its gradients are complete. The commit right after an update is stage 0.

    Args:
        reports: Of all ranks, in the order of ranks.
    """
    late = [report.rank for report in reports if not report.trained]
    if late and any(report.updated for report in reports):
        return Nowhere(reason=f"rank {late[0]} was still setting up while others had trained")
    if late:
        return FromTheStart(built=any(report.built for report in reports))
    torn = [report.rank for report in reports if not report.whole]
    if torn:
        return FromRestorePoint(reason=f"the fault struck within an optimizer's update on rank {torn[0]}")
    steps = {report.standing.step for report in reports}
    newest = max(steps)
    behind = [report for report in reports if report.standing.step < newest]
    if behind and all(report.ready and report.standing.step == newest - 1 for report in behind):
        return FromCommit(standing=Standing(step=newest, stage=0))
    if behind:
        each = ", ".join(f"rank {report.rank}: {report.standing.step}" for report in reports)
        return FromRestorePoint(reason=f"ranks stand at different steps ({each})")
    return FromCommit(standing=min(report.standing for report in reports))
