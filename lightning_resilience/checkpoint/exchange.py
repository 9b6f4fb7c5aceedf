"""How ranks tell each other a few bytes: the only collective the checkpoint engine knows."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

_INLINE = 2040  # a message up to this many bytes needs one collective, a longer one needs two
_HEADER = 8


class Exchange(Protocol):
    """Every rank gives bytes and gets everybody's. Called by the training thread of all ranks, in the same order.

    What arrives is JSON or opaque to the receiver; nothing is unpickled.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def all_gather(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, by rank. Raises ``RuntimeError`` when a rank does not come within the timeout."""
        ...


class Alone:
    """The exchange of a single process."""

    rank = 0
    world_size = 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """What was given."""
        return [data]


class GroupExchange:
    """Over a process group on the CPU of its own, so that training's collectives and ours never mix.

    Args:
        group: A gloo group of all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def all_gather(self, data: bytes) -> list[bytes]:
        """See :class:`Exchange`."""
        header = len(data).to_bytes(_HEADER, "little")
        rows = self._gather(header + data[:_INLINE], _HEADER + _INLINE)
        lengths = [int.from_bytes(row[:_HEADER], "little") for row in rows]
        if max(lengths) > _INLINE:
            rows = [bytes(_HEADER) + row for row in self._gather(data, max(lengths))]
        return [row[_HEADER : _HEADER + length] for row, length in zip(rows, lengths, strict=True)]

    def _gather(self, data: bytes, width: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        rows = [torch.empty(width, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(rows, mine, group=self._group)
        return [row.numpy().tobytes() for row in rows]
