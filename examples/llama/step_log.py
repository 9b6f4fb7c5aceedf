"""One JSON line for every start, step and save of a run, so that runs can be compared bit for bit."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_resilience.faults.plan import PlannedFault


def read_events(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a log; a line that a kill cut in two is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class StepLog(Callback):
    """Appends to a file on rank 0: `start`, `step`, `save` and `end` events.

    Losses are written with all their digits: reading them gives the same bits. A `save` is written when the
    checkpoint is durable, or has failed, with what `AsyncCheckpointIO.history` says about it.

    Args:
        path: the file; its folder is made. A restarted run appends to it.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._last_step = 0
        self._saves_seen = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step
        self._saves_seen = 0
        self._write(trainer, "start", step=trainer.global_step, checkpoint=trainer.ckpt_path)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._last_step:  # still accumulating gradients
            return
        self._last_step = trainer.global_step
        loss = trainer.callback_metrics["train/loss"].item()
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self._write(trainer, "step", step=trainer.global_step, loss=loss, learning_rate=rate)
        self._write_saves(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self._write(trainer, "end", step=trainer.global_step, metrics=metrics)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # the strategy has waited for the last save by now
            self._write_saves(trainer)

    def _write_saves(self, trainer: Trainer) -> None:
        history = getattr(trainer.strategy.checkpoint_io, "history", [])
        for report in history[self._saves_seen :]:
            if report.durable_s is None and report.error is None:
                return
            self._saves_seen += 1
            self._write(trainer, "save", **asdict(report))

    def _write(self, trainer: Trainer, event: str, **fields: Any) -> None:
        if trainer.is_global_zero:
            append_line(self.path, {"event": event, "time": time.time(), **fields})


def log_fault(path: Path, fault: PlannedFault) -> None:
    """A `fault` event of a drill, from the rank that it is about to happen to."""
    append_line(path, {"event": "fault", "time": time.time(), **asdict(fault)})


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Opened and closed for every line: what is written survives a SIGKILL of the process right after."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record, default=str) + "\n")
