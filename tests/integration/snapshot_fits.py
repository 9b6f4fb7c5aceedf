"""Runs on each rank: `fit`s one after another, most of which end in an exception; where each began, and its losses."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_resilience import AsyncCheckpointIO, ResilientFSDPStrategy, newest_checkpoint
from lightning_resilience.checkpoint.commit import CommitClock
from lightning_resilience.checkpoint.manifest import read_manifest
from lightning_resilience.checkpoint.messages import Rescue
from lightning_resilience.checkpoint.snapshots.leftovers import remove_run
from lightning_resilience.checkpoint.snapshots.rescue import rescue
from lightning_resilience.checkpoint.snapshots.run import read_run
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.errors import MismatchedCheckpointError
from tests.integration.fits import Net, loader


class Fault(Exception):
    """What ends a fit."""


class Crash(L.Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            raise Fault


class Evaluated(Net):
    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        assert self.calls.eq(5).all(), "the checkpoint was asked for, and not the snapshot"


class Manual(Net):
    """Steps its optimizer itself, and not through Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Parallel(Net):
    """Its first layer is split over the ranks by columns, its second by rows."""

    def __init__(self) -> None:
        super().__init__(width=16)

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


class Wider(Net):
    """Has other shapes."""

    def __init__(self) -> None:
        super().__init__(width=12)


def make_strategy(kind: str) -> Strategy:
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if kind == "hsdp":
        return ResilientFSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 1), restart=None)
    if kind == "tensor parallel":
        return ResilientFSDPStrategy(tensor_parallel_size=2, restart=None)
    return ResilientFSDPStrategy(state_dict_type="full" if kind == "full" else "sharded", restart=None)


def make_trainer(
    folder: Path, kind: str = "sharded", crash: int = -1, every: int | str | None = 1, save_every: int = 5
) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=make_strategy(kind),
        plugins=[AsyncCheckpointIO(snapshot_every_n_steps=every)],  # type: ignore[arg-type]  # "auto", or a number
        callbacks=[
            Crash(crash),
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=save_every, save_top_k=-1),
        ],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        max_steps=12,
        default_root_dir=folder,
    )


def fit(folder: Path, path: str | None, model: type[Net] = Net, **arguments: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    module = model()
    trainer = make_trainer(folder, **arguments)
    error = ""
    try:
        trainer.fit(module, loader(), ckpt_path=path)
    except (Fault, MismatchedCheckpointError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {
        "first": min(module.losses, default=None),
        "losses": {str(step): loss.hex() for step, loss in module.losses.items()},
        "calls": module.calls.tolist(),
        "error": error,
        "ckpt_path": None if trainer.ckpt_path is None else Path(trainer.ckpt_path).name,
        "in_memory": left_in_memory(),
    }


def rescue_it(folder: Path) -> str | None:
    """What the writers do when both ranks are gone, and then the memory is lost."""
    run, rank = read_run(place_for(folder)), int(os.environ["RANK"])
    assert run is not None
    rescue(Rescue(str(folder), "/dev/shm", run.id, run.start, run.base_ns, rank, 2, 60.0), CommitClock())
    dist.barrier()
    remove_run("/dev/shm", f"{run.id}-rank{rank}")
    return newest_checkpoint(folder, wait_s=0.0)


def fits_of(kind: str, folder: Path, model: type[Net] = Net) -> dict[str, Any]:
    """Undisturbed; from memory after a crash; from what was rescued after another."""
    results = {f"{kind}, whole": fit(folder.with_suffix(".whole"), None, model, kind=kind, every=None)}
    newest_checkpoint(folder)
    results[kind] = fit(folder, None, model, kind=kind, crash=3, save_every=100)
    results[f"{kind}, again"] = fit(folder, None, model, kind=kind, crash=6, save_every=100)
    results[f"{kind}, rescued"] = fit(folder, rescue_it(folder), model, kind=kind, save_every=100)
    return results


def flip_a_byte(checkpoint: Path) -> None:
    """In the middle of the shard of rank 0."""
    newest_checkpoint(checkpoint.parent)  # waits for its writers
    if os.environ["RANK"] == "0":
        manifest = read_manifest(place_for(checkpoint))
        assert manifest is not None
        name = max(manifest.files, key=lambda name: manifest.files[name].size)
        with open(checkpoint / manifest.folder / name, "r+b") as file:
            file.seek(manifest.files[name].size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    dist.barrier()


def left_in_memory() -> int:
    """Files of this rank; the other may be a moment behind."""
    mine = f"-rank{os.environ['RANK']}-"
    return sum(name.startswith("lightning-resilience-snapshot-") and mine in name for name in os.listdir("/dev/shm"))


def main() -> None:
    logging.basicConfig(format="%(levelname)s rank {RANK}: %(message)s".format_map(os.environ))
    logging.getLogger("lightning_resilience").setLevel(logging.INFO)
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    a, results = root / "a", {}
    results["reference"] = fit(root / "reference", None, every=None)
    results["killed at the start"] = fit(a, None, crash=3)
    results["nobody spoke of resuming"] = fit(a, None, crash=4)
    results["before the first checkpoint"] = fit(a, newest_checkpoint(a), crash=7)
    results["an older checkpoint"] = fit(a, newest_checkpoint(a), crash=11)
    make_trainer(a).validate(Evaluated(), loader(), ckpt_path=str(a / "step=5.ckpt"), verbose=False)
    results["not the newest"] = fit(a, str(a / "step=5.ckpt"), crash=6)
    results["after going back"] = fit(a, newest_checkpoint(a), crash=8)
    results["to the end"] = fit(a, newest_checkpoint(a))
    results["after the end"] = fit(a, newest_checkpoint(a))
    damaged = root / "damaged"
    results["two checkpoints"] = fit(damaged, None, crash=11, every=7)
    flip_a_byte(damaged / "step=10.ckpt")
    results["the newest is damaged"] = fit(damaged, newest_checkpoint(damaged), every=7)
    full = root / "full"
    newest_checkpoint(full)
    results["full"] = fit(full, None, crash=3, kind="full")
    results["full, again"] = fit(full, None, kind="full")
    results["manual, whole"] = fit(root / "whole", None, Manual, every=None)  # schedulers are not stepped there
    manual = root / "manual"
    newest_checkpoint(manual)
    results["manual"] = fit(manual, None, Manual, crash=3)
    results["manual, again"] = fit(manual, None, Manual)
    automatic = root / "automatic"
    newest_checkpoint(automatic)
    results["auto"] = fit(automatic, None, crash=6, every="auto", save_every=100)
    results["auto, again"] = fit(automatic, None, every="auto", save_every=100)
    results |= fits_of("hsdp", root / "hsdp")
    results |= fits_of("tensor parallel", root / "tensor-parallel", Parallel)
    results["ddp"] = fit(root / "ddp", None, kind="ddp")
    other = root / "other"
    newest_checkpoint(other)
    fit(other, None, crash=3)
    results["another model"] = fit(other, newest_checkpoint(other), Wider)
    (root / f"{os.environ['RANK']}.json").write_text(json.dumps(results))
