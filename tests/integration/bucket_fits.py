"""Runs on each rank: trainings whose checkpoints lie in a bucket, and what became of them.

bucket_fits FOLDER OPTIONS SCENARIO...
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor

from lightning_resilience import AsyncCheckpointIO, ResilientFSDPStrategy, newest_checkpoint
from lightning_resilience.sharding.shard import reshard_all
from tests.integration.fits import Net, loader
from tests.servers.s3 import BUCKET

FIRST, ALL = 3, 7


@dataclass(frozen=True)
class Job:
    """What all scenarios get."""

    folder: Path
    options: dict[str, Any] | None


def trainer(job: Job, steps: int, dirpath: str | None, **arguments: Any) -> L.Trainer:
    saving = ModelCheckpoint(
        dirpath, filename="{step}", every_n_train_steps=2, monitor="step", mode="max", save_top_k=2, save_last=True
    )
    return L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=ResilientFSDPStrategy(),
        plugins=[AsyncCheckpointIO(storage_options=job.options)],
        callbacks=[saving],
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=steps,
        **{"logger": False, **arguments},
    )


def fit(job: Job, steps: int, dirpath: str | None, ckpt_path: str | None, seed: int, **arguments: Any) -> Any:
    torch.manual_seed(seed)
    model = Net()
    training = trainer(job, steps, dirpath, **arguments)
    training.fit(model, loader(), ckpt_path=ckpt_path)
    reshard_all(model)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    callback = training.checkpoint_callback
    assert isinstance(callback, ModelCheckpoint)
    return {
        "losses": model.losses,
        "weights": {name: value.flatten().tolist() for name, value in whole.items()},
        "resumed": training.ckpt_path,
        "best": callback.best_model_path,
        "last": callback.last_model_path,
    }


def uninterrupted(job: Job) -> Any:
    return fit(job, ALL, str(job.folder / "local"), None, seed=1)


def stopped(job: Job) -> Any:
    return fit(job, FIRST, f"s3://{BUCKET}/run", None, seed=1)


def resumed_from_last(job: Job) -> Any:
    return fit(job, ALL, f"s3://{BUCKET}/run", "last", seed=2)


def resumed_from_newest(job: Job) -> Any:
    path = newest_checkpoint(f"s3://{BUCKET}/run", storage_options=job.options)
    return fit(job, ALL + 2, f"s3://{BUCKET}/run", path, seed=2)


def root_directory(job: Job) -> Any:
    """Everything goes below `default_root_dir`, logs too; who may write there is said by the environment."""
    names = {"key": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY", "endpoint_url": "AWS_ENDPOINT_URL"}
    assert job.options is not None
    os.environ.update({variable: job.options[option] for option, variable in names.items()})
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    job, root = Job(job.folder, None), f"s3://{BUCKET}/root"
    first = fit(job, FIRST, None, None, seed=1, default_root_dir=root, logger=None)
    last = fit(job, ALL, first["best"].rpartition("/")[0], "last", seed=2, default_root_dir=root)
    return {"first": first, "last": last}


SCENARIOS: dict[str, Callable[[Job], Any]] = {
    scenario.__name__: scenario
    for scenario in (uninterrupted, stopped, resumed_from_last, resumed_from_newest, root_directory)
}


def main() -> None:
    logging.basicConfig(
        stream=sys.stdout, format="%(relativeCreated)d %(levelname)s rank {RANK}: %(message)s".format_map(os.environ)
    )
    logging.getLogger("lightning_resilience").setLevel(logging.DEBUG)
    torch.set_num_threads(1)
    job = Job(Path(sys.argv[1]), json.loads(sys.argv[2]))
    results = {}
    for name in sys.argv[3:]:
        try:
            results[name] = SCENARIOS[name](job)
        except Exception as error:  # the test looks at it
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    if os.environ["RANK"] == "0":
        (job.folder / "results.json").write_text(json.dumps(results))
