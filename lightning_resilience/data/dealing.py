"""Which rank gets which samples of an epoch, when the number of ranks changes."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import DistributedSampler

log = logging.getLogger(__name__)


def distributed_sampler(loader: Any) -> DistributedSampler[Any] | None:
    """The sampler that deals the samples of a loader to the ranks; None if something else does."""
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return next((item for item in (sampler, inner) if isinstance(item, DistributedSampler)), None)


def log_dealing(loader: Any, ranks: int, before: int) -> None:
    """Say which samples will be missing, where the loader does not say that it deals for `ranks`."""
    sampler = distributed_sampler(loader)
    if ranks > 1 and (sampler is None or sampler.num_replicas != ranks):
        log.warning(
            "%s does not deal its samples by a DistributedSampler of %d ranks: if it deals them for %d, those of the"
            " ranks that are gone are not seen any more. Leave the dealing to Lightning, or deal by"
            " trainer.world_size in train_dataloader().",
            type(loader).__name__,
            ranks,
            before,
        )
