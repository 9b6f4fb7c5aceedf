"""Runs on each rank: `fit`s in which ranks raise while callbacks want to save because of it.

exceptional FOLDER
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AsyncCheckpointIO, ResilientFSDPStrategy, checkpoint_io


class Net(L.LightningModule):
    """Raises on some ranks at step 3.

    Args:
        ranks: On which.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)
        self.ranks = ranks

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step == 3 and self.trainer.global_rank in self.ranks:
            raise ValueError("the user's own")
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Catches(L.Callback):
    """Somebody's own way to save: it knows nothing of ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(trainer.strategy, ResilientFSDPStrategy):  # with DDP nothing of ours is asked
            trainer.save_checkpoint(self.path)


def run(folder: Path, strategy: Strategy, ranks: tuple[int, ...]) -> None:
    callbacks: list[Any] = [
        OnExceptionCheckpoint(folder / "on_exception"),
        Catches(folder / "own.ckpt"),
        ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_on_exception=True, save_last="link"),
    ]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        plugins=[AsyncCheckpointIO()],
        callbacks=callbacks,
        max_steps=6,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Net(ranks), DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=2))
    except ValueError as error:
        print(f"{folder.name}: {error}")


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    checkpoint_io._ROLL_CALL_S = 2.0
    folder, kind, who = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    strategy: Strategy = DDPStrategy(process_group_backend="gloo")
    if kind == "sharded":
        strategy = ResilientFSDPStrategy(restart=None)
    elif kind == "full":
        strategy = ResilientFSDPStrategy(restart=None, state_dict_type="full")
    run(folder, strategy, (0, 1) if who == "all" else (1,))
    if dist.is_initialized():
        dist.destroy_process_group()
