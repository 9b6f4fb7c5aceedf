"""The checksum of a file, piece by piece, so that whoever reads a part of it can verify that part.

Used by the writer process while it writes and by every rank while it loads.
"""

from __future__ import annotations

import re
from typing import Protocol

import xxhash

BLOCK = 8 << 20
"""Bytes of a file that have a digest of their own. A terabyte has two megabytes of digests."""

_WIDTH = 16
_FORM = re.compile(rf"(?:[0-9a-f]{{{_WIDTH}}})+")


class Digest(Protocol):
    """What grows with the bytes of a file, in their order."""

    def update(self, data: memoryview, /) -> None:
        """Take the bytes that come next."""
        ...

    def hexdigest(self) -> str:
        """Of all bytes so far."""
        ...


def new_digest(held_back: int) -> Digest:
    """For a file to be written: block by block, or one of all bytes where it goes into the file's own end."""
    return xxhash.xxh3_64() if held_back else BlockDigest()


class BlockDigest:
    """The xxh3-64 digests (hex) of each :data:`BLOCK` of a file, one after another; used like ``xxhash.xxh3_64``.

    A file of at most one block has one digest, that of all its bytes.
    """

    def __init__(self) -> None:
        self._done: list[str] = []
        self._block = xxhash.xxh3_64()
        self._room = BLOCK

    def update(self, data: memoryview, /) -> None:
        """Take the bytes that come next in the file."""
        rest = data
        while len(rest) > 0:
            if self._room == 0:
                self._next_block()
            piece, rest = rest[: self._room], rest[self._room :]
            self._block.update(piece)
            self._room -= len(piece)

    def hexdigest(self) -> str:
        """Of all bytes so far."""
        return "".join(self._done) + self._block.hexdigest()

    def _next_block(self) -> None:
        self._done.append(self._block.hexdigest())
        self._block.reset()
        self._room = BLOCK


def pieces(size: int, digest: str) -> list[tuple[int, int, str]]:
    """The parts of a file that can be verified alone: where each starts and ends, and its digest.

    Args:
        size: Of the file in bytes.
        digest: What :class:`BlockDigest` said of it; or one digest of all of it, as in manifests of format 1.

    Raises:
        ValueError: The digest cannot be of a file of this size.
    """
    blocks = max(1, -(-size // BLOCK))
    if _FORM.fullmatch(digest) is None or len(digest) not in (_WIDTH, _WIDTH * blocks):
        raise ValueError(f"{digest[:40]!r} is no digest of {size} bytes")
    if len(digest) == _WIDTH:
        return [(0, size, digest)]
    starts = range(0, size, BLOCK)
    return [(start, min(start + BLOCK, size), digest[i * _WIDTH : (i + 1) * _WIDTH]) for i, start in enumerate(starts)]
