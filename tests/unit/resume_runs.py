"""Tiny training runs that are written to a checkpoint somewhere and compared, number by number, with resumed ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_resilience.data import capture_rank_state, install, stash_rank_state

SAMPLES, BATCH = 12, 2
PER_EPOCH = SAMPLES // BATCH


class Samples(Dataset[torch.Tensor]):
    """Map-style; remembers which samples were loaded (in this process)."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.data = torch.arange(count * 4, dtype=torch.float32).reshape(count, 4) / 10
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        return self.data[index]


class Stream(IterableDataset[torch.Tensor]):
    """Iterable without a length and without a state."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.data = Samples(count).data

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.data


class SizedStream(Stream):
    """Iterable with a length, without a state."""

    def __len__(self) -> int:
        return len(self.data)


class StatefulLoader:
    """Shuffles by its own epoch counter and tells where it is."""

    def __init__(self) -> None:
        self.data = Samples().data
        self.epoch = -1
        self.position = 0
        self.drawn: list[int] = []
        self._resuming = False

    def __len__(self) -> int:
        return PER_EPOCH

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self._resuming:
            self._resuming = False
        else:
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        while self.position < PER_EPOCH:
            at, self.position = self.position, self.position + 1
            self.drawn.append(at)
            yield self.data[order[at * BATCH : at * BATCH + BATCH]]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position, self._resuming = state["epoch"], state["position"], True


class UnsizedStatefulLoader:
    """The same without a length, so that the trainer looks one batch ahead."""

    def __init__(self) -> None:
        self._loader = StatefulLoader()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, int]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._loader.load_state_dict(state)


class RandomBatches:
    """A custom batch sampler that shuffles with Python's generator."""

    batch_size, drop_last = BATCH, False

    def __len__(self) -> int:
        return PER_EPOCH

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        for at in range(0, SAMPLES, BATCH):
            yield order[at : at + BATCH]


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LOADERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: DataLoader(Samples(), batch_size=BATCH),
    "random": lambda: DataLoader(Samples(), batch_size=BATCH, shuffle=True),
    "generator": lambda: DataLoader(Samples(), batch_size=BATCH, shuffle=True, generator=_seeded()),
    "workers": lambda: DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=1, persistent_workers=True),
    "batch_sampler": lambda: DataLoader(Samples(), batch_sampler=RandomBatches()),
    "stateful": StatefulLoader,
    "unsized_stateful": UnsizedStatefulLoader,
    "iterable": lambda: DataLoader(SizedStream(), batch_size=BATCH),
    "unsized": lambda: DataLoader(Stream(), batch_size=BATCH),
}


class Net(pl.LightningModule):
    """Draws random numbers wherever it can: in training, in validation, in hooks."""

    def __init__(self, *, scheduler: str = "step") -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.net = nn.Sequential(self.hidden, nn.Dropout(0.5), nn.Linear(8, 1))
        self.scheduler = scheduler
        self.losses: list[tuple[int, int, float]] = []
        self.validations: list[tuple[int, float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).pow(2).mean()
        loss = loss + float(np.random.rand()) * self.hidden.weight.sum()
        self.losses.append((self.current_epoch, batch_idx, loss.item()))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = (self.net(batch) * torch.rand(1)).pow(2).mean()
        if not self.trainer.sanity_checking:
            self.validations.append((self.global_step, loss.item()))
        self.log("val_loss", loss)

    def on_train_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        torch.rand(5)

    def on_train_epoch_end(self) -> None:
        torch.rand(7)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        if self.scheduler == "step":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)
        interval = self.scheduler.removeprefix("plateau_")
        return [optimizer], [{"scheduler": plateau, "interval": interval, "monitor": "val_loss", "strict": False}]


class MemoryLogger(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step if step is not None else -1, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class ExactStrategy(SingleDeviceStrategy):
    """What a strategy does for exact resume, on one CPU and with a checkpoint of one file."""

    def __init__(self, *, rank_state: bool = True) -> None:
        super().__init__(device="cpu")
        self.rank_state = rank_state

    def setup_environment(self) -> None:
        super().setup_environment()
        install(self.trainer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.rank_state:
            checkpoint = {**checkpoint, "rank_state": capture_rank_state(self.trainer)}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        stash_rank_state(self.trainer, checkpoint.get("rank_state"))
        return checkpoint

    @property
    def trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


class SaveAt(Checkpoint):
    """Writes one checkpoint, in the given hook, the first time that ``when`` holds."""

    def __init__(self, path: Path, hook: str, when: Callable[[pl.Trainer], bool]) -> None:
        self.path, self.when = path, when
        self.saved_after: int | None = None
        setattr(self, hook, self._save)

    @property
    def state_key(self) -> str:
        return f"SaveAt-{self.path.name}"

    def _save(self, trainer: pl.Trainer, module: Net, *args: Any) -> None:
        if self.saved_after is None and not trainer.sanity_checking and self.when(trainer):
            trainer.save_checkpoint(self.path)
            self.saved_after = len(module.losses)


@dataclass
class Run:
    """One finished run."""

    model: Net
    logger: MemoryLogger
    trainer: pl.Trainer
    loader: Any

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def seed_all(seed: int) -> None:
    """Unlike ``seed_everything``, without environment variables."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def fit(
    loader: Any,
    *,
    seed: int = 1,
    strategy: Any = None,
    callbacks: list[pl.Callback] | None = None,
    ckpt_path: Path | None = None,
    scheduler: str = "step",
    make: Callable[[], Net] | None = None,
    **options: Any,
) -> Run:
    """Train a fresh model in a fresh trainer."""
    seed_all(seed)
    model = make() if make else Net(scheduler=scheduler)
    logger = MemoryLogger()
    defaults: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 1, "log_every_n_steps": 1}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy or ExactStrategy(),
        logger=logger,
        callbacks=callbacks or [],
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks or []),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **options},
    )
    validation = DataLoader(Samples(4), batch_size=2)
    trainer.fit(model, loader, validation, ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
    return Run(model, logger, trainer, loader)
