"""Whether a new start goes on from snapshots, and of which step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stored:
    """A checkpoint that the run has on storage.

    Attributes:
        path: Where, with links resolved.
        step: Optimizer steps done; None where it does not say.
        created_ns: When it was committed; grows within a directory whatever the clocks.
    """

    path: str
    step: int | None
    created_ns: int


@dataclass(frozen=True)
class Request:
    """What ``fit`` was asked to resume from.

    Attributes:
        path: The checkpoint, with links resolved; None for a start from the beginning.
        asked: Whether ``newest_checkpoint`` was asked in this process for the newest state of this run.
    """

    path: str | None
    asked: bool


def may_stand_in(request: Request, newest: Stored | None, directory: str) -> bool:
    """Whether a snapshot may take the place of what was asked for: only where that is the newest there is.

    An older checkpoint, one of another run, or a start from the beginning that nobody called a resume are taken at
    their word.

    Args:
        request: What was asked for.
        newest: What lies in the run's directory.
        directory: That directory.
    """
    if newest is None:
        return request.asked
    return request.path is not None and request.path in (newest.path, directory)


def newest_common(held: Sequence[Sequence[int]]) -> int | None:
    """The newest step that every rank holds.

    Args:
        held: Steps by rank.
    """
    return max(set.intersection(*map(set, held)), default=None)


def is_as_new(step: int, newest: Stored | None, base_ns: int) -> bool:
    """The same, or of the same step: memory is faster than storage, and damage of either is noticed."""
    return is_newer(step, newest, base_ns) or (newest is not None and newest.step == step)


def is_newer(step: int, newest: Stored | None, base_ns: int) -> bool:
    """Whether a snapshot of this step is ahead of the newest checkpoint.

    Args:
        step: Of the snapshot.
        newest: The newest checkpoint.
        base_ns: Commit time of the newest checkpoint that was there when the run, which took the snapshot, was
            started. That one and those before are behind whatever the step: a run may have gone back.
    """
    if newest is None or newest.created_ns <= base_ns:
        return True
    return newest.step is not None and step > newest.step


def explain(step: int | None, may: bool, newest: Stored | None) -> str:
    """Why snapshots that exist are not used."""
    if step is None:
        return "not every rank holds one of the same step"
    if not may:
        return (
            "fit was asked for something else than the newest state of this run; it is, when"
            " fit(ckpt_path=newest_checkpoint(dirpath)) says so"
        )
    return f"the checkpoint {newest.path if newest else ''} is newer, or they are damaged"
