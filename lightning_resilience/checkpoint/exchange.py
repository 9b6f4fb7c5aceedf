"""How ranks tell each other a few bytes: the only collective the checkpoint engine knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from lightning_resilience import errors
from lightning_resilience.errors import CheckpointError

_INLINE = 2040  # a message up to this many bytes needs one collective, a longer one needs two
_HEADER = 8
_T = TypeVar("_T")


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
        self.group = group
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
        dist.all_gather(rows, mine, group=self.group)
        return [row.numpy().tobytes() for row in rows]


def gather_json(exchange: Exchange, value: Any) -> list[Any]:
    """Everybody's value, by rank; a collective. JSON has to have words for it: tuples arrive as lists."""
    return [json.loads(answer) for answer in exchange.all_gather(json.dumps(value).encode())]


def together(exchange: Exchange, act: Callable[[], _T], error_type: type[CheckpointError]) -> _T:
    """An error of one rank becomes an error of all, instead of a hang in the next collective.

    Args:
        exchange: How the ranks agree.
        act: What each rank does; without a collective.
        error_type: What the ranks raise to which nothing has happened, or the kind of it that happened elsewhere.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = act()
    except Exception as caught:  # travels to all ranks and is raised on each
        error = caught
    try:
        answers = exchange.all_gather(b"" if error is None else json.dumps([type(error).__name__, str(error)]).encode())
        if error is not None:
            raise error
    finally:
        del error  # it holds this call, and with it everything that it was about
    for rank, answer in enumerate(answers):
        if answer:
            name, text = json.loads(answer)
            raise _error_of(rank, name, text, error_type)
    done: _T = result
    return done


def _error_of(rank: int, name: str, text: str, error_type: type[CheckpointError]) -> CheckpointError:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, error_type):
        return kind(text)
    return error_type(f"rank {rank}: {text or name}")
