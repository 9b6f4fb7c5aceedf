"""Ranks of one machine read a checkpoint together: what several of them need is read and verified by one.

It goes from rank to rank through *windows*, small pieces of shared memory, in rounds: every rank fills its window,
all take from all windows what they need, and so on. The windows have no name in any file system, so nothing is left
behind whatever happens.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_resilience.checkpoint.agreement import together
from lightning_resilience.checkpoint.digest import BLOCK
from lightning_resilience.checkpoint.exchange import Exchange, gather_json
from lightning_resilience.checkpoint.transfer import (
    Flight,
    Landing,
    Piece,
    default_threads,
    deliver,
    opened,
    read_piece,
    run_all,
    transfer,
)

WINDOW = 8  # blocks of a file that a rank passes on in one round


@dataclass(frozen=True)
class Share:
    """What one rank does of the common work.

    Attributes:
        alone: Pieces that only it needs.
        rounds: Pieces that it reads for others too, by round.
    """

    alone: tuple[Piece, ...]
    rounds: tuple[tuple[Piece, ...], ...]


def divide(needs: Sequence[Sequence[Piece]]) -> list[Share]:
    """Who of some ranks reads what: a piece that several need is given to the one of them that has least to do.

    Pure. What is too large for a window is read by each that needs it.

    Args:
        needs: The pieces that each rank needs.
    """
    who: dict[Piece, list[int]] = defaultdict(list)
    for rank, pieces in enumerate(needs):
        for piece in pieces:
            who[piece].append(rank)
    alone: dict[int, list[Piece]] = defaultdict(list)
    common: dict[int, list[Piece]] = defaultdict(list)
    load = Counter({rank: 0 for rank in range(len(needs))})
    for piece, ranks in sorted(who.items(), key=lambda item: (len(item[1]), item[0].file, item[0].start)):
        size = piece.stop - piece.start
        if len(ranks) == 1 or size > BLOCK:
            for rank in ranks:
                alone[rank].append(piece)
                load[rank] += size
        else:
            reader = min(ranks, key=lambda rank: (load[rank], rank))
            common[reader].append(piece)
            load[reader] += size
    return [Share(tuple(alone[rank]), _in_rounds(common[rank])) for rank in range(len(needs))]


def _in_rounds(pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], ...]:
    return tuple(tuple(pieces[start : start + WINDOW]) for start in range(0, len(pieces), WINDOW))


def fetch(flight: Flight, exchange: Exchange) -> None:
    """Bring everything in. Called on all ranks.

    Raises:
        DamagedCheckpointError: A piece that some rank needs is not what was written; raised on all ranks.
    """
    if exchange.world_size == 1:
        transfer(flight, list(flight.landings), default_threads(flight.files, 1))
        return
    window = _Window()
    try:
        _fetch_shared(flight, exchange, window)
    finally:
        window.close()


def _fetch_shared(flight: Flight, exchange: Exchange, window: _Window) -> None:
    nodes = _meet(exchange, window)
    needs = _needs_of_all(flight, exchange)
    shares: dict[int, Share] = {}
    for ranks in nodes:
        shares.update(zip(ranks, divide([needs[rank] for rank in ranks]), strict=True))
    neighbours = next(ranks for ranks in nodes if exchange.rank in ranks)
    threads = default_threads(flight.files, len(neighbours))
    mine = shares[exchange.rank]
    together(exchange, lambda: transfer(flight, mine.alone, threads))
    for number in range(max(len(share.rounds) for share in shares.values())):
        now = {rank: _round(shares[rank], number) for rank in neighbours}
        together(exchange, lambda now=now: _fill(flight, window, now[exchange.rank], threads))  # type: ignore[misc]
        together(exchange, lambda now=now: _take(flight, window, now, threads))  # type: ignore[misc]


def _round(share: Share, number: int) -> tuple[Piece, ...]:
    return share.rounds[number] if number < len(share.rounds) else ()


def _fill(flight: Flight, window: _Window, pieces: Sequence[Piece], threads: int) -> None:
    """Read this rank's pieces of the round into its window."""
    with opened(flight.files, pieces) as sources:
        run_all(
            [
                lambda piece=piece, memory=memory: read_piece(  # type: ignore[misc]
                    flight.files, sources[piece.file], piece, [_into(piece, memory)]
                )
                for piece, memory in zip(pieces, window.places(None), strict=False)
            ],
            threads,
        )


def _into(piece: Piece, memory: memoryview) -> Landing:
    return Landing(piece.file, piece.start, piece.stop - piece.start, lambda: memory)


def _take(flight: Flight, window: _Window, now: Mapping[int, Sequence[Piece]], threads: int) -> None:
    """Copy what this rank needs out of all windows of the machine."""
    run_all(
        [
            lambda piece=piece, memory=memory: deliver(piece, memory, flight.landings[piece])  # type: ignore[misc]
            for rank, pieces in now.items()
            for piece, memory in zip(pieces, window.places(rank), strict=False)
            if piece in flight.landings
        ],
        threads,
    )


def _needs_of_all(flight: Flight, exchange: Exchange) -> list[list[Piece]]:
    """Every rank's pieces, told as numbers: all ranks know the pieces of a file."""
    pieces: dict[str, list[Piece]] = {}
    mine: dict[str, list[int]] = defaultdict(list)
    for piece in flight.landings:
        mine[piece.file].append(piece.start)
    answers = gather_json(exchange, {file: _ranges(starts) for file, starts in mine.items()})
    needs = []
    for answer in answers:
        needed: list[Piece] = []
        for file, ranges in answer.items():
            if file not in pieces:
                pieces[file] = [Piece(file, *proof) for proof in flight.files.pieces(file)]
            for first, last in ranges:
                needed.extend(pieces[file][first : last + 1])
        needs.append(needed)
    return needs


def _ranges(starts: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers of the blocks that start there, neighbours drawn together."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(start // BLOCK for start in starts):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def _meet(exchange: Exchange, window: _Window) -> list[list[int]]:
    """The ranks of each machine; one that cannot see its neighbours' windows counts as a machine of its own."""
    machine = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    answers = gather_json(exchange, [machine, window.path])
    neighbours = {rank: path for rank, (other, path) in enumerate(answers) if other == machine}
    seen = window.open(neighbours)
    key = machine if seen else f"{machine} {exchange.rank}"
    nodes: dict[str, list[int]] = defaultdict(list)
    for rank, answer in enumerate(exchange.all_gather(key.encode())):
        nodes[answer.decode()].append(rank)
    return list(nodes.values())


class _Window:
    """This rank's window, and those of its neighbours."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("lightning-resilience-load")
        os.ftruncate(self._fd, WINDOW * BLOCK)
        self._mine = mmap.mmap(self._fd, WINDOW * BLOCK)
        self._others: dict[int, mmap.mmap] = {}

    @property
    def path(self) -> str:
        """Where others find it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def open(self, paths: Mapping[int, str]) -> bool:
        """Look into the windows of these ranks; False when one cannot be seen."""
        try:
            for rank, path in paths.items():
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    self._others[rank] = mmap.mmap(fd, WINDOW * BLOCK, prot=mmap.PROT_READ)
                finally:
                    os.close(fd)
        except OSError:
            return False
        return True

    def places(self, rank: int | None) -> list[memoryview]:
        """The blocks of a rank's window, read-only; of one's own (None) to be written."""
        whole = memoryview(self._mine if rank is None else self._others[rank])
        return [whole[start : start + BLOCK] for start in range(0, WINDOW * BLOCK, BLOCK)]

    def close(self) -> None:
        """Let go; views that are still held keep the memory."""
        os.close(self._fd)
