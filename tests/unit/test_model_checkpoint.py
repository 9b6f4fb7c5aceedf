"""The callback that finds out how often to save: alike on all ranks, kept over a resume, else a `ModelCheckpoint`."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_resilience.checkpoint.interval import ASSUMED_MTBF_S, IntervalAdvice
from lightning_resilience.errors import ConfigurationError
from lightning_resilience.model_checkpoint import ResilientModelCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not have many workers|exists and is not empty).*")


class Advised(ResilientModelCheckpoint):
    """Measures what the test says: an interval of so many steps."""

    def __init__(self, *args: Any, wanted: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.wanted = wanted

    def advice(self, trainer: L.Trainer) -> IntervalAdvice | None:
        return IntervalAdvice(self.wanted * self._pace.step_s(), 1.0, 1.0, ASSUMED_MTBF_S, 0.0)


def fit(folder: Path, callback: ModelCheckpoint, steps: int, resume: str | None = None, **options: Any) -> L.Trainer:
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=folder,
        **options,
    )
    data: Any = DataLoader(RandomDataset(32, 200))
    trainer.fit(BoringModel(), data, ckpt_path=resume, weights_only=False)
    return trainer


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.partition("step=")[2]) for path in folder.glob("*.ckpt"))


def test_the_interval_follows_the_advice_step_by_step(tmp_path: Path) -> None:
    callback = Advised(tmp_path, wanted=50, save_top_k=-1)
    fit(tmp_path, callback, steps=210)
    assert saved_steps(tmp_path) == [10, 50, 100, 150, 200]
    assert callback.interval == 50


def test_a_resumed_run_goes_on_with_its_interval_and_counts_the_interruption(tmp_path: Path) -> None:
    fit(tmp_path, Advised(tmp_path, wanted=50, save_top_k=-1), steps=100)
    again = Advised(tmp_path, wanted=50, save_top_k=-1)
    fit(tmp_path, again, steps=160, resume=str(next(tmp_path.glob("*step=100.ckpt"))))
    assert saved_steps(tmp_path) == [10, 50, 100, 150]
    state = again.state_dict()["lightning_resilience.interval"]
    assert state["steps"] == 50
    assert state["interruptions"] == 1
    assert state["trained_s"] > again._pace.total_s > 0.0


class Follower(SingleDeviceStrategy):
    """Rank 0 says 20, whatever this rank has measured."""

    asked: int = 0

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.asked += isinstance(obj, int) and not isinstance(obj, bool)
        return 20 if isinstance(obj, int) and not isinstance(obj, bool) else obj


def test_rank_0_decides_and_is_asked_only_when_a_save_is_due(tmp_path: Path) -> None:
    strategy = Follower(torch.device("cpu"))
    fit(tmp_path, Advised(tmp_path, wanted=50, save_top_k=-1), steps=100, strategy=strategy)
    assert saved_steps(tmp_path) == [10, 20, 40, 60, 80, 100]
    assert strategy.asked == 6


def test_without_the_plugin_a_save_costs_what_it_takes(tmp_path: Path) -> None:
    callback = ResilientModelCheckpoint(tmp_path)
    trainer = fit(tmp_path, callback, steps=25)
    advice = callback.advice(trainer)
    assert advice is not None
    assert advice.cost_s == advice.write_s > 0.0
    assert callback.interval > 10  # a step of this model takes no time at all


def test_a_fixed_number_is_that_of_lightning(tmp_path: Path) -> None:
    callback = ResilientModelCheckpoint(tmp_path, every_n_train_steps=7, save_top_k=-1)
    fit(tmp_path, callback, steps=21)
    assert saved_steps(tmp_path) == [7, 14, 21]
    assert "lightning_resilience.interval" not in callback.state_dict()
    epochs = ResilientModelCheckpoint(tmp_path, every_n_train_steps=None, every_n_epochs=1)
    assert epochs.interval == 0


def test_the_key_of_the_state_does_not_change_with_the_interval(tmp_path: Path) -> None:
    first, second = ResilientModelCheckpoint(tmp_path), Advised(tmp_path, wanted=5)
    before = first.state_key
    first.load_state_dict(
        {**first.state_dict(), "lightning_resilience.interval": {"steps": 200, "trained_s": 1.0, "interruptions": 0}}
    )
    assert first.interval == 200
    assert first.state_key == before != second.state_key
    assert ResilientModelCheckpoint(tmp_path, monitor="loss").state_key != before


@pytest.mark.parametrize(
    "wrong",
    [
        {"every_n_train_steps": "often"},
        {"every_n_train_steps": 1.5},
        {"every_n_epochs": 1},
        {"train_time_interval": timedelta(1)},
    ],
)
def test_two_ways_to_say_how_often_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="every_n_train_steps"):
        ResilientModelCheckpoint(tmp_path, **wrong)


@pytest.mark.parametrize("value", [0, -1.0, True, "day", timedelta(0), float("nan")])
def test_the_time_between_faults_is_checked(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigurationError, match="mean_time_between_faults"):
        ResilientModelCheckpoint(tmp_path, mean_time_between_faults=value)
