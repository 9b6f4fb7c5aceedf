"""What being able to restart costs each training step: ``python benchmarks/step_cost.py``.

Trains the example Llama in this process and adds up the processor time of everything that the restart engine does on
the training thread: saying what is being done (heartbeat), remembering the state (two commits a step), looking whether
another rank has a fault. The steps themselves are timed in the same run, so the share is known too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table

from benchmarks.jobs import machine_facts
from examples.llama.data import TextDataModule
from examples.llama.model import LlamaModule
from examples.llama.sizes import SIZES
from lightning_resilience import ResilientFSDPStrategy

TARGET_MS = 0.2
_WARM_UP_STEPS = 20


class StepCost(L.Callback):
    """Adds up, step by step, the processor time of the calls that are watched.

    Attributes:
        spent_s: Of each step, by what it was spent on.
        step_s: Processor time of each whole step.
    """

    def __init__(self) -> None:
        self.spent_s: list[dict[str, float]] = []
        self.step_s: list[float] = []
        self._inside = False
        self._began = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy, loop = trainer.strategy, trainer.fit_loop
        assert isinstance(strategy, ResilientFSDPStrategy)
        self._watch("heartbeat", strategy._heart, "enter")
        self._watch("commits", loop, "commit")
        self._watch("faults of others", strategy._engine, "check")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        now = time.thread_time()
        if self.spent_s:
            self.step_s.append(now - self._began)
        self._began = now
        self.spent_s.append({"heartbeat": 0.0, "commits": 0.0, "faults of others": 0.0})

    def _watch(self, what: str, owner: Any, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._inside or not self.spent_s:  # part of another one that is watched; or before the first step
                return call(*args, **kwargs)
            self._inside, began = True, time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent_s[-1][what] += time.thread_time() - began
                self._inside = False

        setattr(owner, name, watched)


def measure(size: Any, steps: int) -> tuple[Mapping[str, list[float]], list[float]]:
    """Seconds of each step after the first few, by what they were spent on; and of the whole steps."""
    cost = StepCost()
    with tempfile.TemporaryDirectory(prefix="step-cost-") as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps + _WARM_UP_STEPS + 1,
            logger=CSVLogger(folder),
            log_every_n_steps=10,
            limit_val_batches=0,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            strategy=ResilientFSDPStrategy(),
            callbacks=[
                ModelCheckpoint(folder, every_n_train_steps=10**9),
                EarlyStopping("train_loss", patience=10**9, strict=False),
                LearningRateMonitor("step"),
                cost,
            ],
        )
        trainer.fit(LlamaModule(size=size), TextDataModule(seq_len=64, batch_size=2, limit_mb=1.0))
    spent = cost.spent_s[_WARM_UP_STEPS : _WARM_UP_STEPS + steps]
    return {what: [each[what] for each in spent] for what in spent[0]}, cost.step_s[_WARM_UP_STEPS:][:steps]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what being able to restart costs each training step.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    load = os.getloadavg()[0]
    parts, steps = measure(options.size, options.steps)
    parts = {**parts, "together": [sum(step) for step in zip(*parts.values(), strict=True)]}
    figures = {
        what: {"median": 1e3 * median(seconds), "mean": 1e3 * mean(seconds), "max": 1e3 * max(seconds)}
        for what, seconds in parts.items()
    }
    table = Table(title=f"milliseconds of processor time a step, {len(steps)} steps of {1e3 * median(steps):.0f} ms")
    for column in ("", "median", "mean", "max"):
        table.add_column(column, justify="left" if not column else "right")
    for what, row in figures.items():
        table.add_row(what, *(f"{row[column]:.3f}" for column in ("median", "mean", "max")))
    met = figures["together"]["median"] <= TARGET_MS
    console = Console()
    facts = machine_facts(load)
    console.print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", highlight=False)
    console.print(table)
    console.print(f"target: at most {TARGET_MS} ms together in the median: {'met' if met else 'missed'}")
    if options.json is not None:
        options.json.write_text(json.dumps({**facts, "milliseconds": figures, "met": met}, indent=1))


if __name__ == "__main__":
    main()
