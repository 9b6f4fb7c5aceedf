"""What one rank finds while a checkpoint is loaded is true for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lightning_resilience.checkpoint import exchange as exchanges
from lightning_resilience.checkpoint.exchange import Exchange
from lightning_resilience.errors import DamagedCheckpointError, LoadError

_T = TypeVar("_T")


def together(exchange: Exchange, act: Callable[[], _T]) -> _T:
    """Do something on every rank, without a collective; an error of one is an error of all.

    Raises:
        LoadError: Of the kind that the first rank with an error has. A file that cannot be read counts as damaged.
    """
    return exchanges.together(exchange, lambda: _reading(act), LoadError)


def _reading(act: Callable[[], _T]) -> _T:
    try:
        return act()
    except OSError as error:
        raise DamagedCheckpointError(str(error)) from error
