"""Runs on each rank: what torch 2.13 and Lightning 2.6 do by themselves in the cases that the engine avoids.

    torch_traps FOLDER

Each rank writes what it found to `FOLDER/RANK.json`. Then rank 1 raises in a stock `fit`, which may never end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience.checkpoint.engine import CheckpointEngine, EngineOptions
from lightning_resilience.checkpoint.exchange import GroupExchange

Found = dict[str, Any]
RANK = int(os.environ.get("RANK", 0))


@contextlib.contextmanager
def group(folder: Path, name: str, rank: int, world_size: int) -> Iterator[None]:
    """A default group of its own, as after a restart."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=world_size)
    yield
    dist.destroy_process_group()


def save_by_process(path: Path, state: dict[str, Any]) -> Future[Any]:
    response = async_save(state, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    assert not isinstance(response, AsyncSaveResponse)
    return response


def child() -> Any:
    """The process that torch keeps for all saves of this one."""
    return executor._CHECKPOINT_PROCESS


def error_of(future: Future[Any]) -> str:
    error = future.exception(timeout=60)
    return "" if error is None else str(error)


def crossed_responses(folder: Path) -> Found:
    """Two saves under way: whoever listens first gets the first answer. The listeners' turn is decided here."""
    (folder / "a-file").write_text("")
    save_by_process(folder / "warm", {"a": torch.ones(2)}).result()
    listen, asked, answered = type(child())._wait_for_response, threading.Event(), threading.Event()

    def scheduled(self: Any, timeout: float | None = None) -> Any:
        if not asked.is_set():
            asked.set()
            answered.wait(30)
            return listen(self, timeout)
        try:
            return listen(self, timeout)
        finally:
            answered.set()

    type(child())._wait_for_response = scheduled
    bad = save_by_process(folder / "a-file" / "bad", {"a": torch.ones(2)})
    asked.wait(30)
    good = save_by_process(folder / "good", {"a": torch.ones(2)})
    found = {"good": error_of(good), "bad": error_of(bad), "good is there": (folder / "good" / ".metadata").exists()}
    type(child())._wait_for_response = listen
    return found


def dead_child(folder: Path) -> Found:
    os.kill(child()._save_process.pid, signal.SIGKILL)
    child()._save_process.join()
    return {str(turn): error_of(save_by_process(folder / f"dead-{turn}", {"a": torch.ones(2)})) for turn in (1, 2)}


def stale_child(folder: Path) -> Found:
    """The group has two ranks now, the child still believes that it is alone. The ranks save one after the other."""
    errors = []
    for rank in (0, 1):
        if rank == RANK:
            errors.append(error_of(save_by_process(folder / "stale", {f"of rank {rank}": torch.ones(2)})))
        dist.barrier()
    return {"errors": errors}


def sharded() -> dict[str, Any]:
    """1 to 8, half of them on each rank if there are two."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.arange(1.0, 9.0), mesh, [Shard(0)])}


def save_by_engine(path: Path) -> list[str | None]:
    """As after each restart: a new group, a new engine."""
    exchange = GroupExchange(dist.group.WORLD)  # type: ignore[arg-type]  # there is one
    engine = CheckpointEngine(EngineOptions(deadline_s=60.0), exchange)
    engine.save_sharded(str(path), 1, {"state_dict": sharded()}, {})
    engine.wait()
    engine.close()
    return [report.error for report in engine.history]


def cached_plan(folder: Path, world_size: int) -> None:
    state = {"everywhere": torch.ones(2), f"of rank {RANK}": torch.ones(2)}
    planner = DefaultSavePlanner(enable_plan_caching=True)
    save(state, checkpoint_id=folder / f"cached-{world_size}", planner=planner)


class Net(L.LightningModule):
    """Raises on rank 1 at step 2 if told to."""

    def __init__(self, raises: bool = False) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)
        self.raises = raises

    def configure_model(self) -> None:
        if not self.raises:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]  # the strategy's

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.raises and batch_idx == 2 and self.global_rank == 1:
            raise ValueError("the user's own")
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recorder(TorchCheckpointIO):
    """Tells which of its hooks were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("save_checkpoint")

    def teardown(self) -> None:
        self.calls.append("teardown")


def fit(strategy: Strategy, net: Net, plugin: Any = None, callback: L.Callback | None = None) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        plugins=[plugin] if plugin else [],
        callbacks=[callback] if callback else [],
        max_steps=4,
        logger=False,
        enable_checkpointing=callback is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=2))
    return trainer


def stock_sharded_strategy(folder: Path) -> Found:
    plugin, found = Recorder(), {"storage_options": ""}
    trainer = fit(ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), Net(), plugin)
    trainer.save_checkpoint(folder / "stock")
    try:
        trainer.save_checkpoint(folder / "with-options", storage_options={"key": "k"})
    except TypeError as error:
        found["storage_options"] = str(error)
    return {**found, "calls": plugin.calls, "saved": (folder / "stock" / ".metadata").exists()}


class Reports(OnExceptionCheckpoint):
    """Says when it begins to save, and when it is through."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def on_exception(self, trainer: L.Trainer, *args: Any) -> None:
        (self.folder / "began").touch()
        super().on_exception(trainer, *args)
        (self.folder / "ended").touch()


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    global RANK
    RANK, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    found: Found = {}
    (folder / str(RANK)).mkdir(exist_ok=True)
    with group(folder, f"alone-{RANK}", 0, 1):
        found["crossed"] = crossed_responses(folder / str(RANK))
        found["engine"] = save_by_engine(folder / str(RANK) / "engine")
    with group(folder, "both", RANK, 2):
        found["stale"] = stale_child(folder)
        found["engine"] += save_by_engine(folder / "engine")
        save(sharded(), checkpoint_id=folder / "no-collectives", use_collectives=False)
        cached_plan(folder, 2)
    with group(folder, f"alone-again-{RANK}", 0, 1):
        found["dead"] = dead_child(folder / str(RANK))
        found["engine"] += save_by_engine(folder / str(RANK) / "engine-again")
        if RANK == 0:
            cached_plan(folder, 1)
    with group(folder, "stock", RANK, 2):
        found["stock"] = stock_sharded_strategy(folder)
    (folder / f"{RANK}.tmp").write_text(json.dumps(found))
    os.replace(folder / f"{RANK}.tmp", folder / f"{RANK}.json")
    with group(folder, "last", RANK, 2):
        fit(DDPStrategy(process_group_backend="gloo"), Net(raises=True), callback=Reports(folder))
