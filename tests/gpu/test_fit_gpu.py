"""One rank over NCCL: trains, saves, is resumed bit for bit, and the checkpoint moves to a CPU and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_resilience import AsyncCheckpointIO, ResilientFSDPStrategy, newest_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice about tiny runs


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)) for _ in range(4)))
        self.losses: dict[int, float] = {}

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.blocks(batch).float().pow(2).mean()
        self.losses[self.global_step + 1] = float(loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(directory: Path, steps: int, resume: str | None = None, **options: Any) -> Model:
    L.seed_everything(1, verbose=False)
    model = Model()
    trainer = L.Trainer(
        **{"accelerator": "cuda", "devices": 1, "precision": "32-true", **options},
        strategy=ResilientFSDPStrategy(),
        plugins=[AsyncCheckpointIO()],
        callbacks=[ModelCheckpoint(directory, every_n_train_steps=5, save_top_k=-1)],
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = list(torch.randn(256, 32, generator=torch.Generator().manual_seed(0)))
    trainer.fit(model, DataLoader(rows, batch_size=8, shuffle=True), ckpt_path=resume)  # type: ignore[arg-type]  # a list is a dataset
    return model


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_resumed_run_is_bit_identical(tmp_path: Path, precision: str) -> None:
    straight = fit(tmp_path / "straight", 20, precision=precision)
    fit(tmp_path / "cut", 10, precision=precision)
    resumed = fit(tmp_path / "cut", 20, newest_checkpoint(tmp_path / "cut"), precision=precision)
    assert {step: straight.losses[step] for step in range(11, 21)} == resumed.losses
    assert all(torch.equal(one, other) for one, other in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_a_checkpoint_moves_between_gpu_and_cpu(tmp_path: Path) -> None:
    fit(tmp_path, 10)
    fit(tmp_path, 15, newest_checkpoint(tmp_path), accelerator="cpu")
    fit(tmp_path, 20, newest_checkpoint(tmp_path))
