"""All that lies in a directory of checkpoints, the unusable included, for people and for retention. Reads no tensor."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum

from lightning_resilience.checkpoint.attempts import INCOMPLETE
from lightning_resilience.checkpoint.candidates import META, Candidate, examine, find, is_checkpoint_directory
from lightning_resilience.checkpoint.manifest import Manifest, Seal
from lightning_resilience.checkpoint.peek import peek
from lightning_resilience.checkpoint.quarantine import Quarantine
from lightning_resilience.checkpoint.retention import Committed
from lightning_resilience.checkpoint.storage import Place
from lightning_resilience.errors import LoadError

_THREADS = 8  # a listing of an object store waits for answers, not for the processor


class State(str, Enum):
    """What a checkpoint is good for, as far as names, sizes and its own words tell."""

    COMMITTED = "committed"
    DAMAGED = "damaged"
    UNFINISHED = "unfinished"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class Listed:
    """One line of a catalog.

    Attributes:
        place: Where it is.
        folder: Where its files are, if it is a directory; on an object store not the same.
        state: Committed by us, written by another tool, damaged, or left unfinished.
        weights_only: Training cannot go on from it.
        step: Optimizer steps done; None where nothing says so.
        created_ns: When it was committed, in nanoseconds since the epoch; else when it was changed.
        size: Bytes of its files.
        ranks: How many wrote it; None where nothing says so.
        fault: What is wrong with it, in words; empty when nothing is known to be.
        proof: What its bytes must be; None where nothing says so.
    """

    place: Place
    folder: Place
    state: State
    weights_only: bool
    step: int | None
    created_ns: int
    size: int
    ranks: int | None
    fault: str = ""
    proof: Manifest | Seal | None = None

    @property
    def usable(self) -> bool:
        """Nothing is known to be wrong with it."""
        return self.state in (State.COMMITTED, State.FOREIGN)


def catalog(place: Place) -> list[Listed]:
    """What is at ``place``: one checkpoint, or all in that directory, newest first.

    Raises:
        LoadError: Nothing is there.
    """
    if not place.exists():
        raise LoadError(f"there is nothing at {place}")
    if not place.is_dir() or is_checkpoint_directory(place):
        return [_listed(examine(place))]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = [*threads.map(_listed, find(place)), *threads.map(_unfinished, _attempts_below(place))]
    return sorted(found, key=lambda listed: listed.created_ns, reverse=True)


def newest(found: list[Listed]) -> Listed | None:
    """The one that a new start would use, of those in the order of a catalog; weights only if there is nothing else."""
    quarantine = Quarantine()
    usable = [one for one in found if one.usable and not quarantine.why(one.place, one.created_ns)]
    return next((listed for listed in usable if not listed.weights_only), usable[0] if usable else None)


def committed(found: list[Listed]) -> list[Committed]:
    """As retention sees them: only what this package committed, and nothing is wrong with."""
    return [
        Committed(str(listed.place), listed.step or 0, listed.created_ns, not listed.weights_only)
        for listed in found
        if listed.state is State.COMMITTED
    ]


def linked(place: Place) -> set[str]:
    """Where the links in a directory lead: somebody calls those checkpoints by another name."""
    return {str((place / entry.name).resolved()) for entry in place.entries() if entry.is_link}


def _listed(candidate: Candidate) -> Listed:
    place, folder, proof = candidate.place, candidate.folder, candidate.proof
    facts = peek(folder / META if folder.is_dir() else place)
    state = State.DAMAGED if candidate.fault else State.COMMITTED if proof else State.FOREIGN
    return Listed(
        place=place,
        folder=folder,
        state=state,
        weights_only=facts is not None and not facts.resumable,
        step=proof.step if proof else facts.step if facts else None,
        created_ns=candidate.created_ns,
        size=_proven_size(proof) or total_size(place),
        ranks=proof.world_size if isinstance(proof, Manifest) else None,
        fault=candidate.fault,
        proof=proof,
    )


def _unfinished(place: Place) -> Listed:
    found = place.stat()
    modified_ns = int(found.modified_s * 1e9) if found else 0
    return Listed(
        place, place, State.UNFINISHED, False, None, modified_ns, total_size(place), None, "it was not committed"
    )


def _proven_size(proof: Manifest | Seal | None) -> int:
    return sum(record.size for record in proof.files.values()) if isinstance(proof, Manifest) else 0


def total_size(place: Place) -> int:
    """Bytes of a file, or of the files in a directory."""
    if not place.is_dir():
        found = place.stat()
        return found.size if found else 0
    return sum(entry.size for entry in place.entries() if not entry.is_directory)


def _attempts_below(place: Place) -> Iterator[Place]:
    for entry in place.entries():
        if entry.name.startswith(".") and entry.name.endswith(INCOMPLETE):
            yield place / entry.name
        elif entry.is_directory and not entry.is_link and not entry.name.startswith("."):
            yield from _attempts_below(place / entry.name)
