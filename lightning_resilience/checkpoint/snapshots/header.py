"""The header of a slot, as bytes: what it says, and the seal over the tensors behind it. Needs no torch.

The rank writes the header, and voids it before it changes a byte of the slot. Its writer process reads the tensors when
a snapshot is complete and puts their digest into the seal, which names the header it belongs to: a seal of an earlier
snapshot, or one that came too late, is none.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import xxhash

from lightning_resilience.checkpoint.digest import BLOCK

SLOTS = 2
SIZE = 2 * mmap.PAGESIZE
_MAGIC = int.from_bytes(b"LRsnap\x00\x02", "little")  # the last byte is the version of the format
_ALL_BUT_VERSION = (1 << 56) - 1
_WORDS = 32  # bytes: magic, start, length and digest of the body
_SEAL = 16  # bytes at the end: digest of the body that it belongs to, digest of the tensors


class Header:
    """One header. Several processes may look at it at a time; only the owner of the file writes, but for the seal.

    Args:
        memory: Its bytes.
    """

    def __init__(self, memory: memoryview) -> None:
        self._body = memory[_WORDS : SIZE - _SEAL]
        self._words = memory[:_WORDS].cast("B").cast("Q")
        self._seal = memory[SIZE - _SEAL : SIZE].cast("B").cast("Q")

    @property
    def start(self) -> int:
        """Which start of the run has taken the snapshot, or gone on from it."""
        return self._words[1]

    @start.setter
    def start(self, start: int) -> None:
        self._words[1] = start

    def read(self) -> bytes | None:
        """The body; None while the slot is being filled, or when it cannot be trusted."""
        magic, _, length, digest = self._words
        body = bytes(self._body[:length])
        return body if magic == _MAGIC and xxhash.xxh3_64_intdigest(body) == digest else None

    @property
    def is_damaged(self) -> bool:
        """Whether it is neither void, nor whole, nor of another version: no kill leaves such a thing behind."""
        changed = self._words[0] ^ _MAGIC
        is_other_version = changed != 0 and changed & _ALL_BUT_VERSION == 0
        return self._words[0] != 0 and not is_other_version and self.read() is None

    def void(self) -> None:
        """The slot holds nothing from now on."""
        self._words[0] = 0

    def write(self, body: bytes, start: int) -> None:
        """Everything is there."""
        self._body[: len(body)] = body
        self._words[1], self._words[2], self._words[3] = start, len(body), xxhash.xxh3_64_intdigest(body)
        self._words[0] = _MAGIC  # one store, and the last: a process that is killed before it has left a void slot

    @property
    def sealed(self) -> int | None:
        """Digest that the tensors behind this header have had; None as long as nobody has said."""
        owner, digest = self._seal
        return digest if self.read() is not None and owner == self._words[3] else None

    def seal(self, digest: Callable[[], int | None]) -> bool:
        """Compute the digest of the tensors and write it down, unless the header changes meanwhile.

        Args:
            digest: Computes it; None when it was given up.
        """
        owner = self._words[3]
        if self.read() is None or self.sealed is not None:
            return False
        value = digest()
        if value is None or self.read() is None or self._words[3] != owner:
            return False
        self._seal[1] = value
        self._seal[0] = owner
        return True


def digest_of(tensors: memoryview, threads: int = 1, go_on: Callable[[], bool] = lambda: True) -> int | None:
    """Digest of the tensor part of a slot: xxh3 of the xxh3 digests of its blocks, so that threads can share it.

    Args:
        tensors: Its bytes.
        threads: How many compute.
        go_on: Asked now and then; False gives up, and the result is None.
    """

    def block(start: int) -> bytes:
        return xxhash.xxh3_64_digest(tensors[start : start + BLOCK]) if go_on() else b""

    starts = range(0, len(tensors), BLOCK)
    if threads == 1:  # in a thread that may outlive the interpreter's willingness to start others
        found = [block(start) for start in starts]
    else:
        with ThreadPoolExecutor(threads, "lightning-resilience-digest") as pool:
            found = list(pool.map(block, starts))
    return xxhash.xxh3_64_intdigest(b"".join(found)) if all(found) else None
