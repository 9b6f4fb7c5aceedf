"""A rank of the job under ``ResilientFSDPStrategy``: a LightningModule and a Trainer, as users have them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from benchmarks.restarts.plan import Plan
from benchmarks.restarts.training import Notebook, batch_for, build_model, width_of
from lightning_resilience import ResilientFSDPStrategy, RestartPolicy


class Batches(Dataset[torch.Tensor]):
    """Batch ``i`` is that of step ``i``, for every rank its own: the sampler deals them out in turn."""

    def __init__(self, plan: Plan, width: int) -> None:
        self._plan = plan
        self._width = width

    def __len__(self) -> int:
        return self._plan.steps * self._plan.ranks

    def __getitem__(self, index: int) -> torch.Tensor:
        step, rank = divmod(index, self._plan.ranks)
        return batch_for(step, rank, self._width)


class Model(LightningModule):
    """The same layers, the same loss, the same optimizer as in the other jobs."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.layers = build_model(plan.millions)
        self.notebook: Notebook | None = None

    def on_fit_start(self) -> None:
        self.notebook = Notebook(self.plan, self.global_rank)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert self.notebook is not None
        self.notebook.begin_step(batch_idx)
        loss: torch.Tensor = self.layers(batch).pow(2).mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.notebook is not None
        self.notebook.end_step(batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def run(plan: Plan) -> None:
    """Train until the last step, through all faults."""
    model = Model(plan)
    trainer = Trainer(
        accelerator="cpu",
        devices=plan.ranks,
        strategy=ResilientFSDPStrategy(restart=RestartPolicy(), hang_timeout=plan.deadline_s),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=plan.directory,
    )
    data = DataLoader(Batches(plan, width_of(model)), batch_size=None, shuffle=False)
    trainer.fit(model, data)
