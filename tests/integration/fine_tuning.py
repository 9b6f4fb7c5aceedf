"""Trainings whose optimizer gets more parameters on the way, and what they leave; run on two ranks by a test."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AsyncCheckpointIO, ResilientFSDPStrategy, load_weights, newest_checkpoint
from lightning_resilience.errors import MismatchedCheckpointError

EPOCHS, UNFREEZE_AT = 4, 1


class Net(pl.LightningModule):
    """A backbone that is frozen at first, and a head."""

    def __init__(self, optimizer: str = "adamw", start: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 1)
        self.losses: list[str] = []
        self._kind, self._start = optimizer, start

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.head(self.backbone(batch[0])).pow(2).mean()
        self.losses.append(float(loss).hex())
        return loss

    def configure_optimizers(self) -> Any:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        return kinds[self._kind](trainable, lr=0.01)

    def on_fit_start(self) -> None:
        if self._start:
            load_weights(self, self._start)


class Unfreeze(BaseFinetuning):
    """Adds the backbone to the optimizer at the start of an epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == UNFREEZE_AT:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.005)


def fit(folder: Path, model: Net, *callbacks: pl.Callback, resume: str | None = None, **kwargs: Any) -> dict[str, Any]:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ResilientFSDPStrategy(auto_wrap_policy=None, restart=None),
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": EPOCHS, "plugins": [AsyncCheckpointIO()], "enable_checkpointing": bool(callbacks), **kwargs},
    )
    data = torch.arange(8 * 8, dtype=torch.float32).reshape(8, 8) / 64
    error = ""
    try:
        trainer.fit(model, DataLoader(TensorDataset(data), batch_size=2, shuffle=False), ckpt_path=resume)
    except MismatchedCheckpointError as caught:
        error = str(caught)
    weights = {} if error else {name: value.full_tensor() for name, value in model.state_dict().items()}
    return {
        "losses": model.losses,
        "weights": {name: value.flatten().tolist() for name, value in weights.items()},
        "error": error,
        "loaded": str(trainer.ckpt_path),
    }


class Fault(Exception):
    """Ends a training."""


class Crash(pl.Callback):
    """After the first step of the last epoch, which only a snapshot has."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if trainer.current_epoch == EPOCHS - 1 and index == 1:
            raise Fault


def from_memory(folder: Path) -> dict[str, Any]:
    """A training that ends and goes on from its snapshot."""
    snapshots = AsyncCheckpointIO(snapshot_every_n_steps=1)
    newest_checkpoint(folder)
    with contextlib.suppress(Fault):
        fit(folder, Net(), saver(folder), Unfreeze(), Crash(), plugins=[snapshots])
    newest = newest_checkpoint(folder, wait_s=0.0)
    return fit(folder, Net(), saver(folder), Unfreeze(), resume=newest, plugins=[snapshots])


def saver(folder: Path, **kwargs: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1, **kwargs)


def main() -> None:
    """All runs, one after the other."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {"whole": fit(folder, Net(), saver(folder / "whole"), Unfreeze())}
    for epoch in (0, 2):
        path = str(folder / "whole" / f"epoch={epoch}.ckpt")
        found[f"resumed {epoch}"] = fit(folder, Net(), saver(folder / f"again{epoch}"), Unfreeze(), resume=path)
    found["resumed from memory"] = from_memory(folder / "memory")
    plain, weights = folder / "plain", saver(folder / "plain", save_weights_only=True)
    found["full"] = fit(folder, Net(), saver(plain), max_epochs=2)
    weights.filename = "weights-{epoch}"
    found["weights only"] = fit(folder, Net(), weights, max_epochs=3)
    newest = newest_checkpoint(plain)
    assert newest is not None
    found["newest"] = newest
    found["passed over"] = fit(folder, Net(), resume=newest, max_epochs=3)
    found["other kind"] = fit(folder, Net("sgd"), resume=str(plain / "epoch=1.ckpt"), max_epochs=3)
    found["started"] = fit(folder, Net(start=newest), max_steps=0, max_epochs=None)
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))
