"""Files whose bytes are compared with their checksums while somebody uses them, so that each is read once."""

from __future__ import annotations

import xxhash

from lightning_resilience.checkpoint.digest import BLOCK
from lightning_resilience.checkpoint.files import CheckpointFiles, altered
from lightning_resilience.errors import DamagedCheckpointError


class ProvenFile:
    """Reads parts of a file, block by block, and verifies each block as it comes. Not for several threads at once.

    A file whose record has one digest for all of it is verified by :meth:`finish`.

    Args:
        files: The checkpoint.
        name: Of the file.

    Raises:
        DamagedCheckpointError: It is missing.
        UntrustedCheckpointError: It is outside of the checkpoint.
    """

    def __init__(self, files: CheckpointFiles, name: str) -> None:
        self._files = files
        self._name = name
        self.size = files.size(name)
        self._digests = [piece for piece in files.pieces(name) if piece[2]]
        self._verified: set[int] = set()
        self._number = -1
        self._block = memoryview(b"")

    def read(self, start: int, length: int) -> bytearray:
        """Bytes of the file.

        Raises:
            DamagedCheckpointError: It has not that many, or they are not what was written.
        """
        end = start + length
        if start < 0 or length < 0 or end > self.size:
            place = self._files.place / self._name
            raise DamagedCheckpointError(f"{place} ends before byte {end}, which its metadata refers to")
        data = bytearray(length)
        for number in range(start // BLOCK, -(-end // BLOCK)):
            block, offset = self._load(number), number * BLOCK
            first, last = max(start, offset), min(end, offset + BLOCK)
            data[first - start : last - start] = block[first - offset : last - offset]
        return data

    def finish(self) -> None:
        """Verify what nobody asked for.

        Raises:
            DamagedCheckpointError: It is not what was written.
        """
        for number, (start, stop, expected) in enumerate(self._digests):
            if number in self._verified:
                continue
            digest = xxhash.xxh3_64()
            for offset in range(start, stop, BLOCK):
                digest.update(self._fetch(offset, min(BLOCK, stop - offset)))
            self._compare(number, digest.hexdigest(), expected)

    def _load(self, number: int) -> memoryview:
        if number != self._number:
            start = number * BLOCK
            self._block, self._number = self._fetch(start, min(BLOCK, self.size - start)), number
            if number < len(self._digests) and self._digests[number][1] - start == len(self._block):
                self._compare(number, xxhash.xxh3_64(self._block).hexdigest(), self._digests[number][2])
        return self._block

    def _fetch(self, start: int, length: int) -> memoryview:
        data = memoryview(bytearray(length))
        source = self._files.open(self._name)
        try:
            source.read(start, [data])
        finally:
            source.close()
        return data

    def _compare(self, number: int, found: str, expected: str) -> None:
        if found != expected:
            raise altered(self._files.place / self._name)
        self._verified.add(number)
