"""Runs on each rank: fits in which faults happen, and everything that must be as if they had not.

One process trains several times, so that a test pays for its start only once. Rank by rank a JSON file tells, of each
fit: every logged value, a digest of weights, buffers and optimizer state, what callbacks and metrics hold at the end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset, get_worker_info
from torchmetrics import MeanMetric

from lightning_resilience import AsyncCheckpointIO, ResilientFSDPStrategy, RestartPolicy, _torch_groups
from lightning_resilience.faults.injector import FaultInjector, strike
from lightning_resilience.faults.plan import Place, PlannedFault

BATCHES, BATCH, WIDTH = 6, 2, 6
COLLECTIVES = [
    name
    for name, found in vars(dist).items()
    if callable(found) and name.startswith(("all_", "barrier", "broadcast", "gather", "monitored", "reduce", "scatter"))
]
HANG_TIMEOUT_S = 2.0
"""Of runs in which something hangs; a machine that is busy with other things may need half of it for a first step."""
_UNHURRIED_S = 60.0
_KINDS_OF_HANGS = ("hang", "hold", "skip", "stop")


@dataclass(frozen=True)
class Run:
    """One fit, as a test orders it.

    Attributes:
        name: Of the result.
        faults: As fields of `PlannedFault`.
        model: Name of a class here.
        strategy: Arguments of the strategy.
        trainer: Arguments of the trainer.
        workers: Of the data loader.
        persistent: Whether its workers stay for all epochs.
        worker_faults: What happens in workers: kind, rank and number of the sample.
        checks: Name of a health check here, in place of the usual ones.
        saves: Whether checkpoints are written, and where.
        plugin: Arguments of the checkpoint plugin.
        stalls: Whether its storage stalls, see `StalledStorage`.
    """

    name: str
    faults: list[dict[str, Any]] = field(default_factory=list)
    model: str = "Net"
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    workers: int = 0
    persistent: bool = True
    worker_faults: list[dict[str, Any]] = field(default_factory=list)
    checks: str = ""
    saves: str = ""
    plugin: dict[str, Any] = field(default_factory=dict)
    stalls: bool = False

    @property
    def hang_timeout_s(self) -> float:
        """Short only where it will pass."""
        kinds = {fault["kind"] for fault in (*self.faults, *self.worker_faults)}
        return HANG_TIMEOUT_S if self.stalls or not kinds.isdisjoint(_KINDS_OF_HANGS) else _UNHURRIED_S


class Net(L.LightningModule):
    """Has one of everything that a restart must not forget: buffers, dropout, metrics, counters, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)) for _ in range(2)
        )
        self.last = nn.Linear(WIDTH, 2)
        self.mean = MeanMetric()
        self.validated = MeanMetric()
        self.seen = 0

    def loss(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x).square().mean()
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        noise = random.random() + float(np.random.rand()) + torch.rand(()).item()
        loss = self.loss(batch[0] + 0.01 * noise)
        self.mean(loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("noise", noise, on_step=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("seen", float(self.seen))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", outputs["loss"].double() + batch[0].sum())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch[0]) + random.random()
        self.validated(loss)
        self.log("validated", self.validated)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
        return [optimizer], [
            {"scheduler": scheduler, "interval": "step"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val_loss"},
        ]


class Unnormalized(Net):
    """Without buffers that differ between ranks: a checkpoint on storage has those of rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            assert isinstance(block, nn.Sequential)
            block[1] = nn.Identity()


class Manual(Net):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        heads = [*self.last.parameters()]
        body = [p for name, p in self.named_parameters() if not name.startswith("last")]
        return [torch.optim.SGD(body, lr=1e-2, momentum=0.9), torch.optim.AdamW(heads, lr=1e-2)]


class Compiled(Net):
    """Its blocks are compiled."""

    def configure_model(self) -> None:
        for block in self.blocks:
            block.compile(backend="aot_eager")


class SelfSharded(Net):
    """Calls `fully_shard` itself."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for part in (*self.blocks, self):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


class Counted(Net):
    """Which collectives are asked for between the starts of the second and of the fifth batch, hooks and all."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[str] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.current_epoch == 0 and batch_idx == 1:
            self.originals = {name: vars(dist)[name] for name in COLLECTIVES}
            vars(dist).update({name: self.counting(name, original) for name, original in self.originals.items()})
        if self.trainer.current_epoch == 0 and batch_idx == 4:
            vars(dist).update(self.originals)

    def counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.collectives.append(name)
            return original(*args, **options)

        return counted


class Lately(Net):
    """Makes its layers in hooks: some anew each time, some only once; all with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.blocks[1]
        self.prepared = 0

    def prepare_data(self) -> None:
        self.prepared += 1
        self.pass_by("prepare_data")

    def setup(self, stage: str) -> None:
        self.first = nn.Linear(4, WIDTH)
        torch.rand(3)

    def configure_model(self) -> None:
        if len(self.blocks) == 1:
            self.blocks.append(nn.Linear(WIDTH, WIDTH))
            self.pass_by("configure_model")

    def configure_optimizers(self) -> Any:
        random.random()
        self.pass_by("configure_optimizers")
        return super().configure_optimizers()

    def pass_by(self, place: Place) -> None:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]  # set in a connector
            if isinstance(callback, FaultInjector):
                callback.pass_by(self.trainer, place)


class Average(L.Callback):
    """Keeps a running average of the loss and of the weights: state that changes at every batch end."""

    def __init__(self) -> None:
        self.value = 0.0
        self.weights: dict[str, Tensor] = {}
        self.history: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "weights": dict(self.weights), "history": list(self.history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.value = 0.9 * self.value + 0.1 * outputs["loss"].item()
        self.history.append(self.value)
        for name, p in pl_module.named_parameters():
            local = _local(p.detach())
            if name in self.weights:
                self.weights[name].lerp_(local, 0.1)
            else:
                self.weights[name] = local.clone()


class Recorder(Logger):
    """Keeps what is logged, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finalized: list[str] = []

    @property
    def name(self) -> str:
        return "recorder"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def finalize(self, status: str) -> None:
        self.finalized.append(status)


class Journal:
    """A restart puts plain attributes of callbacks back; what an object of a class of its own holds it leaves alone."""

    def __init__(self) -> None:
        self.restarts: list[str] = []
        self.usage: list[dict[str, int]] = []


def usage() -> dict[str, int]:
    """What this process holds; memory in KiB."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "resident": resident >> 10,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": sum(map(_children, Path("/proc/self/task").iterdir())),
        "shared memory": len(os.listdir("/dev/shm")),
        "groups": len(_torch_groups.live_groups()),
    }


def _children(task: Path) -> int:
    try:
        return len((task / "children").read_text().split())
    except FileNotFoundError:  # the thread has ended
        return 0


class Unfit:
    """A health check that finds something on rank 1."""

    def __init__(self) -> None:
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1

    def check(self) -> str:
        return "" if os.environ["RANK"] == "0" else f"the sensor is broken, {self.begun} time asked for normal values"


class Witness(L.Callback):
    """Sees what must not happen, and what must."""

    def __init__(self) -> None:
        self.exceptions = 0
        self.journal = Journal()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.exceptions += 1

    def on_restart(self, trainer: L.Trainer, pl_module: L.LightningModule, incident: Any) -> None:
        self.journal.restarts.append(incident.cause)
        self.journal.usage.append(usage())


class StalledStorage(L.Callback):
    """For twice as long as makes a hang: first nothing is written, later rank 0 gets no answer to a question."""

    def __init__(self) -> None:
        self.waking: list[threading.Timer] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        plugin = trainer.strategy.checkpoint_io
        assert isinstance(plugin, AsyncCheckpointIO)
        if trainer.global_step == 2:
            assert plugin._engine is not None
            pid = plugin._engine.writer_pid
            os.kill(pid, signal.SIGSTOP)
            self.waking.append(threading.Timer(2 * HANG_TIMEOUT_S, os.kill, (pid, signal.SIGCONT)))
            self.waking[0].start()
        elif trainer.global_step == 8 and trainer.is_global_zero:
            checkpoints: Any = trainer.checkpoint_callback
            checkpoints._fs = SlowAnswers(checkpoints._fs)


class SlowAnswers:
    """A file system whose first answer takes long."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._asked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exists(self, path: Any) -> bool:
        if not self._asked:
            self._asked = True
            time.sleep(2 * HANG_TIMEOUT_S)
        return bool(self._inner.exists(path))


class Samples(TensorDataset):
    """Whose reading fails in workers, as a run says; each fault happens once.

    Args:
        rows: The samples.
        faults: By number of the sample: what happens, and the file that says that it has.
    """

    def __init__(self, rows: Tensor, faults: Mapping[int, tuple[str, Path]]) -> None:
        super().__init__(rows)
        self._faults = faults

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index in self._faults and get_worker_info() is not None:
            kind, happened = self._faults[index]
            if not happened.exists():
                happened.touch()
                strike(PlannedFault(kind=kind, place="forward", message="in a worker"))  # type: ignore[arg-type]
        sample: tuple[Tensor, ...] = super().__getitem__(index)  # type: ignore[no-untyped-call]  # torch
        return sample


def data(batches: int, run: Run, folder: Path) -> Samples:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rows = torch.randn(ranks * BATCH * batches, 4, generator=torch.Generator().manual_seed(7))
    folder.mkdir(parents=True, exist_ok=True)
    faults = {
        f["sample"]: (f["kind"], folder / f"struck-{f['sample']}") for f in run.worker_faults if f["rank"] == rank
    }
    return Samples(rows[rank::ranks][: BATCH * batches], faults)


def loader(run: Run, batches: int, shuffle: bool, folder: Path) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(
        data(batches, run if shuffle else Run(""), folder),
        batch_size=BATCH,
        shuffle=shuffle,
        num_workers=run.workers,
        persistent_workers=run.workers > 0 and run.persistent,
    )


def fit(
    run: Run, folder: Path, tell: Callable[[PlannedFault], None] = lambda fault: None, *, uncaught: bool = False
) -> dict[str, Any]:
    """Train; `tell` is called right before each fault, on its rank."""
    L.seed_everything(3)
    model: Net = globals()[run.model]()
    recorder, average, witness = Recorder(), Average(), Witness()
    stopping = EarlyStopping("val_loss", patience=3)
    injector = FaultInjector([PlannedFault(**fault) for fault in run.faults], tell)
    callbacks: list[L.Callback] = [average, witness, stopping, injector]
    if run.stalls:
        callbacks.append(StalledStorage())
    if run.saves:
        callbacks.append(ModelCheckpoint(run.saves, filename="{step}", every_n_train_steps=2, save_top_k=-1))
    patient = RestartPolicy(max_restarts_without_progress=30)  # many faults at the end of an epoch
    checks = [globals()[run.checks]()] if run.checks else None
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=ResilientFSDPStrategy(
            **{"hang_timeout": run.hang_timeout_s, "restart": patient, "health_checks": checks, **run.strategy}
        ),
        callbacks=callbacks,
        plugins=[AsyncCheckpointIO(on_busy="wait", **run.plugin)] if run.saves else [],
        logger=recorder,
        default_root_dir=str(folder),
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(run.saves),
        log_every_n_steps=1,
        **{"max_epochs": 2, **run.trainer},
    )
    error = ""
    try:
        trainer.fit(model, loader(run, BATCHES, True, folder), loader(run, 2, False, folder))
    except BaseException as caught:  # the test asks for it
        traceback.print_exc()
        if uncaught:
            raise
        error = f"{type(caught).__name__}: {caught.code if isinstance(caught, SystemExit) else caught}"
    return {
        "error": error,
        "rows": recorder.rows,
        "finalized": recorder.finalized,
        "state": digest(state_of(model, trainer)),
        "average": digest(average.weights) + str(average.history),
        "stopping": str(stopping.state_dict()),
        "metrics": {name: value.item() for name, value in sorted(trainer.callback_metrics.items())},
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "exceptions": witness.exceptions,
        "restarts": witness.journal.restarts,
        "usage": witness.journal.usage,
        "training": model.training,
        "collectives": model.collectives if isinstance(model, Counted) else [],
    }


def state_of(model: Net, trainer: L.Trainer) -> dict[str, Tensor]:
    state = {name: _local(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for number, optimizer in enumerate(trainer.optimizers):
        for index, values in enumerate(optimizer.state.values()):
            state |= {f"{number}.{index}.{key}": _local(value) for key, value in values.items()}
    return state


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Equal for equal bits."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def orders(*runs: Run) -> str:
    """The argument that makes `main` do these runs."""
    return json.dumps([asdict(run) for run in runs])


def main() -> None:
    """Arguments: orders, and the folder for results."""
    torch.set_num_threads(1)
    logging.basicConfig(format="%(levelname)s rank {RANK}: %(message)s".format_map(os.environ))
    folder = Path(sys.argv[2])
    results = {}
    for fields in json.loads(sys.argv[1]):
        run = Run(**fields)
        results[run.name] = fit(run, folder / run.name)
        (folder / f"results-{os.environ['RANK']}.json").write_text(json.dumps(results))


def train() -> None:
    """One run, whose end is the end of the process. Arguments as of `main`."""
    torch.set_num_threads(1)
    (fields,) = json.loads(sys.argv[1])
    fit(Run(**fields), Path(sys.argv[2]), uncaught=True)
