"""The plugin under Lightning's own strategy for one device, in this process: names, evaluation, when it waits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, Dataset

from lightning_resilience import AsyncCheckpointIO, _lightning
from lightning_resilience.errors import ConfigurationError, DamagedCheckpointError, LoadError
from lightning_resilience.strategy_checkpoints import CheckpointingStrategy

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice about tiny runs

SCORES = [0.1, 0.5, 0.4, 0.6, 0.3, 0.2, 0.7, 0.05]


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return len(SCORES)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.log("score", SCORES[self.global_step % len(SCORES)])
        loss: torch.Tensor = self.layer(batch).mean()
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("weight", self.layer.weight.sum())

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def a_trainer(plugin: AsyncCheckpointIO | None, checkpoint: ModelCheckpoint) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        plugins=[plugin] if plugin else None,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def loader() -> Any:
    return DataLoader(Rows(), batch_size=1)


def kept(directory: Path, plugin: AsyncCheckpointIO | None) -> tuple[dict[str, int], float, str]:
    """Which step each file holds, the best score, and the name of the best file."""
    checkpoint = ModelCheckpoint(
        directory, filename="{epoch}", monitor="score", save_top_k=2, every_n_train_steps=1, mode="min"
    )
    a_trainer(plugin, checkpoint).fit(Model(), loader())
    steps = {name: torch.load(directory / name, weights_only=False)["global_step"] for name in os.listdir(directory)}
    assert checkpoint.best_model_score is not None
    return steps, float(checkpoint.best_model_score), os.path.basename(checkpoint.best_model_path)


def test_a_name_that_is_still_being_written_is_taken(tmp_path: Path) -> None:
    """Without a step in the name Lightning counts versions, and asks the disk which are taken."""
    assert kept(tmp_path / "ours", AsyncCheckpointIO(on_busy="wait")) == kept(tmp_path / "stock", None)


def test_a_path_that_cannot_be_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """Were it raised on rank 0 alone, the others would wait for its answer for ever."""

    def wait(decision: bool, all: bool) -> bool:
        raise AssertionError("rank 1 waits for rank 0")

    strategy = SimpleNamespace(checkpoint_io=AsyncCheckpointIO(), reduce_boolean_decision=wait)
    rank1: Any = SimpleNamespace(is_global_zero=False, strategy=strategy)
    with pytest.raises(ConfigurationError, match=r"nowhere://a/b\.ckpt"):
        ModelCheckpoint(dirpath=tmp_path).file_exists("nowhere://a/b.ckpt", rank1)


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[AsyncCheckpointIO, Path]:
    """Two checkpoints, of which the newer one is damaged."""
    plugin = AsyncCheckpointIO(on_busy="wait")
    a_trainer(plugin, ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)).fit(Model(), loader())
    newest = tmp_path / "epoch=0-step=8.ckpt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    return plugin, newest


def test_evaluating_never_falls_back_to_another_model(damaged: tuple[AsyncCheckpointIO, Path], tmp_path: Path) -> None:
    plugin, path = damaged
    trainer = a_trainer(plugin, ModelCheckpoint(tmp_path / "other"))
    with pytest.raises(DamagedCheckpointError, match="step=8"):
        trainer.test(Model(), loader(), ckpt_path=str(path), verbose=False)


def test_training_falls_back_and_says_what_it_resumed(damaged: tuple[AsyncCheckpointIO, Path], tmp_path: Path) -> None:
    plugin, path = damaged
    trainer = a_trainer(plugin, ModelCheckpoint(tmp_path / "other"))
    trainer.fit(Model(), loader(), ckpt_path=str(path))
    assert str(trainer.ckpt_path).endswith("step=4.ckpt")
    assert trainer.global_step == 8


def test_saves_stay_asynchronous_in_a_fit_after_a_validation(tmp_path: Path) -> None:
    plugin = AsyncCheckpointIO(on_busy="wait")
    trainer = a_trainer(plugin, ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1))
    module = Model()
    trainer.validate(module, loader(), verbose=False)
    seen: list[bool] = []
    watch: Any = lambda *_: seen.append(plugin._engine is not None)  # noqa: E731  # Lightning asks an instance too
    module.on_train_batch_start = watch  # type: ignore[method-assign]
    trainer.fit(module, loader())
    assert seen == [False, *[True] * (len(SCORES) - 1)]


class RestoresLate(SingleDeviceStrategy):
    """Restores after its set-up, as sharding strategies do, and notes how it was told to load."""

    restore_checkpoint_after_setup = True
    asked: bool | None = None

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        _lightning.agree_on_resume(trainer, lambda path: path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self.asked = weights_only
        return super().load_checkpoint(checkpoint_path, weights_only)


@pytest.mark.parametrize("asked", [True, False, None])
def test_weights_only_of_fit_is_not_lost_on_the_way(asked: bool | None, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1)
    a_trainer(None, checkpoint).fit(Model(), loader())
    strategy = RestoresLate("cpu")
    trainer = L.Trainer(strategy=strategy, max_epochs=1, logger=False, enable_progress_bar=False)
    trainer.fit(Model(), loader(), ckpt_path=checkpoint.best_model_path, weights_only=asked)
    assert strategy.asked is asked


class Told:
    """An exchange whose other rank was told something else."""

    rank = 0
    world_size = 2

    def __init__(self, other: str | None) -> None:
        self._other = json.dumps(other).encode()

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data, self._other]


@pytest.mark.parametrize("other", ["a.ckpt", "b.ckpt", None])
def test_all_ranks_resume_from_the_path_of_rank_0(other: str | None) -> None:
    strategy = CheckpointingStrategy()
    strategy._exchange = Told(other)
    assert strategy._agreed_resume_path("a.ckpt") == "a.ckpt"


def test_a_rank_that_alone_sees_a_checkpoint_is_an_error_on_all() -> None:
    strategy = CheckpointingStrategy()
    strategy._exchange = Told("a.ckpt")
    with pytest.raises(LoadError, match=r"rank 1 was told to resume from a\.ckpt and rank 0 from nothing"):
        strategy._agreed_resume_path(None)
    strategy._exchange = Told(None)
    assert strategy._agreed_resume_path(None) is None
