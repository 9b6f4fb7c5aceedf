"""What each rank was doing when a hang was noticed, and what that says of who keeps the others waiting."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What one rank says of itself, before anything is interrupted.

    Attributes:
        rank: Who says it.
        section: What its training thread was doing.
        seconds: For how long.
        waits: Whether it was waiting for other ranks, in a collective.
        collectives: How many collectives it has begun in each process group, by the group's name.
        stack: Of its training thread, "file:line function", innermost last.
    """

    rank: int
    section: str
    seconds: float
    waits: bool
    collectives: Mapping[str, int]
    stack: Sequence[str]

    def to_json(self) -> str:
        """For the control store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Statement:
        """The inverse."""
        return cls(**json.loads(text))

    @property
    def where(self) -> str:
        """The innermost frame outside of torch and Lightning, which is the one that people can change."""
        own = [frame for frame in self.stack if not any(name in frame for name in _NOT_THEIRS)]
        return (own or list(self.stack) or ["an unknown place"])[-1]


_NOT_THEIRS = ("/torch/", "/lightning/", "/pytorch_lightning/", "/lightning_resilience/", "/lib/python", "<frozen ")


def suspects(accuser: int, statements: Sequence[Statement]) -> dict[int, str]:
    """Ranks that the others wait for, and what shows it; empty if nothing does.

    Args:
        accuser: The rank that noticed the hang.
        statements: Of all ranks that could still say something.
    """
    busy = [told for told in statements if not told.waits]
    if len(busy) == len(statements):  # nobody waits for another: whoever noticed is late by itself
        busy = [told for told in statements if told.rank == accuser]
    if busy:
        return {
            told.rank: f"in {told.section} for {told.seconds:.3g} s and not in a collective, at {told.where}"
            for told in busy
        }
    return _odd_ones(statements)


def _odd_ones(statements: Sequence[Statement]) -> dict[int, str]:
    """Those that have begun another number of collectives than most of a group; fewer, if neither side is most."""
    reasons: dict[int, str] = {}
    where = {told.rank: told.where for told in statements}
    for name in sorted({name for told in statements for name in told.collectives}):
        counts = {told.rank: told.collectives[name] for told in statements if name in told.collectives}
        least, most = min(counts.values()), max(counts.values())
        ahead = [rank for rank, count in counts.items() if count == most]
        behind = [rank for rank, count in counts.items() if count < most]
        odd, others = (ahead, least) if len(ahead) < len(behind) else (behind, most)
        for rank in odd:
            why = f"has begun {counts[rank]} collectives of process group {name}, others {others}, at {where[rank]}"
            reasons.setdefault(rank, why)
    return reasons


def whereabouts(suspected: Mapping[int, str], statements: Sequence[Statement], missing: Sequence[int]) -> str:
    """Suspects and where each rank was, for a log; ranks in the same place share a line."""
    lines = [f"suspect: rank {rank}, {why}" for rank, why in suspected.items()]
    lines += [f"rank {rank} could not say where it is" for rank in missing]
    places: dict[tuple[str, str], list[int]] = {}
    for told in statements:
        places.setdefault((told.section, " > ".join(told.stack[-3:])), []).append(told.rank)
    lines += [f"{_ranks(ranks)} in {section}: {place}" for (section, place), ranks in places.items()]
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    """Few are listed, many are counted."""
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, ... {ranks[-1]})"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
