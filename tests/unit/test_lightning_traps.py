"""Traps of Lightning 2.6 that the plugin is built around: first that ours avoids it, then that Lightning falls in.

Those that need ranks are in `tests/integration/test_torch_traps.py`.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io.async_plugin import AsyncCheckpointIO as LightningsAsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_resilience import AsyncCheckpointIO


def lightning_falls_in(trap: bool, what: str) -> None:
    """The end of a test: Lightning by itself goes wrong; a version other than 2.6 may have mended it."""
    if not trap and not lightning.__version__.startswith("2.6."):
        pytest.skip(f"lightning {lightning.__version__} has mended it: {what}")
    assert trap, what


def test_a_strategy_puts_its_own_plugin_into_a_wrapping_one() -> None:
    """Only into an empty one in Lightning 2.6, at each access; what a user has put there stays."""
    assert not issubclass(AsyncCheckpointIO, _WrappingCheckpointIO)
    plugin = AsyncCheckpointIO()
    assert SingleDeviceStrategy("cpu", checkpoint_io=plugin).checkpoint_io is plugin

    found = SingleDeviceStrategy("cpu", checkpoint_io=LightningsAsyncCheckpointIO()).checkpoint_io
    assert isinstance(found, LightningsAsyncCheckpointIO)
    lightning_falls_in(type(found.checkpoint_io) is TorchCheckpointIO, "a look at the plugin has changed it")


class Watches(Callback):
    """Looks, at the start of each batch, whether what `ModelCheckpoint` names is there; then storage gets on."""

    def __init__(self, storage: threading.Event) -> None:
        self.storage = storage
        self.named: list[tuple[str, bool]] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        callback = trainer.checkpoint_callback
        assert isinstance(callback, ModelCheckpoint)
        if callback.best_model_path:
            self.named.append((callback.best_model_path, os.path.exists(callback.best_model_path)))
            self.storage.set()


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_model_checkpoint_names_what_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That ours does not, at any moment: `test_while_storage_hangs_nothing_is_named_that_is_not_there`.

    All are kept: to delete one while the thread still writes it would be another trap, and a race.
    """
    storage, write = threading.Event(), TorchCheckpointIO.save_checkpoint

    def slow(*arguments: Any, **options: Any) -> None:
        storage.wait(30)
        write(*arguments, **options)

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", slow)
    watches = Watches(storage)
    Trainer(
        accelerator="cpu",
        plugins=[LightningsAsyncCheckpointIO()],
        callbacks=[
            ModelCheckpoint(tmp_path, every_n_train_steps=1, monitor="step", mode="max", save_top_k=-1),
            watches,
        ],
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(BoringModel())
    lightning_falls_in(not watches.named[0][1], "the best checkpoint does not exist")


def test_two_classes_of_one_name_are_told_apart() -> None:
    assert LightningsAsyncCheckpointIO.__name__ == AsyncCheckpointIO.__name__
    told = (AsyncCheckpointIO.__doc__ or "").split("\n\n")[:2]
    assert any("Unlike Lightning's class of the same name" in part for part in told)
