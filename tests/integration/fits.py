"""Runs on each rank: several `fit`s one after another, and what became of each.

Every rank sees the same batches, so that the mathematics is the same for any number of ranks. The model has two
parameter groups, weights and then biases: who numbers the parameters in another order than the optimizer mixes
their states up. Its sizes divide by no number of ranks; with four of them one rank has nothing of the last layer.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AsyncCheckpointIO, ResilientFSDPStrategy
from lightning_resilience.sharding.shard import reshard_all

STRATEGIES = ("ours", "model_parallel", "fsdp1", "ddp", "single")


@dataclass(frozen=True)
class Fit:
    """One `fit`, as a test orders it.

    Attributes:
        name: Of the result, and of the files with the state.
        folder: Where checkpoints go.
        strategy: One of `STRATEGIES`.
        full: One file from rank 0 instead of a directory of shards.
        plugin: Whether the trainer has our checkpoint plugin.
        steps: Train until this step.
        every: Steps between two checkpoints; 0 for none.
        resume: What to pass as `ckpt_path`.
        on_damage: Of the plugin.
        keep: How many checkpoints; -1 for all.
        shm_dir: Of the plugin.
        dump: Where results go; by default to the checkpoints.
        width: Rows of the first layer; a big one makes big data files.
    """

    name: str
    folder: str
    strategy: str = "ours"
    full: bool = False
    plugin: bool = True
    steps: int = 4
    every: int = 0
    resume: str | None = None
    on_damage: str = "previous"
    keep: int = -1
    shm_dir: str = "/dev/shm"
    dump: str = ""
    width: int = 17


@dataclass
class Result:
    """What rank 0 saw.

    Attributes:
        losses: Of each step that was done, by step.
        loaded: The checkpoint that was loaded in the end.
        error: Type and text of the exception that ended it.
    """

    losses: dict[int, float]
    loaded: str | None = None
    error: str = ""


class Net(L.LightningModule):
    calls: Tensor

    def __init__(self, width: int = 17, sharded_by_hand: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 9), nn.Tanh(), nn.Linear(9, 3))
        self.register_buffer("calls", torch.zeros(2))
        self.sharded_by_hand = sharded_by_hand
        self.losses: dict[int, float] = {}

    def configure_model(self) -> None:
        """What stock `ModelParallelStrategy` asks its users to write."""
        if self.sharded_by_hand and self.device_mesh is not None:
            for layer in (self.net[0], self.net[2], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.calls += 1
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses[self.trainer.global_step + 1] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [
            {"params": [p for name, p in named if name.endswith("weight")], "lr": 3e-2},
            {"params": [p for name, p in named if name.endswith("bias")], "lr": 1e-2, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class CpuFSDPStrategy(FSDPStrategy):
    """Stock FSDP1, which Lightning only sets up on GPUs."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self.model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        return self.model

    def _get_process_group_backend(self) -> str:
        return "gloo"


class Dump(L.Callback):
    """Writes the whole state, as torch's own tools see it: at the start of a resumed fit, and at every save."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.fit.resume is not None:
            self._write(trainer, "start")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if self.fit.every and trainer.global_step % self.fit.every == 0:
            self._write(trainer, str(trainer.global_step))

    def _write(self, trainer: L.Trainer, when: str) -> None:
        if isinstance(trainer.strategy, FSDPStrategy):
            return  # on a CPU, FSDP1 crashes when it gathers the state of the optimizer
        module = trainer.lightning_module
        if isinstance(trainer.strategy, ResilientFSDPStrategy):
            reshard_all(module)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(module, trainer.optimizers, options=options)
        if trainer.is_global_zero:
            torch.save({"model": model, "optimizer": optimizer}, dump_of(self.fit, when))


def dump_of(fit: Fit, when: str | int) -> Path:
    """Where the state of a fit at a step, or at its "start", is written."""
    return Path(fit.dump or fit.folder, f"{fit.name}-{when}.pt")


def make_strategy(fit: Fit) -> Strategy:
    if fit.strategy == "ours":
        return ResilientFSDPStrategy(state_dict_type="full" if fit.full else "sharded")
    if fit.strategy == "model_parallel":
        return ModelParallelStrategy(save_distributed_checkpoint=not fit.full)
    if fit.strategy == "fsdp1":
        return CpuFSDPStrategy(state_dict_type="full" if fit.full else "sharded")
    if fit.strategy == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    return SingleDeviceStrategy(torch.device("cpu"))


def make_trainer(fit: Fit, callbacks: list[L.Callback], **arguments: Any) -> L.Trainer:
    plugin = AsyncCheckpointIO(
        shm_dir=fit.shm_dir,
        on_busy="wait",
        on_damage=fit.on_damage,  # type: ignore[arg-type]  # the test gives a valid one
    )
    return L.Trainer(
        accelerator="cpu",
        devices=1 if fit.strategy == "single" else int(os.environ["WORLD_SIZE"]),
        strategy=make_strategy(fit),
        plugins=[plugin] if fit.plugin else [],
        callbacks=callbacks,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        **{"max_steps": fit.steps, **arguments},
    )


def loader() -> DataLoader[tuple[Tensor, ...]]:
    """Three batches over and over: after three steps it does not matter that stock loops begin an epoch again."""
    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(6, 8, generator=generator), torch.randn(6, 3, generator=generator)
    return DataLoader(TensorDataset(inputs.repeat(5, 1), targets.repeat(5, 1)), batch_size=2)


def make_model(fit: Fit) -> Net:
    torch.manual_seed(1 if fit.resume is None else 2)
    return Net(fit.width, sharded_by_hand=fit.strategy == "model_parallel")


def run(fit: Fit) -> Result:
    callbacks: list[L.Callback] = [Dump(fit)]
    if fit.every:
        callbacks.append(
            ModelCheckpoint(fit.folder, filename="{step}", every_n_train_steps=fit.every, save_top_k=fit.keep)
        )
    model = make_model(fit)
    trainer = make_trainer(fit, callbacks)
    result = Result(model.losses)
    try:
        trainer.fit(model, loader(), ckpt_path=fit.resume)
    except Exception as error:  # the test asks for it
        traceback.print_exc()
        result.error = f"{type(error).__name__}: {error}"
    result.loaded = trainer.ckpt_path if fit.resume is None or not result.error else None  # type: ignore[assignment]
    return result


def orders(*fits: Fit) -> str:
    """The argument that makes `main` run these fits."""
    return json.dumps([asdict(fit) for fit in fits])


def result_of(fit: Fit) -> Result:
    """What rank 0 wrote about a fit."""
    fields = json.loads(Path(fit.dump or fit.folder, f"{fit.name}.json").read_text())
    fields["losses"] = {int(step): loss for step, loss in fields["losses"].items()}
    return Result(**fields)


def main() -> None:
    logging.basicConfig(format="%(levelname)s rank {RANK}: %(message)s".format_map(os.environ))
    for fields in json.loads(sys.argv[1]):
        fit = Fit(**fields)
        Path(fit.folder).mkdir(parents=True, exist_ok=True)
        result = run(fit)
        if os.environ["RANK"] == "0":
            Path(fit.dump or fit.folder, f"{fit.name}.json").write_text(json.dumps(asdict(result)))
