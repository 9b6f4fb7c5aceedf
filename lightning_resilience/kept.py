"""What retention must know of the trainer: in which directory it may delete, and what `ModelCheckpoint` wants kept."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


@dataclass(frozen=True)
class Scope:
    """Where retention looks after one save.

    Attributes:
        directory: The `dirpath` of the callback that the save belongs to.
        spared: Best, last and the k best ones, of any callback.
        resumed_from: What `fit` went on from; empty for none.
    """

    directory: str
    spared: tuple[str, ...]
    resumed_from: str


def scope_of(trainer: Trainer | None, path: str) -> Scope | None:
    """The scope for a checkpoint that was saved just now; None where it was not one of a `ModelCheckpoint`.

    What a user saves somewhere by `trainer.save_checkpoint` never makes other files there disappear.
    """
    callbacks = [item for item in trainer.checkpoint_callbacks if isinstance(item, ModelCheckpoint)] if trainer else []
    home = next((str(item.dirpath) for item in callbacks if item.dirpath and _is_below(path, str(item.dirpath))), None)
    if trainer is None or home is None:
        return None
    spared = sorted({name for item in callbacks for name in _wanted(item) if name})
    return Scope(home, tuple(spared), os.fspath(trainer.ckpt_path or ""))


def _wanted(callback: ModelCheckpoint) -> list[str]:
    """With `save_top_k=-1` every one is among the k best, so there the policies decide on all but the best."""
    best = list(callback.best_k_models) if callback.save_top_k > 0 else []
    return [callback.best_model_path, callback.last_model_path, *best]


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")
