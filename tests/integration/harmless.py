"""Runs on each rank: what a save must not do to a training, and what it leaves; one scenario after another.

    harmless FOLDER STRATEGY ...

Rank 0 writes what each scenario found to `FOLDER/STRATEGY/results.json`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_resilience.checkpoint.exchange import Alone
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.checkpoint.verify import choose
from tests.integration.fits import Dump, Fit, Net, dump_of, loader, make_model, make_trainer

STRATEGIES = {
    "sharded": Fit("sharded", ""),
    "full": Fit("full", "", full=True),
    "ddp": Fit("ddp", "", strategy="ddp"),
    "single": Fit("single", "", strategy="single"),
}
METRICS = {1: 1.0, 2: 5.0, 3: 3.0, 4: 4.0, 5: 2.0}


def state_tensors(trainer: L.Trainer) -> Iterator[Tensor]:
    """Every tensor that training may change: parameters, buffers, optimizer state."""
    yield from trainer.lightning_module.parameters()
    yield from trainer.lightning_module.buffers()
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


class SaveAndSpoil(Dump):
    """Saves at step 2, and as soon as the call is back multiplies everything by three."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            self._write(trainer, "2")
            trainer.save_checkpoint(Path(self.fit.folder, "spoiled.ckpt"))
            with torch.no_grad():
                for tensor in state_tensors(trainer):
                    (tensor.to_local() if isinstance(tensor, DTensor) else tensor).mul_(3)


class SaveFirst(L.Callback):
    """Saves before the first step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.optimizer_state: list[int] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)
        self.optimizer_state = [len(optimizer.state) for optimizer in trainer.optimizers]


class Watched(Net):
    """Logs a number for `ModelCheckpoint` to watch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("watched", METRICS[self.trainer.global_step + 1])
        return super().training_step(batch, batch_idx)


def changes_after_the_call(fit: Fit) -> dict[str, Any]:
    trainer = make_trainer(replace(fit, steps=3), [SaveAndSpoil(fit)])
    trainer.fit(make_model(fit), loader())
    return {}


def before_the_first_step(fit: Fit) -> dict[str, Any]:
    plain, saving = make_model(fit), make_model(fit)
    make_trainer(fit, []).fit(plain, loader())
    callback = SaveFirst(Path(fit.folder, "first.ckpt"))
    make_trainer(fit, [callback]).fit(saving, loader())
    weights = zip(plain.parameters(), saving.parameters(), strict=True)
    return {
        "losses": list(plain.losses.values()),
        "losses_with_save": list(saving.losses.values()),
        "weights_equal": all(torch.equal(_local(one), _local(other)) for one, other in weights),
        "optimizer_state": callback.optimizer_state,
        "saved": sorted(path.name for path in callback.path.parent.glob("first.ckpt")),
    }


def after_fit(fit: Fit) -> dict[str, Any]:
    trainer = make_trainer(fit, [])
    trainer.fit(make_model(fit), loader())
    path = Path(fit.folder, "after.ckpt")
    trainer.save_checkpoint(path)
    found = choose(place_for(path), Alone(), fall_back=False) if trainer.is_global_zero else None
    trainer.strategy.barrier()
    return {"found": found and found.name}


def top_two_and_last(fit: Fit) -> dict[str, Any]:
    """What is there when `fit` returns, and what the callback believes."""
    folder = Path(fit.folder, "top")
    callback = ModelCheckpoint(
        folder,
        filename="{step}",
        monitor="watched",
        mode="max",
        save_top_k=2,
        save_last=True,
        every_n_train_steps=1,
        enable_version_counter=False,
    )
    torch.manual_seed(1)
    make_trainer(replace(fit, steps=len(METRICS)), [callback]).fit(Watched(), loader())
    if os.environ["RANK"] != "0":
        return {}
    names = sorted(os.listdir(folder))
    for name in names:
        choose(place_for(folder / name), Alone(), fall_back=False)
    return {
        "names": names,
        "best": Path(callback.best_model_path).name,
        "last": Path(callback.last_model_path).name,
    }


SCENARIOS: tuple[Callable[[Fit], dict[str, Any]], ...] = (
    changes_after_the_call,
    before_the_first_step,
    after_fit,
    top_two_and_last,
)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spoiled_dump(folder: Path, strategy: str) -> Path:
    """Where the state at the save was written before it was spoiled."""
    return dump_of(replace(STRATEGIES[strategy], folder=str(folder / strategy)), 2)


def main() -> None:
    logging.basicConfig(format="%(levelname)s rank {RANK}: %(message)s".format_map(os.environ))
    root, *names = sys.argv[1:]
    for name in names:
        fit = replace(STRATEGIES[name], folder=f"{root}/{name}")
        Path(fit.folder).mkdir(parents=True, exist_ok=True)
        results: dict[str, Any] = {}
        for scenario in SCENARIOS:
            try:
                results[scenario.__name__] = scenario(fit)
            except Exception:  # the test shows it
                traceback.print_exc()
                results[scenario.__name__] = {"error": traceback.format_exc()}
        if os.environ["RANK"] == "0":
            Path(fit.folder, "results.json").write_text(json.dumps(results))
