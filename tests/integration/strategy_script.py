"""A training script as users write it: `python -m tests.integration.strategy_script OUT DEVICES`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

import lightning_resilience
from tests.integration.strategy_models import TinyLM, tokens


def _inner(launcher: Any) -> Any:
    """The one of Lightning, inside the one that restarts."""
    return launcher._inner


def main() -> None:
    out, devices = sys.argv[1:]
    assert lightning_resilience.ResilientFSDPStrategy is not None  # importing a public class registers the name
    trainer = L.Trainer(
        strategy="resilient_fsdp",
        accelerator="auto",
        devices=int(devices),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    torch.manual_seed(1)
    model = TinyLM()
    trainer.fit(model, DataLoader(tokens(4), batch_size=2), DataLoader(tokens(1), batch_size=2))
    if trainer.is_global_zero:
        result = {
            "strategy": type(trainer.strategy).__name__,
            "launcher": type(_inner(trainer.strategy.launcher)).__name__,
            "world_size": trainer.world_size,
            "steps": trainer.global_step,
            "val_loss": trainer.callback_metrics["val_loss"].item(),
        }
        Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
