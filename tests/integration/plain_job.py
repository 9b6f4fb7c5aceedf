"""Runs on each rank: a tiny Llama that is trained sharded, with intervals and retention that look after themselves.

plain_job FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_resilience import AsyncCheckpointIO, KeepLatest, ResilientFSDPStrategy, ResilientModelCheckpoint

STEPS = 45


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )


class TinyLlama(L.LightningModule):
    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.model: Any = LlamaForCausalLM(config())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        norms = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": norms, "weight_decay": 0.0}, {"params": matrices}]
        return torch.optim.AdamW(groups, lr=self.lr)


def loader() -> DataLoader[Any]:
    tokens: Any = torch.randint(61, (200, 16), generator=torch.Generator().manual_seed(1))
    return DataLoader(tokens, batch_size=2)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    L.seed_everything(3)
    callback = ResilientModelCheckpoint(folder / "runs", "{step}", save_top_k=-1)
    trainer = L.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=2,
        strategy=ResilientFSDPStrategy(),
        plugins=[AsyncCheckpointIO(keep=[KeepLatest(1)])],
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(TinyLlama(), loader())
    (folder / f"interval-{trainer.global_rank}").write_text(str(callback.interval))
