"""Reading every byte of checkpoints and comparing it with what was written, in parallel and with progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from lightning_resilience.checkpoint.catalog import Listed
from lightning_resilience.checkpoint.digest import BLOCK, pieces
from lightning_resilience.checkpoint.manifest import Manifest, Seal
from lightning_resilience.checkpoint.storage import Place


@dataclass(frozen=True)
class Verdict:
    """What reading a checkpoint has shown.

    Attributes:
        listed: The checkpoint.
        faults: What is wrong, each naming its file; empty when every byte is what was written.
        proven: Checksums were there to compare with.
        bytes: How many were read.
    """

    listed: Listed
    faults: tuple[str, ...]
    proven: bool
    bytes: int


@dataclass(frozen=True)
class _Task:
    place: Place
    size: int
    xxh3: str | None


def verify(
    found: Sequence[Listed], advance: Callable[[int], None] = lambda count: None, threads: int = 4
) -> list[Verdict]:
    """Read them all; what names and sizes have shown to be damaged is not read.

    Args:
        found: Checkpoints, as a catalog lists them.
        advance: Told how many bytes more were read; called from several threads.
        threads: How many files are read at a time.
    """
    with ThreadPoolExecutor(threads) as pool:
        pending = [
            (listed, [(task, pool.submit(_check, task, advance)) for task in _tasks(listed)]) for listed in found
        ]
        verdicts = []
        for listed, checks in pending:
            faults = [listed.fault] if listed.fault else []
            faults += [fault for _, check in checks if (fault := check.result())]
            proven = listed.proof is not None
            verdicts.append(Verdict(listed, tuple(faults), proven, sum(task.size for task, _ in checks)))
    return verdicts


def bytes_to_read(found: Sequence[Listed]) -> int:
    """How much :func:`verify` will read."""
    return sum(task.size for listed in found for task in _tasks(listed))


def _tasks(listed: Listed) -> Iterator[_Task]:
    """The files of a checkpoint, largest first; of one without proof whatever is there, to see that it can be read."""
    proof = listed.proof
    if not listed.usable:
        return
    if isinstance(proof, Seal):
        yield _Task(listed.place, proof.digested, proof.xxh3)
    elif isinstance(proof, Manifest):
        for name, record in sorted(proof.files.items(), key=lambda item: -item[1].size):
            yield _Task(listed.folder / name, record.size, record.xxh3)
    elif (found := listed.place.stat()) is not None and not found.is_directory:
        yield _Task(listed.place, found.size, None)
    else:
        for entry in listed.folder.entries():
            if not entry.is_directory:
                yield _Task(listed.folder / entry.name, entry.size, None)


def _check(task: _Task, advance: Callable[[int], None]) -> str:
    """The fault of a file; empty when there is none."""
    buffer = memoryview(bytearray(min(BLOCK, max(1, task.size))))
    parts = pieces(task.size, task.xxh3) if task.xxh3 is not None else [(0, task.size, None)]
    try:
        for start, stop, expected in parts:
            digest = xxhash.xxh3_64()
            for offset in range(start, stop, len(buffer)):
                block = buffer[: min(len(buffer), stop - offset)]
                if (count := task.place.read_into(offset, block)) < len(block):
                    return f"{task.place} ends after {offset + count} of {task.size} bytes"
                digest.update(block)
                advance(count)
            if expected is not None and digest.hexdigest() != expected:
                return f"{task.place} does not hold what was written: its checksum differs"
    except OSError as error:
        return f"{task.place} cannot be read: {error.strerror or error}"
    return ""
