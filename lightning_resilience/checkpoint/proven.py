"""Files whose bytes are compared with their checksums while somebody uses them, so that each is read once."""

from __future__ import annotations

import xxhash

from lightning_resilience.checkpoint.digest import BLOCK, pieces
from lightning_resilience.checkpoint.manifest import FileRecord
from lightning_resilience.checkpoint.storage import Place
from lightning_resilience.errors import DamagedCheckpointError


class ProvenFile:
    """Reads parts of a file, block by block, and verifies each block as it comes. Not for several threads at once.

    A file whose record has one digest for all of it is verified by :meth:`finish`.

    Args:
        place: The file.
        record: Its size and digest; None where nothing says so.
    """

    def __init__(self, place: Place, record: FileRecord | None) -> None:
        self._place = place
        self.size = record.size if record else _size_of(place)
        self._digests = pieces(record.size, record.xxh3) if record else []
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
            raise DamagedCheckpointError(f"{self._place} ends before byte {end}, which its metadata refers to")
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
        if self._place.read_into(start, data) != length:
            raise DamagedCheckpointError(f"{self._place} ends before byte {start + length}")
        return data

    def _compare(self, number: int, found: str, expected: str) -> None:
        if found != expected:
            raise DamagedCheckpointError(f"{self._place} does not hold what was written: its checksum differs")
        self._verified.add(number)


def _size_of(place: Place) -> int:
    found = place.stat()
    if found is None:
        raise DamagedCheckpointError(f"{place} is missing")
    return found.size
