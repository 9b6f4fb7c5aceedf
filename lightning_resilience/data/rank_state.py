"""What each rank adds to a checkpoint so that the run can go on exactly, and what becomes of it on a resume.

The rest of the position (epoch, batch, optimizer steps) is the same on all ranks and part of every Lightning
checkpoint.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from typing_extensions import NotRequired

from lightning_resilience.data.dealing import Dealing
from lightning_resilience.data.epoch_metrics import EpochMetrics
from lightning_resilience.data.rng import RngState

log = logging.getLogger(__name__)


class EpochStart(TypedDict):
    """Random state around the start of an epoch's data, from which its order of samples follows.

    ``opened`` is from just before the loaders' iterators were made (worker seeds, and the order if there are
    workers); ``first_fetch`` from just before the first batch was fetched (the order if there are none).
    """

    epoch: int
    opened: RngState
    first_fetch: RngState | None


class RankState(TypedDict):
    """State of one rank at a save. All but ``loaders`` can be read by ``torch.load(weights_only=True)``."""

    rank: int
    world_size: int
    rng: RngState
    epoch_start: EpochStart | None
    loaders: list[Any]
    metrics: dict[str, torch.Tensor]
    epoch_metrics: EpochMetrics
    dealing: NotRequired[Dealing | None]


@dataclass(frozen=True)
class Restorable:
    """What of a :class:`RankState` holds for the present run."""

    rng: RngState | None = None
    epoch_start: EpochStart | None = None
    loaders: list[Any] = field(default_factory=list)
    metrics: dict[str, torch.Tensor] | None = None
    epoch_metrics: EpochMetrics | None = None


def restorable(state: RankState | None, world_size: int, common_loader_states: list[Any]) -> Restorable:
    """Decide what can be restored, and say what cannot.

    Args:
        state: this rank's state from the checkpoint, if it has one.
        world_size: the present number of ranks.
        common_loader_states: the loader states that Lightning stored once for all ranks (those of rank 0).
    """
    if state is None:
        log.info("The checkpoint holds no state per rank: random number generators were not restored.")
        return Restorable(loaders=common_loader_states)
    if state["world_size"] > world_size:
        log.warning(
            "The checkpoint was written by %d ranks and is resumed by %d: each goes on with the random numbers of the"
            " rank of its number, and metrics of this epoch are of what comes now.",
            state["world_size"],
            world_size,
        )
        return Restorable(state["rng"], state["epoch_start"], common_loader_states, state["metrics"])
    if state["world_size"] < world_size:
        log.warning(
            "The checkpoint was written by %d ranks and is resumed by %d: random number generators were not restored.",
            state["world_size"],
            world_size,
        )
        return Restorable(loaders=common_loader_states, metrics=state["metrics"])
    return Restorable(state["rng"], state["epoch_start"], state["loaders"], state["metrics"], state["epoch_metrics"])
