"""Come back to a position in a data loader.

Three kinds of loader, from best to worst:

1. it has ``state_dict`` and ``load_state_dict``: it is used as it is;
2. a ``DataLoader`` over a map-style dataset: its sampler skips, nothing is loaded;
3. anything else: batches are drawn and dropped, which costs the time to load them; a warning says so.

Nothing here knows about Lightning, and no loader is changed for longer than one call of ``iter``.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset


class SkippingIterator(Iterator[Any]):
    """Drops the first batches of an iterator: at the first ``next``, or earlier when told to."""

    def __init__(self, iterator: Iterator[Any], count: int) -> None:
        self._iterator = iterator
        self._count = count

    def skip(self) -> None:
        """Drop what is still to be dropped, now."""
        count, self._count = self._count, 0
        deque(itertools.islice(self._iterator, count), maxlen=0)

    def __next__(self) -> Any:
        self.skip()
        return next(self._iterator)


class _SkippingSampler:
    """Stands in for a (batch) sampler while a ``DataLoader`` makes its iterator, and skips only then.

    An iterator with persistent workers keeps its sampler for all epochs, so later passes must be complete.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.first: Any = None
        self.count = 0
        self.latest: SkippingIterator | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        source = self._sampler if self.first is None else self.first
        self.latest = SkippingIterator(iter(source), self.count)
        return self.latest


class ResumedLoader:
    """A data loader whose next pass starts after ``count`` batches; it stands in for it during that pass.

    Its length stays the full length, because an epoch keeps its number of batches.

    Args:
        loader: any iterable of batches.
        count: batches that were already consumed.
        state: what ``loader.state_dict()`` gave after ``count`` batches, if it has one.
        instead: what takes the place of its sampler (of its batch sampler, if it has one) in that pass.
    """

    def __init__(self, loader: Any, count: int, state: Any = None, instead: Any = None) -> None:
        self.loader = loader
        self._count = count
        self._sampler = _SkippingSampler(_sampler_of(loader)) if skips_without_loading(loader) else None
        self._drawn: SkippingIterator | None = None
        self._instead = instead
        if state is not None:
            loader.load_state_dict(state)
            self._count = 0

    def __len__(self) -> int:
        return len(self.loader)

    def keep_workers_alive(self) -> None:
        """Start persistent workers without giving them work, as if an earlier epoch had started them.

        A first pass draws a seed for its workers, later passes with the same workers do not; a resumed epoch
        must draw what the same epoch drew in the run before.
        """
        if self._sampler is not None and _has_persistent_workers(self.loader):
            self._iterate(len(self._sampler))

    def __iter__(self) -> Iterator[Any]:
        count, self._count = self._count, 0
        if self._sampler is not None:
            self._sampler.first, self._instead = self._instead, None
            return self._iterate(count)
        if count == 0:
            return iter(self.loader)
        _warn_about_cost(self.loader, count)
        self._drawn = SkippingIterator(iter(self.loader), count)
        return self._drawn

    def skip(self) -> None:
        """Go to the position now rather than at the first ``next``."""
        for iterator in (self._drawn, self._sampler.latest if self._sampler else None):
            if iterator is not None:
                iterator.skip()

    def _iterate(self, count: int) -> Iterator[Any]:
        assert self._sampler is not None
        self._sampler.count = count  # for the whole construction: with workers it iterates the sampler twice
        with _sampler_replaced(self.loader, self._sampler):
            iterator: Iterator[Any] = iter(self.loader)
        self._sampler.count, self._sampler.first = 0, None
        return iterator


def begin_next_epoch(loader: Any, state: Any, *, exhausted: bool) -> None:
    """Bring a stateful loader to the end of the epoch in which ``state`` was taken; its next pass is a new one.

    Loading a state makes the next pass continue from it, so that pass is begun here and given up. A loader
    that answers an exhausted state with the batches of the next epoch gets its state once more instead.
    """
    nothing = object()
    loader.load_state_dict(state)
    drawn = next(iter(loader), nothing)
    if exhausted and drawn is not nothing:
        loader.load_state_dict(state)


def is_stateful(loader: Any) -> bool:
    """Whether a loader can say where it is and be put there."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def skips_without_loading(loader: Any) -> bool:
    """Whether the sampler alone decides what the loader yields, so that skipping there is enough."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and not is_stateful(loader)
    )


def generators_of(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The generators that loaders and their samplers were given, each once, in a stable order."""
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        batch_sampler = getattr(loader, "batch_sampler", None)
        samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        for owner in (loader, *samplers):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found.setdefault(id(generator), generator)
    return list(found.values())


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return getattr(loader, _sampler_name(loader))


def _sampler_name(loader: DataLoader[Any]) -> str:
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def _has_persistent_workers(loader: DataLoader[Any]) -> bool:
    return loader.persistent_workers and loader.num_workers > 0


@contextmanager
def _sampler_replaced(loader: DataLoader[Any], sampler: _SkippingSampler) -> Iterator[None]:
    """A ``DataLoader`` hands its sampler to its iterator when that is made; it is replaced for that moment.

    ``object.__setattr__`` because a ``DataLoader`` refuses to change its sampler after its construction.
    """
    name = _sampler_name(loader)
    original = getattr(loader, name)
    object.__setattr__(loader, name, sampler)
    try:
        yield
    finally:
        object.__setattr__(loader, name, original)


def _warn_about_cost(loader: Any, count: int) -> None:
    warnings.warn(
        f"Resuming: {count} batches of {type(loader).__name__} are loaded again and dropped, because it has"
        " no state_dict()/load_state_dict() and no sampler that could skip. This takes as long as loading them"
        " took the first time. A loader with these two methods, or a map-style dataset, resumes at once.",
        stacklevel=2,
    )
