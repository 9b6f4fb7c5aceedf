"""Runs on each rank: trainings whose checkpoints lie on a remote storage, and what became of them.

bucket_fits FOLDER URL OPTIONS SCENARIO...
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from lightning_resilience import AsyncCheckpointIO, KeepLatest, ResilientFSDPStrategy, newest_checkpoint
from lightning_resilience.checkpoint.backpressure import OnBusy
from lightning_resilience.sharding.shard import reshard_all
from tests.integration.fits import Net, loader

FIRST, ALL = 3, 7
SHORT = 5


@dataclass(frozen=True)
class Job:
    """What all scenarios get."""

    folder: Path
    url: str
    options: dict[str, Any] | None


class Tested(Net):
    """Evaluates what it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.test_losses: list[float] = []

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.test_losses.append(mse_loss(self.net(batch[0]), batch[1]).item())


def trainer(
    job: Job,
    steps: int,
    dirpath: str | None,
    keep: Sequence[KeepLatest] | None = None,
    on_busy: OnBusy = "latest",
    **arguments: Any,
) -> L.Trainer:
    best: dict[str, Any] = {"save_top_k": 2, "monitor": "step", "mode": "max"}
    which = best if keep is None else {"save_top_k": -1}  # the policies decide
    saving = ModelCheckpoint(dirpath, filename="{step}", every_n_train_steps=2, save_last=True, **which)
    return L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=ResilientFSDPStrategy(),
        plugins=[AsyncCheckpointIO(storage_options=job.options, keep=keep, on_busy=on_busy)],
        callbacks=[saving],
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=steps,
        **{"logger": False, **arguments},
    )


def fit(
    job: Job,
    steps: int,
    dirpath: str | None,
    ckpt_path: str | None,
    seed: int,
    kind: type[Net] = Net,
    **arguments: Any,
) -> Any:
    torch.manual_seed(seed)
    model = kind()
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
        "tested": test_the_best(training, model) if isinstance(model, Tested) else None,
    }


def test_the_best(training: L.Trainer, model: Tested) -> list[float]:
    """Losses of the batches, with the weights of the best checkpoint."""
    training.test(model, loader(), ckpt_path="best", verbose=False)
    return model.test_losses


def uninterrupted(job: Job) -> Any:
    return fit(job, ALL, str(job.folder / "local"), None, seed=1)


def stopped(job: Job) -> Any:
    return fit(job, FIRST, f"{job.url}/run", None, seed=1)


def resumed_from_last(job: Job) -> Any:
    return fit(job, ALL, f"{job.url}/run", "last", seed=2)


def resumed_from_newest(job: Job) -> Any:
    path = newest_checkpoint(f"{job.url}/run", storage_options=job.options)
    return fit(job, ALL + 2, f"{job.url}/run", path, seed=2, kind=Tested)


def root_directory(job: Job) -> Any:
    """Everything goes below `default_root_dir`, logs too; who may write there is said by the environment."""
    names = {"key": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY", "endpoint_url": "AWS_ENDPOINT_URL"}
    assert job.options is not None
    os.environ.update({variable: job.options[option] for option, variable in names.items()})
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    job, root = replace(job, options=None), f"{job.url}/root"
    first = fit(job, FIRST, None, None, seed=1, default_root_dir=root, logger=None)
    last = fit(job, ALL, first["best"].rpartition("/")[0], "last", seed=2, default_root_dir=root)
    return {"first": first, "last": last}


def on_a_file_server(job: Job) -> Any:
    """`ModelCheckpoint` logs in as soon as it is made, so fsspec is told how."""
    assert job.options is not None
    fsspec.config.conf["sftp"] = job.options
    whole = fit(job, SHORT, str(job.folder / "local"), None, seed=1)
    every_one: Any = {"keep": [KeepLatest(1)], "on_busy": "wait"}
    first = fit(job, FIRST, f"{job.url}/run", None, seed=1, **every_one)
    return {"whole": whole, "first": first, "last": fit(job, SHORT, f"{job.url}/run", "last", seed=2, **every_one)}


SCENARIOS: dict[str, Callable[[Job], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        uninterrupted,
        stopped,
        resumed_from_last,
        resumed_from_newest,
        root_directory,
        on_a_file_server,
    )
}


def main() -> None:
    logging.basicConfig(
        stream=sys.stdout, format="%(relativeCreated)d %(levelname)s rank {RANK}: %(message)s".format_map(os.environ)
    )
    logging.getLogger("lightning_resilience").setLevel(logging.DEBUG)
    torch.set_num_threads(1)
    job = Job(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
    results = {}
    for name in sys.argv[4:]:
        try:
            results[name] = SCENARIOS[name](job)
        except Exception as error:  # the test looks at it
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    if os.environ["RANK"] == "0":
        (job.folder / "results.json").write_text(json.dumps(results))
