"""Choosing a checkpoint whose every byte is what was written; the ranks share the reading.

A damaged one is named and the one before it is tried.
"""

from __future__ import annotations

import json
import logging

import xxhash

from lightning_resilience.checkpoint.candidates import Candidate, examine, none_valid, with_predecessors
from lightning_resilience.checkpoint.digest import BLOCK, pieces
from lightning_resilience.checkpoint.exchange import Exchange
from lightning_resilience.checkpoint.manifest import Manifest, Seal
from lightning_resilience.checkpoint.storage import Place
from lightning_resilience.errors import DamagedCheckpointError, LoadError

log = logging.getLogger(__name__)


def choose(place: Place, exchange: Exchange, *, fall_back: bool) -> Place:
    """The checkpoint to load instead of ``place``: itself, or the newest valid one before it.

    Called on all ranks; all get the same answer, or the same error.

    Args:
        place: A checkpoint, or a directory of them; rank 0's counts.
        exchange: How the ranks agree.
        fall_back: Whether an earlier checkpoint may take the place of a damaged one.

    Raises:
        DamagedCheckpointError: It is damaged and nothing else may be used.
        NoValidCheckpointError: None of them is valid.
        LoadError: There is none.
    """
    places = [Place(place.storage, path) for path in _agreed_paths(place, exchange)]
    faults: list[str] = []
    for candidate in places if fall_back else places[:1]:
        fault = _shared_check(candidate, exchange)
        if not fault:
            _say_choice(candidate, faults, exchange)
            return candidate
        faults.append(fault)
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
    answer = json.loads(exchange.all_gather(json.dumps({"paths": paths, "error": error}).encode())[0])
    if answer["error"]:
        raise LoadError(answer["error"])
    found: list[str] = answer["paths"]
    return found


def _shared_check(place: Place, exchange: Exchange) -> str:
    """Every rank checks its share of the files; the first fault of any, or an empty string."""
    fault = ""
    try:
        candidate = examine(place)
        fault = candidate.fault
        if not fault:
            check_share(candidate, exchange.rank, exchange.world_size)
    except (DamagedCheckpointError, OSError) as error:
        fault = str(error)
    return next((found.decode() for found in exchange.all_gather(fault.encode()) if found), "")


def check_share(candidate: Candidate, rank: int, world_size: int) -> None:
    """Compare this rank's share of the files with the proof.

    Raises:
        DamagedCheckpointError: A file is not what was written; the message names it.
    """
    if isinstance(candidate.proof, Seal):
        if rank == 0:
            _compare(candidate.place, candidate.proof.digested, candidate.proof.xxh3)
    elif isinstance(candidate.proof, Manifest):
        files = sorted(candidate.proof.files.items(), key=lambda item: item[1].size, reverse=True)
        for name, record in files[rank::world_size]:
            _compare(candidate.folder / name, record.size, record.xxh3)


def _compare(file: Place, size: int, xxh3: str) -> None:
    if not is_intact(file, size, xxh3):
        raise DamagedCheckpointError(f"{file} does not hold what was written: its checksum differs")


def is_intact(file: Place, size: int, digest: str) -> bool:
    """Whether the first ``size`` bytes of a file have the digest that writing them gave."""
    buffer = memoryview(bytearray(BLOCK))
    return all(_digest_of(file, start, stop, buffer) == piece for start, stop, piece in pieces(size, digest))


def _digest_of(file: Place, start: int, stop: int, buffer: memoryview) -> str:
    digest = xxhash.xxh3_64()
    for offset in range(start, stop, len(buffer)):
        piece = buffer[: min(len(buffer), stop - offset)]
        if file.read_into(offset, piece) < len(piece):
            return ""
        digest.update(piece)
    return digest.hexdigest()


def _say_choice(chosen: Place, faults: list[str], exchange: Exchange) -> None:
    if faults and exchange.rank == 0:
        log.warning(
            "DAMAGED CHECKPOINT: %s. Using %s instead; the steps after it will be done again.",
            "; ".join(faults),
            chosen,
        )
