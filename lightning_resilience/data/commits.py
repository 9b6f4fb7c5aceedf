"""The state of training besides parameters, in memory, as of the last places to which it can go back.

A *commit* remembers where training stands: loops, random numbers, position in the data, metrics, callbacks,
schedulers, buffers. Parameters and optimizer states are not part of it. They change only in an update, and after each
update there are new commits; so they are already what they were.

There are several commits between two updates, each a *stage*: right after the update, at the end of the batch, before
an epoch. Ranks that were interrupted at different stages go back to the earliest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_resilience._lightning import (
    ResultCollection,
    all_loops,
    connector_attributes,
    evaluation_results,
    is_lightning_class,
    progress_trackers,
    training_results,
)
from lightning_resilience.data.keeping import (
    PLAIN,
    Copies,
    PutBack,
    is_plain,
    keep,
    keep_dict,
    keep_entries,
    keep_uncounted,
)

if TYPE_CHECKING:
    from lightning_resilience.data.fit_loop import Resume

_RESULT_STATE = ("value", "cumulated_batch_size", "_forward_cache", "has_reset", "_update_count", "_computed")
_METRIC_STATE = ("_update_count", "_computed", "_forward_cache", "_is_synced", "_cache", "_should_unsync")


class Commit:
    """One remembered place.

    Attributes:
        step: Optimizer steps that were done.
        stage: Counts the commits since the last of them.
        resume: How the loop gets back to the place in its data.
        entered: Whether `on_train_start` was over.
    """

    def __init__(self, *, step: int, stage: int, resume: Resume, entered: bool, parts: list[PutBack]) -> None:
        self.step = step
        self.stage = stage
        self.resume = resume
        self.entered = entered
        self._parts = parts

    def put_back(self) -> None:
        """Undo what has changed since."""
        for part in self._parts:
            part()


class Commits:
    """All commits since the last update. Owned by the fit loop; written by the main thread, read by any.

    Args:
        trainer: Whose state is remembered.
        noticed: Called after each commit.
    """

    def __init__(self, trainer: Trainer, noticed: Callable[[], None]) -> None:
        self._trainer = trainer
        self._noticed = noticed
        self._copies = Copies()
        self._kept: tuple[Commit, ...] = ()
        self._parts: Parts | None = None

    @property
    def newest(self) -> Commit | None:
        """The last commit."""
        kept = self._kept
        return kept[-1] if kept else None

    def take(self, resume: Resume, *, entered: bool = True) -> None:
        """Remember this place."""
        step = self._trainer.global_step
        since = tuple(commit for commit in self._kept if commit.step == step)
        if self._parts is None or not resume.point.mid_epoch:  # what there is may change between epochs
            self._parts = Parts.of(self._trainer)
        parts = list(_keep_all(self._trainer, self._parts, self._copies))
        self._copies.next_round()
        stage = since[-1].stage + 1 if since else 0
        self._kept = (*since, Commit(step=step, stage=stage, resume=resume, entered=entered, parts=parts))
        self._noticed()

    def abandon(self) -> None:
        """Put back the newest commit, if there is one, and forget all: a checkpoint will replace what they are of."""
        if self._kept:
            self._kept[-1].put_back()
        self._kept, self._parts = (), None

    def go_back(self, step: int, stage: int) -> Commit:
        """Put back the state of a commit, and forget those after it.

        Raises:
            KeyError: There is no such commit.
        """
        index = {(commit.step, commit.stage): number for number, commit in enumerate(self._kept)}[step, stage]
        self._kept = self._kept[: index + 1]
        self._kept[index].put_back()
        return self._kept[index]


@dataclass(frozen=True)
class Parts:
    """What holds state, found by walking through loops and modules; done once an epoch."""

    trackers: list[dict[str, Any]]
    loops: list[tuple[dict[str, Any], list[str]]]
    modules: list[nn.Module]
    with_buffers: list[nn.Module]
    metrics: list[tuple[Metric, tuple[str, ...]]]

    @classmethod
    def of(cls, trainer: Trainer) -> Parts:
        modules = list(trainer.lightning_module.modules())
        return cls(
            trackers=[vars(tracker) for tracker in progress_trackers(trainer.fit_loop)],
            loops=[(vars(loop), _plain_names(vars(loop))) for loop in all_loops(trainer.fit_loop)],
            modules=modules,
            with_buffers=[module for module in modules if module._buffers],
            metrics=[(one, (*one._defaults, *_METRIC_STATE)) for one in modules if isinstance(one, Metric)],
        )


def _keep_all(trainer: Trainer, found: Parts, copies: Copies) -> Iterator[PutBack]:
    yield from keep_trainer(trainer, found, copies)
    yield _scalars(vars(trainer.lightning_module))
    yield keep_modules(found, copies)
    for config in trainer.lr_scheduler_configs:
        yield _through_state_dict(config.scheduler, copies)
    for optimizer in trainer.optimizers:
        yield _param_groups(optimizer, copies)


def keep_trainer(trainer: Trainer, found: Parts, copies: Copies) -> Iterator[PutBack]:
    """All but the model and what was made for training it."""
    yield _loops(found)
    yield _trainer_scalars(trainer)
    yield keep_dict(connector_attributes(trainer), copies)
    yield _results(training_results(trainer), copies)
    yield _results(evaluation_results(trainer), copies)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set in a connector
        yield _callback(callback, copies)
    yield _through_state_dict(trainer.precision_plugin, copies)
    if trainer.datamodule is not None:  # type: ignore[attr-defined]  # set in a connector
        yield _through_state_dict(trainer.datamodule, copies)  # type: ignore[attr-defined]


def _loops(found: Parts) -> PutBack:
    trackers = [attributes.copy() for attributes in found.trackers]
    loops = [[attributes[name] for name in names] for attributes, names in found.loops]

    def put_back() -> None:
        for attributes, values in zip(found.trackers, trackers, strict=True):
            attributes.update(values)
        for (attributes, names), scalars in zip(found.loops, loops, strict=True):
            attributes.update(zip(names, scalars, strict=True))

    return put_back


def _plain_names(attributes: dict[str, Any]) -> list[str]:
    return [name for name, value in attributes.items() if type(value) in PLAIN]


def _scalars(attributes: dict[str, Any]) -> PutBack:
    values = {name: value for name, value in attributes.items() if type(value) in PLAIN}
    return lambda: attributes.update(values)


def _trainer_scalars(trainer: Trainer) -> PutBack:
    should_stop, accumulate = trainer.should_stop, trainer.accumulate_grad_batches

    def put_back() -> None:
        trainer.should_stop = should_stop
        trainer.accumulate_grad_batches = accumulate
        trainer.training = True

    return put_back


def _results(results: ResultCollection | None, copies: Copies) -> PutBack:
    if results is None:
        return lambda: None
    kept = [(key, metric, keep_entries(vars(metric), _RESULT_STATE, copies)) for key, metric in results.items()]

    def put_back() -> None:
        results.clear()
        for key, metric, part in kept:
            part()
            results[key] = metric

    return put_back


def keep_modules(found: Parts, copies: Copies) -> PutBack:
    """Buffers, metrics, and which modules are in training mode."""
    modes = [module.training for module in found.modules]
    buffers = [_buffers(module, copies) for module in found.with_buffers]
    metrics = [keep_entries(vars(metric), names, copies) for metric, names in found.metrics]

    def put_back() -> None:
        for module, mode in zip(found.modules, modes, strict=True):
            module.training = mode
        for part in (*buffers, *metrics):
            part()

    return put_back


def _buffers(module: nn.Module, copies: Copies) -> PutBack:
    if isinstance(module, _NormBase):
        return keep_uncounted(module._buffers)
    return keep_dict(module._buffers, copies)


def _callback(callback: Callback, copies: Copies) -> PutBack:
    """All plain attributes; the rest through `state_dict`, if a class of the user's has that."""
    attributes = vars(callback)
    plain = keep_dict(attributes, copies)
    if not _has_own_state(type(callback)) or all(map(is_plain, attributes.values())):
        return plain
    rest = _through_state_dict(callback, copies)

    def put_back() -> None:
        plain()
        rest()

    return put_back


def _has_own_state(kind: type[Callback]) -> bool:
    return kind.state_dict is not Callback.state_dict and not is_lightning_class(kind)


def _through_state_dict(owner: Any, copies: Copies) -> PutBack:
    state = owner.state_dict()
    if not state:
        return lambda: None
    part = keep(dict(state), copies)
    return lambda: owner.load_state_dict(part())


def _param_groups(optimizer: Optimizer, copies: Copies) -> PutBack:
    """Options of the groups, and which parameters are in them."""
    kept = [keep_dict(group, copies, leave=["params"]) for group in optimizer.param_groups]
    groups = [(group, list(group["params"]), part) for group, part in zip(optimizer.param_groups, kept, strict=True)]

    def put_back() -> None:
        optimizer.param_groups[:] = [group for group, _, _ in groups]
        for group, params, part in groups:
            part()
            group["params"] = params

    return put_back
