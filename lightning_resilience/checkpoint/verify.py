"""Choosing a checkpoint that can be used: the one asked for, or the newest good one before it.

A damaged one is named and the one before it is tried; one that has weights only is passed over where training is to
go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import xxhash

from lightning_resilience.checkpoint.agreement import together
from lightning_resilience.checkpoint.candidates import META, Candidate, examine, none_valid, with_predecessors
from lightning_resilience.checkpoint.digest import BLOCK, pieces
from lightning_resilience.checkpoint.exchange import Exchange, gather_json
from lightning_resilience.checkpoint.files import CheckpointFiles, Source, altered
from lightning_resilience.checkpoint.manifest import Manifest, Seal
from lightning_resilience.checkpoint.peek import peek
from lightning_resilience.checkpoint.quarantine import forgive, note_failure
from lightning_resilience.checkpoint.storage import Place
from lightning_resilience.errors import DamagedCheckpointError, LoadError, WeightsOnlyCheckpointError

log = logging.getLogger(__name__)

_T = TypeVar("_T")


def choose(place: Place, exchange: Exchange, *, fall_back: bool) -> Place:
    """The checkpoint to load instead of ``place``: itself, or the newest before it whose every byte is right.

    Called on all ranks, which share the reading; all get the same answer, or the same error.

    Args:
        place: A checkpoint, or a directory of them; rank 0's counts.
        exchange: How the ranks agree.
        fall_back: Whether an earlier checkpoint may take the place of a damaged one.

    Raises:
        DamagedCheckpointError: It is damaged and nothing else may be used.
        NoValidCheckpointError: None of them is valid.
        LoadError: There is none.
    """

    def attempt(one: Place) -> Place:
        together(exchange, lambda: check_share(examined(one), exchange.rank, exchange.world_size, trust=True))
        return one

    return first_usable(place, exchange, attempt, fall_back=fall_back)


def can_go_on_from(place: Place, exchange: Exchange) -> bool:
    """Whether every byte of a checkpoint is right, and it has more than weights; why not is logged.

    Called on all ranks, which share the reading. What no manifest proves counts as right.

    Raises:
        LoadError: It cannot be read, for another reason than damage.
    """

    def look() -> bool:
        candidate = examined(place)
        check_share(candidate, exchange.rank, exchange.world_size, trust=True)
        facts = peek(candidate.folder / META if isinstance(candidate.proof, Manifest) else place)
        return facts is None or facts.resumable

    try:
        return together(exchange, look)
    except DamagedCheckpointError as error:
        if exchange.rank == 0:
            log.warning("DAMAGED CHECKPOINT: %s. The newest state before it is used instead.", error)
        return False


def first_usable(place: Place, exchange: Exchange, attempt: Callable[[Place], _T], *, fall_back: bool) -> _T:
    """What the attempt makes of the first checkpoint with which it succeeds.

    Args:
        place: A checkpoint, or a directory of them; rank 0's counts.
        exchange: How the ranks agree.
        attempt: Called on all ranks with the same place. The next is tried when it raises, on all ranks,
            ``DamagedCheckpointError`` or ``WeightsOnlyCheckpointError``.
        fall_back: Whether another one than the first may be tried.

    Raises:
        DamagedCheckpointError: It is damaged and nothing else may be used.
        NoValidCheckpointError: None of them is valid.
        LoadError: There is none, or the attempt's own.
    """
    places = [Place(place.storage, path) for path in _agreed_paths(place, exchange)]
    faults: list[str] = []
    passed: list[WeightsOnlyCheckpointError] = []
    for candidate in places if fall_back else places[:1]:
        try:
            result = attempt(candidate)
        except DamagedCheckpointError as error:
            faults.append(str(error))
            if exchange.rank == 0:
                note_failure(candidate, examine(candidate).created_ns, str(error))
        except WeightsOnlyCheckpointError as error:
            passed.append(error)
        else:
            _say_choice(candidate, faults, passed, exchange)
            if exchange.rank == 0:
                forgive(candidate)
            return result
    if passed and not faults:
        raise passed[0]
    if not fall_back:
        raise DamagedCheckpointError(f"the checkpoint {place} is damaged: {faults[0]}")
    raise none_valid(places[0].parent, faults)


def _agreed_paths(place: Place, exchange: Exchange) -> list[str]:
    """Rank 0 looks and the others follow: a listing may differ while somebody else commits."""
    paths: list[str] = []
    error = ""
    if exchange.rank == 0:
        try:
            paths = [candidate.path for candidate in with_predecessors(place)]
        except (LoadError, OSError) as caught:
            error = str(caught)
    answer = gather_json(exchange, {"paths": paths, "error": error})[0]
    if answer["error"]:
        raise LoadError(answer["error"])
    found: list[str] = answer["paths"]
    return found


def examined(place: Place) -> Candidate:
    """The candidate there, if nothing speaks against it so far.

    Raises:
        DamagedCheckpointError: Something does.
    """
    candidate = examine(place)
    if candidate.fault:
        raise DamagedCheckpointError(candidate.fault)
    return candidate


def check_share(candidate: Candidate, rank: int, world_size: int, trust: bool) -> None:
    """Compare this rank's share of the files with the proof.

    Raises:
        DamagedCheckpointError: A file is not what was written; the message names it.
        UntrustedCheckpointError: A file is a link, and links are not trusted.
    """
    if isinstance(candidate.proof, Seal):
        if rank == 0:
            _check_file(
                CheckpointFiles(candidate.place.parent, None, trust=True),
                candidate.place.name,
                *_sealed(candidate.proof),
            )
    elif isinstance(candidate.proof, Manifest):
        files = sorted(candidate.proof.files.items(), key=lambda item: item[1].size, reverse=True)
        for name, record in files[rank::world_size]:
            _check_file(CheckpointFiles(candidate.folder, candidate.proof, trust), name, record.size, record.xxh3)


def _sealed(seal: Seal) -> tuple[int, str]:
    return seal.digested, seal.xxh3


def _check_file(files: CheckpointFiles, name: str, size: int, digest: str) -> None:
    source = files.open(name)
    try:
        buffer = memoryview(bytearray(min(BLOCK, size)))
        if not all(_digest_of(source, start, stop, buffer) == piece for start, stop, piece in pieces(size, digest)):
            raise altered(files.place / name)
    finally:
        source.close()


def _digest_of(source: Source, start: int, stop: int, buffer: memoryview) -> str:
    digest = xxhash.xxh3_64()
    step = min(source.step, len(buffer)) or 1
    for offset in range(start, stop, step):
        piece = buffer[: min(step, stop - offset)]
        source.read(offset, [piece])
        digest.update(piece)
    return digest.hexdigest()


def _say_choice(chosen: Place, faults: list[str], passed: list[WeightsOnlyCheckpointError], exchange: Exchange) -> None:
    if exchange.rank != 0:
        return
    if faults:
        log.warning(
            "DAMAGED CHECKPOINT: %s. Using %s instead; the steps after it will be done again.",
            "; ".join(faults),
            chosen,
        )
    if passed:
        log.warning("passing over %d checkpoint(s) with weights only; training goes on from %s", len(passed), chosen)
