"""Bytes of a checkpoint's files on their way into memory: verified while they come, by several threads.

A *landing* is a run of bytes of one file and where it belongs. A *piece* is a part of a file with a digest of its
own; a piece in which something lands is read from end to end, once, each byte straight to where it belongs, and what
lies between landings into a buffer that is thrown away.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy
import torch
import xxhash

from lightning_resilience.checkpoint.files import CheckpointFiles, Source, altered

_REMOTE_THREADS = 16
_GAP = 64 << 10  # so many bytes nobody wants are read along rather than skipped, where nothing is verified


class Landing:
    """Bytes ``start`` to ``start + length`` of a file, and the memory that takes them.

    Owned by one :func:`transfer`. ``memory`` and ``landed`` are called by its threads, ``landed`` once, when all
    bytes are there.

    Args:
        file: Name of the file in the checkpoint.
        start: Where the bytes begin.
        length: How many there are.
        memory: Makes or finds the memory, when the first bytes come.
        landed: What to do with them afterwards; may be nothing.
    """

    def __init__(
        self,
        file: str,
        start: int,
        length: int,
        memory: Callable[[], memoryview],
        landed: Callable[[memoryview], None] | None = None,
    ) -> None:
        self.file, self.start, self.stop = file, start, start + length
        self._make, self._landed = memory, landed
        self._memory: memoryview | None = None
        self._missing = length
        self._lock = threading.Lock()

    def view(self, start: int, stop: int) -> memoryview:
        """The memory for these bytes of the file."""
        with self._lock:
            if self._memory is None:
                self._memory = self._make()
            return self._memory[start - self.start : stop - self.start]

    def arrived(self, count: int) -> None:
        """So many bytes more are there."""
        with self._lock:
            self._missing -= count
            if self._missing or self._memory is None:
                return
            memory, self._memory = self._memory, None
        if self._landed is not None:
            self._landed(memory)


@dataclass(frozen=True)
class Piece:
    """A part of a file that is read and verified as one.

    Attributes:
        file: Name of the file.
        start: Its first byte.
        stop: The byte after its last.
        digest: xxh3-64 (hex) of its bytes; empty where nothing proves them.
    """

    file: str
    start: int
    stop: int
    digest: str


@dataclass
class Flight:
    """All that is to come into this process: which piece brings bytes for which landings."""

    files: CheckpointFiles
    landings: dict[Piece, list[Landing]] = field(default_factory=dict)

    @staticmethod
    def plan(files: CheckpointFiles, landings: Iterable[Landing]) -> Flight:
        """Find the pieces; their order is that of the files."""
        by_file: dict[str, list[Landing]] = defaultdict(list)
        for landing in landings:
            if landing.stop > landing.start:
                by_file[landing.file].append(landing)
            else:
                landing.view(landing.start, landing.start)
                landing.arrived(0)
        flight = Flight(files)
        for file, wanted in by_file.items():
            wanted.sort(key=lambda landing: landing.start)
            flight.landings.update(_pieces_for(file, files.pieces(file), wanted))
        return flight


def _pieces_for(
    file: str, pieces: Sequence[tuple[int, int, str]], landings: Sequence[Landing]
) -> Iterator[tuple[Piece, list[Landing]]]:
    open_now: list[Landing] = []
    at = 0
    for start, stop, digest in pieces:
        while at < len(landings) and landings[at].start < stop:
            open_now.append(landings[at])
            at += 1
        open_now = [landing for landing in open_now if landing.stop > start]
        if open_now:
            yield Piece(file, start, stop, digest), list(open_now)


def default_threads(files: CheckpointFiles, sharers: int) -> int:
    """How many threads read for one of so many ranks on this machine.

    From a file system one for each processor of the rank: they copy and hash. From elsewhere more, for they wait.
    """
    if not files.are_local:
        return _REMOTE_THREADS
    return fair_threads(sharers)


def fair_threads(sharers: int) -> int:
    """How many threads that compute are one's share when so many ranks are, or may be, on this machine."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // sharers))


def transfer(flight: Flight, pieces: Sequence[Piece], threads: int) -> None:
    """Read these pieces to where their bytes belong.

    Raises:
        DamagedCheckpointError: A piece is not what was written, or a file too short. What has landed by then is not
            proven.
    """

    def job(piece: Piece) -> Callable[[], None]:
        return lambda: read_piece(flight.files, sources[piece.file], piece, flight.landings[piece])

    with opened(flight.files, pieces) as sources:
        run_all([job(piece) for piece in pieces], threads)


