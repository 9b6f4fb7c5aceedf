"""Averages over an epoch that is not over: what ``self.log(on_epoch=True)`` and torchmetrics have gathered so far.

Lightning does not save them, so after a resume they would cover the rest of the epoch only, and whatever watches
them (schedulers, early stopping, the choice of the best checkpoint) would decide differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypedDict

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import move_data_to_device
from torchmetrics import Metric

from lightning_resilience._lightning import ResultCollection, ResultMetric, result_metric

_OPTIONS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_REDUCTIONS = {torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min"}
_CPU = torch.device("cpu")


class EpochMetrics(TypedDict):
    """Plain values and tensors only."""

    logged: dict[str, dict[str, Any]]
    objects: dict[str, dict[str, Any]]


def capture_epoch_metrics(
    results: ResultCollection, module: LightningModule, before_validation: dict[str, int] | None
) -> EpochMetrics:
    """Copy what this rank has gathered in the epoch.

    Args:
        results: what was logged in training.
        module: the module that logs.
        before_validation: during a validation, :func:`update_counts` from before it. That validation will run again
            as a whole, so metrics that it has changed are left out.
    """
    logged = {key: _logged(metric) for key, metric in results.items() if _is_restorable(metric)}
    objects = {
        name: {"updates": metric.update_count, "state": move_data_to_device(dict(metric.metric_state), _CPU)}
        for name, metric in _metrics(module)
        if before_validation is None or before_validation.get(name) == metric.update_count
    }
    return {"logged": logged, "objects": objects}


def restore_epoch_metrics(
    saved: EpochMetrics, results: ResultCollection, module: LightningModule, trainer: Trainer
) -> None:
    """Put back what :func:`capture_epoch_metrics` copied."""
    device = trainer.strategy.root_device
    for name, metric in _metrics(module):
        if name in saved["objects"]:
            _restore_object(metric, saved["objects"][name], device)
    for key, entry in saved["logged"].items():
        results[key] = _restored(entry, module, trainer)


def update_counts(module: LightningModule) -> dict[str, int]:
    """How often each torchmetrics object of ``module`` was updated since its last reset."""
    return {name: metric.update_count for name, metric in _metrics(module)}


def _metrics(module: LightningModule) -> Iterator[tuple[str, Metric]]:
    return ((name, child) for name, child in module.named_modules() if isinstance(child, Metric))


def _is_restorable(metric: ResultMetric) -> bool:
    meta = metric.meta
    gathers = meta.on_epoch and not metric.has_reset
    return gathers and meta.reduce_fx in _REDUCTIONS and meta.sync.group is None


def _logged(metric: ResultMetric) -> dict[str, Any]:
    meta = metric.meta
    options = {name: getattr(meta, name) for name in _OPTIONS}
    state = {name: getattr(metric, name, None) for name in ("value", "cumulated_batch_size", "_forward_cache")}
    return {
        "options": {**options, "reduce_fx": _REDUCTIONS[meta.reduce_fx]},
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "state": move_data_to_device(state, _CPU) if metric.is_tensor else None,
    }


def _restored(entry: dict[str, Any], module: LightningModule, trainer: Trainer) -> ResultMetric:
    state = entry["state"]
    metric = result_metric(trainer, entry["options"], entry["sync"], is_tensor=state is not None)
    if state is None:
        metric.value = attrgetter(entry["options"]["metric_attribute"])(module)
    else:
        for name, value in move_data_to_device(state, trainer.strategy.root_device).items():
            setattr(metric, name, value)
    metric._update_count = 1  # "was updated"; torchmetrics warns when computing one that was not
    return metric


def _restore_object(metric: Metric, saved: dict[str, Any], device: torch.device) -> None:
    for name, value in move_data_to_device(saved["state"], device).items():
        setattr(metric, name, value)
    metric._update_count = saved["updates"]
    metric._computed = None
