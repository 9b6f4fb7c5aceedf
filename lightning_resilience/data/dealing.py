"""Which rank gets which samples of an epoch, when the number of ranks changes in the middle of it.

A ``DistributedSampler`` deals the samples of an epoch like cards: so what all ranks together have trained is the
beginning of one order, which does not depend on the number of ranks, and the rest can be dealt to any number.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict, TypeVar

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_resilience.data.position import skips_without_loading

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Dealing(TypedDict):
    """In this epoch, from this batch of each rank on, what comes after the first so many samples is dealt."""

    epoch: int
    batches: int
    samples: int


def samples_done(dealing: Dealing | None, epoch: int, batches: int, batch_size: int, ranks: int) -> int:
    """How many samples of an epoch all ranks together have trained.

    Args:
        dealing: The last one, if there was one.
        epoch: Index of the epoch.
        batches: That each rank has done in it.
        batch_size: Samples in a batch.
        ranks: That have done them, since the last dealing.
    """
    if dealing is None or dealing["epoch"] != epoch:
        dealing = {"epoch": epoch, "batches": 0, "samples": 0}
    return dealing["samples"] + (batches - dealing["batches"]) * batch_size * ranks


def deal(order: Sequence[_T], done: int, ranks: int, rank: int, *, drop_last: bool) -> list[_T]:
    """What this rank gets of the rest; as many for each, filled up from the beginning unless the last are dropped."""
    rest = list(order[done:])
    if not drop_last and rest:
        missing = -len(rest) % ranks
        rest += (list(order) * (missing // len(order) + 1))[:missing]
    return rest[: len(rest) // ranks * ranks][rank::ranks]


class Rest:
    """Deals what is left of the epoch that a sampler is set to, to the ranks that it deals to.

    Args:
        sampler: Of the loader.
        done: Samples that are done.
    """

    def __init__(self, sampler: DistributedSampler[Any], done: int) -> None:
        self._sampler = sampler
        self._done = done

    def __len__(self) -> int:
        sampler = self._sampler
        numbers = range(_length(sampler))
        return len(deal(numbers, self._done, sampler.num_replicas, sampler.rank, drop_last=sampler.drop_last))

    def __iter__(self) -> Iterator[Any]:
        sampler = self._sampler
        whole = copy.copy(sampler)
        whole.num_replicas, whole.rank = 1, 0
        whole.num_samples = whole.total_size = _length(sampler)
        dealt = deal(list(whole), self._done, sampler.num_replicas, sampler.rank, drop_last=sampler.drop_last)
        return iter(dealt)


def rest_of(loader: Any, done: int) -> Rest | BatchSampler | None:
    """What takes the place of a loader's sampler, or batch sampler, for the rest of an epoch.

    None if it cannot be known what its samplers do: only plain ``DistributedSampler`` and ``BatchSampler`` are.
    """
    sampler = distributed_sampler(loader)
    if type(sampler) is not DistributedSampler or not skips_without_loading(loader):
        return None
    assert isinstance(loader, DataLoader)
    batches = loader.batch_sampler
    if batches is None:
        return Rest(sampler, done)
    if type(batches) is not BatchSampler:
        return None
    return BatchSampler(Rest(sampler, done), batches.batch_size, batches.drop_last)


def batch_size_of(loader: DataLoader[Any]) -> int:
    """Samples that a batch takes of the sampler."""
    batches: Any = loader.batch_sampler
    return 1 if batches is None else int(batches.batch_size)


def distributed_sampler(loader: Any) -> DistributedSampler[Any] | None:
    """The sampler that deals the samples of a loader to the ranks; None if something else does."""
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return next((item for item in (inner, sampler) if isinstance(item, DistributedSampler)), None)


def log_dealing(loader: Any, ranks: int, before: int) -> None:
    """Say which samples will be missing, where the loader does not say that it deals for `ranks`."""
    sampler = distributed_sampler(loader)
    if (ranks if sampler is None else sampler.num_replicas) != ranks or (sampler is None and before > 1):
        log.warning(
            "%s does not deal its samples by a DistributedSampler of %d ranks: if it deals them for %d, those of the"
            " ranks that are gone are not seen any more. Leave the dealing to Lightning, or deal by"
            " trainer.world_size in train_dataloader().",
            type(loader).__name__,
            ranks,
            before,
        )


def _length(sampler: DistributedSampler[Any]) -> int:
    dataset: Any = sampler.dataset
    return len(dataset)
