"""Putting the resumable loop into a trainer, and reaching it there: all that an adapter needs to know."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_resilience._lightning import FitLoop, TrainingEpochLoop
from lightning_resilience.data.epoch_loop import BatchListener, ResumableEpochLoop
from lightning_resilience.data.fit_loop import ResumableFitLoop
from lightning_resilience.errors import ConfigurationError


def install(trainer: Trainer) -> None:
    """Replace ``trainer.fit_loop`` by one that resumes exactly. Does nothing if that was done before.

    Call it before the loop sets up its data; ``Strategy.setup_environment`` is such a place.

    Raises:
        ConfigurationError: the trainer's loop is neither Lightning's own nor ours.
    """
    old = trainer.fit_loop
    if isinstance(old, ResumableFitLoop):
        return
    if type(old) is not FitLoop or type(old.epoch_loop) is not TrainingEpochLoop:
        raise ConfigurationError(
            f"The trainer has a fit loop of type {type(old).__name__} with an epoch loop of type"
            f" {type(old.epoch_loop).__name__}. Exact resume needs Lightning's own loops; remove custom ones."
        )
    loop = ResumableFitLoop(trainer, old.min_epochs, old.max_epochs)
    epoch_loop = ResumableEpochLoop(trainer, old.min_steps, old.max_steps)
    epoch_loop.__dict__.update(vars(old.epoch_loop))
    loop.__dict__.update(vars(old))
    loop.epoch_loop = epoch_loop
    trainer.fit_loop = loop


def installed_loop(trainer: Trainer) -> ResumableFitLoop:
    """The loop that :func:`install` gave to ``trainer``."""
    if not isinstance(trainer.fit_loop, ResumableFitLoop):
        raise ConfigurationError(
            "The trainer's fit loop cannot resume exactly. Call lightning_resilience.data.install(trainer) before."
        )
    return trainer.fit_loop


def capture_rank_state(trainer: Trainer) -> dict[str, Any]:
    """This rank's part of a checkpoint. Call on every rank at every save; it does not communicate.

    Raises:
        ConfigurationError: :func:`install` was not called.
    """
    return dict(installed_loop(trainer).capture_rank_state())


def stash_rank_state(trainer: Trainer, state: dict[str, Any] | None) -> None:
    """Keep this rank's part of a checkpoint until the fit loop runs. Call whenever a checkpoint is loaded.

    Args:
        trainer: the trainer that loads the checkpoint.
        state: a value from :func:`capture_rank_state`, or None if the checkpoint has none.
    """
    installed_loop(trainer).stash_rank_state(state)


def listen(trainer: Trainer, listener: BatchListener | None) -> None:
    """Tell ``listener`` of every batch from now on; None ends it. :func:`install` was called before."""
    installed_loop(trainer).epoch_loop.listener = listener


def mark_not_validated(checkpoint: dict[str, Any]) -> None:
    """Say in a checkpoint that was made when a batch had ended that its validation, if one is due, is still to come.

    Lightning's counters cannot tell: those of an earlier validation that ended stay as they are.
    """
    checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["is_last_batch"] = False
