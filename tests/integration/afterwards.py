"""Runs on each rank: a fit with faults, then everything else that a trainer is asked for, and another fit.

afterwards FOLDER
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_resilience import ResilientFSDPStrategy
from lightning_resilience.faults.injector import FaultInjector
from lightning_resilience.faults.plan import PlannedFault
from tests.integration.restarts import HANG_TIMEOUT_S, Net, Run, Witness, digest, loader, state_of

FAULTS = [
    PlannedFault(kind="raise", place="backward", rank=1, step=3),
    PlannedFault(kind="hang", place="before_update", rank=0, step=8),
    PlannedFault(kind="raise", place="validation", rank=1, step=12),
    PlannedFault(kind="raise", place="forward", rank=0, step=14),  # of the second fit
    PlannedFault(kind="hang", place="batch_end", rank=1, step=16),
]


class Tested(Net):
    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("tested", self.loss(batch[0]), sync_dist=True)


def live(faults: list[PlannedFault], folder: Path) -> dict[str, Any]:
    """All that comes of it; logged values are in files, as the logger writes them."""
    L.seed_everything(3)
    model, run, witness = Tested(), Run(""), Witness()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=ResilientFSDPStrategy(hang_timeout=HANG_TIMEOUT_S),
        callbacks=[witness, FaultInjector(faults)],
        logger=CSVLogger(str(folder), name="logs", flush_logs_every_n_steps=1),
        default_root_dir=str(folder),
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        max_epochs=2,
    )
    train, validate = loader(run, 6, True, folder), loader(run, 2, False, folder)
    trainer.fit(model, train, validate)
    first = {"steps": trainer.global_step, "restarts": len(witness.journal.restarts)}
    validated, tested = trainer.validate(model, validate), trainer.test(model, validate)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, train, validate)
    return {
        "first": first,
        "validated": validated,
        "tested": tested,
        "steps": trainer.global_step,
        "restarts": len(witness.journal.restarts),
        "exceptions": witness.exceptions,
        "state": digest(state_of(model, trainer)),
    }


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(format="%(levelname)s rank {RANK}: %(message)s".format_map(os.environ))
    folder = Path(sys.argv[1])
    results = {"calm": live([], folder / "calm"), "faulty": live(FAULTS, folder / "faulty")}
    (folder / f"result-{os.environ['RANK']}.json").write_text(json.dumps(results))
