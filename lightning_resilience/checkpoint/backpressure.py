"""What to do with a save while storage is behind: one decision, computed alike on every rank.

Every rank tells in the exchange that opens a save which of its slots are taken. From that all ranks conclude the
same, without another collective: what a rank says stays true until it has acted, because its writer begins no
waiting save meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

OnBusy = Literal["latest", "skip", "wait"]
POLICIES: tuple[OnBusy, ...] = ("latest", "skip", "wait")


@dataclass(frozen=True)
class Staged:
    """A save whose bytes still fill a slot of one rank.

    Attributes:
        attempt: Its name, the same on all ranks.
        step: Optimizer steps done when its state was taken.
        required: Somebody asked for just this one: never replaced, never skipped.
        begun: The writer of this rank is writing it; otherwise it waits for its turn.
    """

    attempt: str
    step: int
    required: bool
    begun: bool


class Action(Enum):
    """What becomes of a new save."""

    TAKE = "take"  # there is a free slot
    REPLACE = "replace"  # one that waits gives its slot up
    WAIT = "wait"  # until there is a free slot
    SKIP = "skip"  # the new one is not saved


@dataclass(frozen=True)
class Decision:
    """The action, and for a replacement the attempt that gives way."""

    action: Action
    replaced: str = ""


def decide(policy: OnBusy, slots: int, step: int, required: bool, queues: Sequence[Sequence[Staged]]) -> Decision:
    """What to do with a new save.

    Args:
        policy: "latest": it takes the place of the oldest one that waits; "skip": it is not saved; "wait": training
            waits for a slot.
        slots: How many saves a rank can hold.
        step: Of the new save. It never replaces another one of its own step, which is the same state under another
            name.
        required: It must be saved, even if training has to wait for it.
        queues: What each rank holds, oldest first.
    """
    if all(len(queue) < slots for queue in queues):
        return Decision(Action.TAKE)
    if policy == "latest" and (oldest := _oldest_waiting(step, queues)):
        return Decision(Action.REPLACE, oldest)
    if policy == "wait" or required:
        return Decision(Action.WAIT)
    return Decision(Action.SKIP)


def _oldest_waiting(step: int, queues: Sequence[Sequence[Staged]]) -> str:
    """The first save that no rank has begun to write, and whose place a newer one may take."""
    waiting = [{staged.attempt for staged in queue if not staged.begun} for queue in queues]
    for staged in queues[0]:
        replaceable = not staged.required and staged.step < step
        if replaceable and all(staged.attempt in attempts for attempts in waiting):
            return staged.attempt
    return ""
