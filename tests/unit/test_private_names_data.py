"""Fails when Lightning or torch moves something that exact resume relies on."""

from __future__ import annotations

import inspect
import multiprocessing
import time
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _Sync
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_resilience._lightning import (
    DataFetcher,
    FitLoop,
    PrefetchDataFetcher,
    RestartStage,
    ResultMetric,
    TrainingEpochLoop,
    callback_metrics,
    clear_restarting,
    mark_epoch_begun,
    result_metric,
)
from lightning_resilience._torch import workers_end_quickly
from lightning_resilience.data import mark_not_validated
from lightning_resilience.data.epoch_metrics import _OPTIONS


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(logger=False, accelerator="cpu", max_steps=5)


def test_fit_loop_has_its_parts(trainer: Trainer) -> None:
    names = {"epoch_loop", "epoch_progress", "max_batches", "_combined_loader", "_data_fetcher", "_restart_stage"}
    names |= {"_combined_loader_states_to_load", "_last_train_dl_reload_epoch", "_loaded_from_state_dict"}
    assert names <= set(vars(trainer.fit_loop))
    assert RestartStage.RESTARTED_MID_EPOCH


def test_epoch_loop_has_its_parts(trainer: Trainer) -> None:
    names = {"batch_progress", "scheduler_progress", "automatic_optimization", "val_loop", "_results"}
    assert names | {"_skip_next_val"} <= set(vars(trainer.fit_loop.epoch_loop))
    assert hasattr(trainer, "reload_dataloaders_every_n_epochs")


@pytest.mark.parametrize(
    ("owner", "method", "called_by"),
    [
        (FitLoop, "_load_combined_loader_states", FitLoop.setup_data),
        (FitLoop, "setup_data", FitLoop.run),
        (FitLoop, "setup_data", FitLoop.on_advance_start),
        (FitLoop, "reset", FitLoop.run),
        (TrainingEpochLoop, "on_run_start", TrainingEpochLoop.run),
        (TrainingEpochLoop, "on_advance_end", TrainingEpochLoop.run),
        (TrainingEpochLoop, "update_lr_schedulers", TrainingEpochLoop.on_advance_end),
        (TrainingEpochLoop, "_should_check_val_fx", TrainingEpochLoop.on_advance_end),
        (DataFetcher, "reset", DataFetcher.__iter__),
        (CombinedLoader, "_state_dicts", FitLoop.on_save_checkpoint),
    ],
)
def test_overridden_methods_are_still_called(owner: type, method: str, called_by: object) -> None:
    assert hasattr(owner, method)
    assert f".{method}(" in inspect.getsource(called_by)  # type: ignore[arg-type]  # a function


def test_data_is_iterated_after_the_loader_states_are_loaded() -> None:
    source = inspect.getsource(FitLoop.setup_data)
    assert source.index("_load_combined_loader_states()") < source.index("iter(self._data_fetcher)")


def test_prefetching_is_for_loaders_without_length() -> None:
    fetcher = PrefetchDataFetcher()
    fetcher.setup(CombinedLoader([iter([1, 2])]))
    iter(fetcher)
    assert fetcher.batches
    fetcher.setup(CombinedLoader([[1, 2]]))
    iter(fetcher)
    assert not fetcher.batches


def test_restarting_can_be_cleared_despite_max_steps(trainer: Trainer) -> None:
    trainer.fit_loop.restarting = False
    assert trainer.fit_loop.restarting, "Lightning fixed this; clear_restarting can go"
    clear_restarting(trainer.fit_loop)
    assert not trainer.fit_loop.restarting
    assert not trainer.fit_loop.epoch_loop.restarting


def test_logging_has_its_parts(trainer: Trainer) -> None:
    assert callback_metrics(trainer) == {}
    mark_epoch_begun(trainer)
    assert trainer._logger_connector._first_loop_iter is True
    assert set(_OPTIONS) | {"reduce_fx", "_sync"} == set(_Metadata.__dataclass_fields__)
    assert {"fn", "_should", "rank_zero_only", "_op", "_group"} == set(_Sync.__dataclass_fields__)


def test_result_metric_equals_the_one_that_log_makes(trainer: Trainer) -> None:
    results = trainer.fit_loop.epoch_loop._results
    reduce = trainer.strategy.reduce
    results.log("training_step", "loss", torch.tensor(1.0), on_step=True, sync_dist_fn=reduce)
    options = {"fx": "training_step", "name": "loss", "on_step": True, "on_epoch": True, "reduce_fx": "mean"}
    made = result_metric(trainer, options, {"_should": False, "rank_zero_only": False}, is_tensor=True)
    assert isinstance(made, ResultMetric)
    assert made.meta == results["training_step.loss"].meta
    assert {"value", "cumulated_batch_size", "_forward_cache", "has_reset"} <= set(vars(made))


def test_torchmetrics_has_its_parts() -> None:
    metric = MeanMetric()
    metric.update(1.0)
    assert metric.update_count == metric._update_count == 1
    assert set(metric.metric_state) == set(metric._defaults)
    assert hasattr(metric, "_computed")


def test_data_loader_takes_its_sampler_when_it_makes_an_iterator() -> None:
    loader: DataLoader[int] = DataLoader(range(4))  # type: ignore[arg-type]  # a sequence is a dataset
    object.__setattr__(loader, "batch_sampler", [[3], [0]])
    assert [int(batch) for batch in loader] == [3, 0]


def test_sampler_epoch_is_set_through_the_batch_sampler() -> None:
    class Sampler:
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    class Loader:
        sampler = Sampler()

    _set_sampler_epoch(Loader(), 3)
    assert Loader.sampler.epoch == 3


def test_a_checkpoint_says_where_its_newest_validation_stands() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    progress.is_last_batch = True
    checkpoint = {"loops": {"fit_loop": trainer.fit_loop.state_dict()}}
    assert checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["is_last_batch"]
    mark_not_validated(checkpoint)
    assert not checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["is_last_batch"]
    assert progress.is_last_batch, "the running trainer is left alone"


class Sleepy(Dataset[int]):
    """Whose samples never come."""

    def __init__(self) -> None:
        self.begun = multiprocessing.Event()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self.begun.set()
        time.sleep(1000.0)
        return index


def test_workers_that_hang_are_given_a_moment_only() -> None:
    dataset = Sleepy()
    iterator: Any = iter(DataLoader(dataset, num_workers=1))
    assert dataset.begun.wait(30.0)
    interval = torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL
    before = time.monotonic()
    with workers_end_quickly():
        iterator._shutdown_workers()
    assert 0.1 < time.monotonic() - before < interval
    assert not iterator._workers[0].is_alive()
    assert interval == torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL
