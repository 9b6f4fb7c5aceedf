"""Runs on each rank: a `fit` in which some saves fail, and what every rank believes afterwards.

books FOLDER STRATEGY LIMIT ON_BUSY

With `on_busy="skip"` the writers stand still for three saves, and storage is behind.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AsyncCheckpointIO, ResilientFSDPStrategy
from lightning_resilience.errors import SaveError

SCORES = [0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("score", SCORES[self.global_step])
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Behind(L.Callback):
    """Stops the writers after the first save, and lets them go on later. Only rank 0 has one with DDP."""

    def __init__(self, plugin: AsyncCheckpointIO) -> None:
        self._plugin = plugin

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        signals = {1: signal.SIGSTOP, 6: signal.SIGCONT}  # three are saved in between, whatever was saved before
        engine = self._plugin._engine
        if trainer.global_step in signals and engine is not None:
            os.kill(engine.writer_pid, signals[trainer.global_step])
        if trainer.global_step > 6:  # the last ones find room
            self._plugin.wait()


def main() -> None:
    torch.set_num_threads(1)
    folder, kind, limit, on_busy = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    ours: Any = ResilientFSDPStrategy(restart=None)
    callback = ModelCheckpoint(
        folder, monitor="score", save_top_k=2, every_n_train_steps=1, filename="{step}/model", save_last="link"
    )
    plugin = AsyncCheckpointIO(on_busy=on_busy, max_consecutive_failures=limit or None)  # type: ignore[arg-type]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ours if kind == "sharded" else DDPStrategy(process_group_backend="gloo"),
        plugins=[plugin],
        callbacks=[callback, *([Behind(plugin)] if on_busy == "skip" else [])],
        max_steps=8,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    error = ""
    try:
        trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=2))
    except SaveError as caught:
        error = str(caught)
    names = sorted(os.path.relpath(path, folder) for path in callback.best_k_models)
    best = callback.best_model_path and os.path.relpath(callback.best_model_path, folder)
    found = {"names": names, "best": best, "error": error, "outcomes": [report.outcome for report in plugin.history]}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()
