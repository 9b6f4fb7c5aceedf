"""Runs on each rank: a fit in which ranks are killed, and what each rank that is left trains on and ends with."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from lightning_resilience import AsyncCheckpointIO, ResilientFSDPStrategy, RestartPolicy
from lightning_resilience.restart.engine import Patience

BATCH = 2


@dataclass(frozen=True)
class Run:
    """One fit, as a test orders it.

    Attributes:
        folder: For checkpoints and results.
        deaths: Ranks to kill, by the step before which they die.
        samples: In the data set.
        resume: A checkpoint to begin with.
        strategy: Arguments of the strategy.
        policy: Arguments of the policy.
        trainer: Arguments of the trainer.
        plugin: Arguments of the checkpoint plugin.
    """

    folder: str
    deaths: dict[str, list[int]] = field(default_factory=dict)
    samples: int = 48
    resume: str = ""
    strategy: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    plugin: dict[str, Any] = field(default_factory=dict)


class Numbered(Dataset[tuple[int, Tensor]]):
    """Samples that tell which they are."""

    def __init__(self, samples: int) -> None:
        self._rows = torch.randn(samples, 6, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self._rows[index]


class Net(L.LightningModule):
    """Random numbers, buffers, a parameter that is not sharded, odd sizes, tied weights, a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Dropout(0.2)) for _ in range(2)
        )
        self.last = nn.Linear(7, 3)
        self.twin = nn.Linear(7, 3)
        self.twin.weight = self.last.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rows: list[tuple[int, float, list[int]]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        numbers, x = batch
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        loss: Tensor = (self.scale * (self.last(x) + self.twin(x))).square().mean()
        self.rows.append((self.trainer.global_step, loss.item(), numbers.tolist()))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.last(torch.tanh(self.first(batch[1]))).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Death(L.Callback):
    """Kills this process before a step, when the newest checkpoint is there."""

    def __init__(self, run: Run, rank: int) -> None:
        self._steps = [int(step) for step, ranks in run.deaths.items() if rank in ranks]
        self._folder = Path(run.folder)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in self._steps:
            newest = self._folder / f"step={trainer.global_step // 2 * 2}.ckpt"
            while not newest.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def fit(run: Run) -> dict[str, Any]:
    L.seed_everything(3 + int(os.environ["RANK"]))
    os.environ["PL_GLOBAL_SEED"] = "3"  # of samplers: the same on all ranks
    model = Net()
    policy = RestartPolicy(**{"min_world_size": 1, **run.policy})
    strategy = ResilientFSDPStrategy(restart=policy, **run.strategy)
    strategy.patience = Patience(settle_s=0.2, meeting_s=1.0)
    plugin = AsyncCheckpointIO(on_busy="wait", **run.plugin)
    saving = ModelCheckpoint(run.folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        plugins=[plugin],
        callbacks=[saving, Death(run, int(os.environ["RANK"]))],
        logger=False,
        default_root_dir=run.folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **{"max_epochs": 2, **run.trainer},
    )
    dataset = Numbered(run.samples)
    train = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    trainer.fit(model, train, DataLoader(dataset, batch_size=BATCH), ckpt_path=run.resume or None)
    return {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "environment": [os.environ["RANK"], os.environ["WORLD_SIZE"]],
        "rows": model.rows,
        "state": digest(model, trainer),
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "accumulates": trainer.accumulate_grad_batches,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "best": saving.best_model_path,
        "saves": [[report.step, report.outcome] for report in plugin.history],
    }


def digest(model: Net, trainer: L.Trainer) -> str:
    """Of this rank's parts of everything that training changes; equal for equal bits."""
    total = hashlib.sha256()
    tensors = [*model.parameters(), *model.buffers()]
    for optimizer in trainer.optimizers:
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        total.update(local.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def orders(*runs: Run) -> str:
    """The argument that makes `main` do these runs."""
    return json.dumps([asdict(run) for run in runs])


def main() -> None:
    """Argument: orders."""
    torch.set_num_threads(1)
    logging.basicConfig(format="%(levelname)s rank {RANK}: %(message)s".format_map(os.environ))
    for fields in json.loads(sys.argv[1]):
        run, rank = Run(**fields), os.environ["RANK"]
        (Path(run.folder) / f"result-{rank}.json").write_text(json.dumps(fit(run)))
