"""Going on with fewer ranks: who goes on, under which number, and with how much work for each. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks that go on.

    Attributes:
        ranks: Their numbers so far, in order; the position of each is its new number.
        rank: The new number of this rank.
        before: How many there were.
    """

    ranks: tuple[int, ...]
    rank: int
    before: int

    @property
    def size(self) -> int:
        """How many there are from now on."""
        return len(self.ranks)

    def number(self, rank: int) -> int:
        """The new number of a rank; -1 for one that is gone."""
        return self.ranks.index(rank) if rank in self.ranks else -1


def world_without(dropped: Mapping[int, str], rank: int, world_size: int) -> World:
    """What is left, numbered without gaps in the order there was.

    Args:
        dropped: Ranks that are out for good; not `rank`.
        rank: This rank.
        world_size: How many ranks there were.
    """
    ranks = tuple(number for number in range(world_size) if number not in dropped)
    return World(ranks=ranks, rank=ranks.index(rank), before=world_size)


def why_not_without(dropped: Mapping[int, str], world_size: int, least: int) -> str:
    """Why the others cannot go on; empty if they can.

    Args:
        dropped: Ranks that are out for good, and why.
        world_size: How many ranks there were.
        least: How many are needed.
    """
    each = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(dropped.items()))
    if 0 in dropped:
        return f"{each}. Rank 0 serves the control store, so the others cannot go on without it"
    left = world_size - len(dropped)
    if left < least:
        return f"{each}. That leaves {left} of {world_size} ranks, and min_world_size={least}"
    return ""


def accumulation(batches: int, before: int, now: int) -> tuple[int, bool]:
    """How many batches a rank accumulates so that an optimizer step sees as many samples as before.

    Args:
        batches: Accumulated by each of `before` ranks.
        before: How many ranks these batches were meant for.
        now: How many there are.

    Returns:
        Batches for each of `now` ranks, and whether that is exactly as much; if not, it is the most that is less.
    """
    in_all = batches * before
    return max(1, in_all // now), in_all % now == 0