def read_piece(files: CheckpointFiles, source: Source, piece: Piece, landings: Sequence[Landing]) -> None:
    """Read one piece, compare its digest, and only then tell the landings.

    Raises:
        DamagedCheckpointError: It is not what was written.
    """
    digest = xxhash.xxh3_64()
    scratch = uninitialized(min(source.step, piece.stop - piece.start))
    for start, stop in _steps(piece, landings, source.step):
        buffers = _buffers(landings, start, stop, scratch)
        source.read(start, buffers)
        if piece.digest:
            for buffer in buffers:
                digest.update(buffer)
        if len(buffers) == 1 and buffers[0].obj is scratch.obj:
            _copy_out(landings, start, stop, scratch)
    if piece.digest and digest.hexdigest() != piece.digest:
        raise altered(files.place / piece.file)
    _announce(piece, landings)


def _announce(piece: Piece, landings: Sequence[Landing]) -> None:
    for landing in landings:
        landing.arrived(min(landing.stop, piece.stop) - max(landing.start, piece.start))


def _copy_out(landings: Sequence[Landing], start: int, stop: int, memory: memoryview) -> None:
    for landing in landings:
        first, last = max(landing.start, start), min(landing.stop, stop)
        if first < last:
            copy(landing.view(first, last), memory[first - start : last - start])


def deliver(piece: Piece, memory: memoryview, landings: Sequence[Landing]) -> None:
    """Give the landings their bytes of a verified piece that is in memory already."""
    _copy_out(landings, piece.start, piece.stop, memory)
    _announce(piece, landings)


def uninitialized(size: int) -> memoryview:
    """Memory whose pages nobody has touched yet."""
    return torch.empty(size, dtype=torch.uint8).numpy().data


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes while other threads run, which assigning to a slice would not let them."""
    numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))


def _steps(piece: Piece, landings: Sequence[Landing], step: int) -> Iterator[tuple[int, int]]:
    """The parts of a piece that are read with one call each: all of it, or only what lands if nothing is verified."""
    runs = [(piece.start, piece.stop)] if piece.digest else _runs(piece, landings)
    for first, last in runs:
        for start in range(first, last, step):
            yield start, min(start + step, last)


def _runs(piece: Piece, landings: Sequence[Landing]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for landing in landings:
        start, stop = max(landing.start, piece.start), min(landing.stop, piece.stop)
        if runs and start <= runs[-1][1] + _GAP:
            runs[-1] = (runs[-1][0], max(runs[-1][1], stop))
        else:
            runs.append((start, stop))
    return runs


def _buffers(landings: Sequence[Landing], start: int, stop: int, scratch: memoryview) -> list[memoryview]:
    """Where the bytes from start to stop go, in order; just the scratch if some of them go to two places."""
    buffers: list[memoryview] = []
    at = start
    for landing in landings:
        first, last = max(landing.start, start), min(landing.stop, stop)
        if first >= last:
            continue
        if first < at:
            return [scratch[: stop - start]]
        if first > at:
            buffers.append(scratch[at - start : first - start])
        buffers.append(landing.view(first, last))
        at = last
    if at < stop:
        buffers.append(scratch[at - start : stop - start])
    return buffers


def run_all(jobs: Sequence[Callable[[], None]], threads: int) -> None:
    """Run the jobs on threads, in order; after an error no more are begun, and the error is raised."""
    failed = threading.Event()

    def guarded(job: Callable[[], None]) -> None:
        if not failed.is_set():
            try:
                job()
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(max(1, min(threads, len(jobs))), "lightning-resilience-load") as pool:
        done = deque(pool.submit(guarded, job) for job in jobs)
    while done:
        done.popleft().result()  # no name for it here: its error would hold this call, and this call the error


@contextlib.contextmanager
def opened(files: CheckpointFiles, pieces: Iterable[Piece]) -> Iterator[Mapping[str, Source]]:
    """The files of the pieces, open while they are read."""
    with contextlib.ExitStack() as stack:
        names = dict.fromkeys(piece.file for piece in pieces)
        yield {name: stack.enter_context(contextlib.closing(files.open(name))) for name in names}
