"""Every private name of Lightning that this package relies on, each with its version and its reason.

A test in ``tests/unit/test_private_names*.py`` fails when one of them moves.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import fsspec
import torch
from fsspec.utils import get_protocol
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import RestartStage, _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.progress import _BaseProgress, _ProcessedTracker, _Progress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer

__all__ = [
    "DataFetcher",
    "FitLoop",
    "PrefetchDataFetcher",
    "ProcessedTracker",
    "Progress",
    "RestartStage",
    "ResultCollection",
    "ResultMetric",
    "TrainingEpochLoop",
    "sized_len",
]

# --- exact resume (data/) ----------------------------------------------------------------------------------
# Lightning 2.6.6. The loops are private since 2.0 and have no other seam through which a run could go on
# exactly: https://github.com/Lightning-AI/pytorch-lightning/tree/2.6.6/src/lightning/pytorch/loops

FitLoop = _FitLoop
TrainingEpochLoop = _TrainingEpochLoop
DataFetcher = _DataFetcher
PrefetchDataFetcher = _PrefetchDataFetcher
Progress = _Progress
ProcessedTracker = _ProcessedTracker
ResultCollection = _ResultCollection
ResultMetric = _ResultMetric


def current(progress: Progress) -> ProcessedTracker:
    """The counts of the current run of a loop; Lightning declares a base class that lacks two of them."""
    return cast(ProcessedTracker, progress.current)


def total(progress: Progress) -> ProcessedTracker:
    """The counts of batches or epochs over all runs."""
    return cast(ProcessedTracker, progress.total)


def clear_restarting(loop: _Loop) -> None:
    """Tell a loop and its children that nothing is left to restart.

    Through the base class, because ``_FitLoop.restarting`` cannot be set to False while ``max_steps`` is set.
    """
    _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]  # a property of the class


def set_sampler_epoch(loaders: Iterable[Any], epoch: int) -> None:
    """Tell the samplers of ``loaders`` which epoch comes next, as Lightning itself does."""
    for loader in loaders:
        _set_sampler_epoch(loader, epoch)


def result_metric(trainer: Trainer, options: dict[str, Any], sync: dict[str, Any], *, is_tensor: bool) -> ResultMetric:
    """An empty accumulator, equal in its options to the one that ``LightningModule.log`` would make.

    Args:
        trainer: the trainer of the module that logs.
        options: fields of ``_Metadata``, ``reduce_fx`` by its name.
        sync: fields of ``_Sync``.
        is_tensor: whether plain values are logged, rather than a torchmetrics object.
    """
    metadata = _Metadata(**options)
    metadata.sync = _Sync(fn=trainer.strategy.reduce, **sync)
    return _ResultMetric(metadata, is_tensor)


def mark_epoch_begun(trainer: Trainer) -> None:
    """Tell the logging code that this epoch has had a batch; at the first it would empty all accumulators."""
    trainer._logger_connector._first_loop_iter = True


def callback_metrics(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The metrics that callbacks and schedulers see, without computing any (computing may communicate)."""
    return trainer._logger_connector._callback_metrics


# --- strategy ----------------------------------------------------------------------------------------------


def materialize(module: Module, device: torch.device) -> None:
    """Allocate what is on the meta device and call `reset_parameters`, as `ModelParallelStrategy` does."""
    _materialize_distributed_module(module, device)


def move_optimizers(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move the state of optimizers to `device`."""
    _optimizers_to_device(optimizers, device)


def publish_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Make `self.device_mesh` of a LightningModule return `mesh`. There is no public setter."""
    module._device_mesh = mesh


def publish_device(module: LightningModule, device: torch.device) -> None:
    """Make `self.device` of a LightningModule return `device` without moving its tensors."""
    module._device = device


def evaluate_without_inference_mode(trainer: Trainer) -> None:
    """Let validate, test and predict run under `torch.no_grad`, as Lightning does for its own FSDP strategy.

    FSDP2 allocates its gather buffers at the first forward; made in inference mode they cannot be trained on.
    Lightning decides this from the type of its strategy (`loops/utilities.py`, `_no_grad_context`).
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def ask_about_precision() -> None:
    """Let a strategy class with a `check_precision` judge `Trainer(precision=...)` instead of Lightning.

    Lightning refuses by a list of its own, without a reason and with "16-true" in it, and makes "16-mixed" into
    "bf16-mixed" on a CPU (`_AcceleratorConnector._validate_precision_choice`, 2.4 on). Called again it changes nothing.
    """
    original = _AcceleratorConnector._validate_precision_choice
    if getattr(original, "asks", False):
        return

    def validate(self: _AcceleratorConnector) -> None:
        flag = self._strategy_flag
        named = isinstance(flag, str) and flag in StrategyRegistry
        check = getattr(StrategyRegistry[flag]["strategy"] if named else flag, "check_precision", None)
        if check is None:
            original(self)
        else:
            check(str(self._precision_flag))

    validate.asks = True  # type: ignore[attr-defined]
    _AcceleratorConnector._validate_precision_choice = validate  # type: ignore[method-assign]


def averaging_callbacks(trainer: Trainer) -> list[str]:
    """Names of the callbacks that keep an unsharded copy of the model; public, here for the list of all of them."""
    kinds = (StochasticWeightAveraging, WeightAveraging)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
    return [type(callback).__name__ for callback in callbacks if isinstance(callback, kinds)]


# --- checkpoints -------------------------------------------------------------------------------------------


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside a `LightningOptimizer`, as Lightning's own strategies get it."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """What `Trainer.save_checkpoint` would hand to the strategy; calls the same `on_save_checkpoint` hooks.

    `_CheckpointConnector.dump_checkpoint` (2.0 on); there is no public name for a checkpoint that is not saved.
    """
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def set_resumed_path(trainer: Trainer, path: str | None) -> None:
    """Tell Lightning which checkpoint was loaded in the end, so that it is logged and never deleted as the old one.

    The public setter of `trainer.ckpt_path` also makes the next `fit` load it.
    """
    trainer._checkpoint_connector._ckpt_path = path


def agree_on_resume(trainer: Trainer, agree: Callable[[str | None], str | None]) -> None:
    """Let all ranks restore the same checkpoint, or none: ranks that restore and ranks that do not wait for each other.

    `_CheckpointConnector.resume_start` (2.0 on) is the one place that every rank passes with its own idea of the path.

    Args:
        trainer: The trainer of this rank.
        agree: Gets this rank's path and answers with everybody's.
    """
    connector = trainer._checkpoint_connector
    original = type(connector).resume_start

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        path = agree(None if not checkpoint_path else os.fspath(checkpoint_path))
        original(connector, path, _weights_only_of_the_run() if weights_only is None else weights_only)

    connector.resume_start = resume_start  # type: ignore[method-assign]  # of this instance


def restore_parameter_groups(trainer: Trainer) -> None:
    """Let fine-tuning callbacks add again the parameter groups that they had added before the checkpoint.

    `BaseFinetuning.on_fit_start` does that once it has its state (1.5 on; a public hook). With a strategy that restores
    after its set-up Lightning calls the hook before the callbacks have their state, so nothing would come of it. What
    is added again was unfrozen when it was added first; the callbacks have frozen it anew by now, and Lightning leaves
    it so.
    """
    before = _optimized(trainer)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            BaseFinetuning.on_fit_start(callback, trainer, trainer.lightning_module)
    for parameter in _optimized(trainer) - before:
        parameter.requires_grad = True


def _optimized(trainer: Trainer) -> set[torch.Tensor]:
    """All parameters that some optimizer has."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return {parameter for group in groups for parameter in group["params"]}


def _weights_only_of_the_run() -> bool | None:
    """What `fit(weights_only=...)` was given: `Trainer._run` (2.6) forgets it for strategies that restore late."""
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        if frame.f_code is Trainer._run.__code__:
            asked: bool | None = frame.f_locals.get("weights_only")
            return asked
    return None


def calling_trainer() -> Trainer | None:
    """The trainer that is saving or loading a checkpoint now; a plugin is not told.

    Looks up the stack for `Trainer` and `_CheckpointConnector` (2.0 on), which call plugins through the strategy.
    """
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        if isinstance(owner, _CheckpointConnector):
            return owner.trainer
    return None


def show_pending_saves(is_pending: Callable[[Trainer, str], bool]) -> None:
    """Let `ModelCheckpoint` count a checkpoint that is still being written as one that exists.

    It asks the disk whether a name is taken (`file_exists`, 2.0 on) and takes the name if not: a pending save of
    another step would be overwritten. Called again it changes nothing.
    """
    if getattr(ModelCheckpoint.file_exists, "shows_pending", False):
        return

    def file_exists(self: ModelCheckpoint, filepath: Any, trainer: Trainer) -> bool:
        self._fs.invalidate_cache()  # other processes write there
        pending = is_pending(trainer, os.fspath(filepath))  # everywhere: what it raises must not leave ranks waiting
        with asking_storage(trainer):
            here = trainer.is_global_zero and (pending or self._fs.exists(filepath))
        return trainer.strategy.reduce_boolean_decision(here, all=False)

    file_exists.shows_pending = True  # type: ignore[attr-defined]
    ModelCheckpoint.file_exists = file_exists  # type: ignore[method-assign]


def asking_storage(trainer: Trainer) -> AbstractContextManager[None]:
    """For what a rank asks of storage in the middle of training: a strategy that looks for hangs knows of it then."""
    asking: Callable[[], AbstractContextManager[None]] = getattr(trainer.strategy, "asking_storage", nullcontext)
    return asking()


class Keeper(Protocol):
    """Who does for a `ModelCheckpoint` what it would do itself, when saves are asynchronous. On all ranks, in order."""

    def work(self, callback: ModelCheckpoint, trainer: Trainer) -> AbstractContextManager[None]:
        """Around everything in which it decides what to save, and writes its books."""
        ...

    def save(self, callback: ModelCheckpoint, trainer: Trainer, path: str) -> None:
        """Save a checkpoint, and tell the loggers when it exists."""
        ...

    def link(self, callback: ModelCheckpoint, trainer: Trainer, path: str, link: str) -> None:
        """Make another name for a checkpoint when it exists."""
        ...

    def remove(self, callback: ModelCheckpoint, trainer: Trainer, path: str) -> None:
        """Delete a checkpoint when the one that replaces it exists."""
        ...

    def resume(self, callback: ModelCheckpoint, trainer: Trainer) -> None:
        """Training starts, perhaps with books from an earlier run."""
        ...

    def all_here(self, trainer: Trainer) -> bool:
        """Whether, during an exception, all ranks have come to save; the same answer on each."""
        ...


def hand_over(keeper_of: Callable[[Trainer], Keeper | None]) -> None:
    """Let a keeper do the work of `ModelCheckpoint` for trainers that have one. Called again it changes nothing.

    `ModelCheckpoint` takes a save for done when the call returns. Its steps (`_save_topk_checkpoint`,
    `_save_last_checkpoint`, `_save_checkpoint`, `_remove_checkpoint`: 1.5 on; `_link_checkpoint`: 2.1 on) have no other
    seam. `OnExceptionCheckpoint` (1.8 on) saves on one rank, and `ModelCheckpoint(save_on_exception=True)` (2.6 on).
    """
    if getattr(ModelCheckpoint, "handed_over", False):
        return
    ModelCheckpoint.handed_over = True  # type: ignore[attr-defined]

    def around(name: str, act: Callable[[Callable[..., None], Keeper, Any, Trainer, tuple[Any, ...]], None]) -> None:
        original = getattr(ModelCheckpoint, name)

        @functools.wraps(original)
        def method(self: ModelCheckpoint, trainer: Trainer, *args: Any) -> None:
            keeper = keeper_of(trainer)
            if keeper is None:
                original(self, trainer, *args)
            else:
                act(original, keeper, self, trainer, args)

        setattr(ModelCheckpoint, name, method)

    def work(original: Callable[..., None], keeper: Keeper, callback: Any, trainer: Trainer, args: Any) -> None:
        with keeper.work(callback, trainer):
            original(callback, trainer, *args)

    def together(original: Callable[..., None], keeper: Keeper, callback: Any, trainer: Trainer, args: Any) -> None:
        if callback._should_save_on_exception(trainer) and keeper.all_here(trainer):
            work(original, keeper, callback, trainer, args)

    def start(original: Callable[..., None], keeper: Keeper, callback: Any, trainer: Trainer, args: Any) -> None:
        original(callback, trainer, *args)
        with asking_storage(trainer):
            keeper.resume(callback, trainer)

    around("_save_topk_checkpoint", work)
    around("_save_last_checkpoint", work)
    around("on_exception", together)
    around("on_train_start", start)
    around("_save_checkpoint", lambda _, keeper, callback, trainer, args: keeper.save(callback, trainer, *args))
    around("_remove_checkpoint", lambda _, keeper, callback, trainer, args: keeper.remove(callback, trainer, *args))
    _hand_over_links(keeper_of)
    _hand_over_exceptions(keeper_of)


def _hand_over_links(keeper_of: Callable[[Trainer], Keeper | None]) -> None:
    """`_link_checkpoint` is static: the callback is found where it is called."""
    original = ModelCheckpoint._link_checkpoint

    @functools.wraps(original)
    def link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        keeper = keeper_of(trainer)
        if keeper is None:
            original(trainer, filepath, linkpath)
        else:
            keeper.link(sys._getframe(1).f_locals["self"], trainer, filepath, linkpath)

    ModelCheckpoint._link_checkpoint = staticmethod(link_checkpoint)  # type: ignore[method-assign]


def _hand_over_exceptions(keeper_of: Callable[[Trainer], Keeper | None]) -> None:
    original = OnExceptionCheckpoint.on_exception

    @functools.wraps(original)
    def on_exception(self: OnExceptionCheckpoint, trainer: Trainer, *args: Any, **options: Any) -> None:
        keeper = keeper_of(trainer)
        if keeper is None or keeper.all_here(trainer):
            original(self, trainer, *args, **options)

    OnExceptionCheckpoint.on_exception = on_exception  # type: ignore[method-assign]


def saved(callback: ModelCheckpoint) -> tuple[int, str]:
    """Step and path of what a `ModelCheckpoint` has saved last.

    `_last_global_step_saved` (1.5 on) keeps it from saving a step twice, `_last_checkpoint_saved` (2.1 on) is what
    `save_last="link"` links to.
    """
    return callback._last_global_step_saved, callback._last_checkpoint_saved


def set_saved(callback: ModelCheckpoint, step: int, path: str) -> None:
    """The opposite of :func:`saved`."""
    callback._last_global_step_saved, callback._last_checkpoint_saved = step, path


def ends_training(trainer: Trainer) -> bool:
    """Whether no optimizer step will follow, as far as can be told: at the end, and when an exception has ended it."""
    last_step = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
    epochs = trainer.max_epochs
    last_epoch = epochs is not None and epochs != -1 and trainer.current_epoch + 1 >= epochs and trainer.is_last_batch
    return trainer.interrupted or trainer.should_stop or last_step or last_epoch


def lend_storage_options(options_of: Callable[[Trainer, str], Mapping[str, Any] | None]) -> None:
    """Let `ModelCheckpoint` look at a bucket with the credentials that a checkpoint plugin has for it.

    It makes its file system in `setup` (2.0 on), from the URL alone. Called again it changes nothing.

    Args:
        options_of: Gets the trainer and the directory; answers with options, or None to leave things as they are.
    """
    original = ModelCheckpoint.setup
    if getattr(original, "borrows", False):
        return

    def setup(self: ModelCheckpoint, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        directory = checkpoint_directory(self, trainer)
        options = options_of(trainer, directory)
        if not options:
            original(self, trainer, pl_module, stage)
            return
        protocol = get_protocol(directory)
        before = fsspec.config.conf.get(protocol)
        fsspec.config.conf[protocol] = {**(before or {}), **options}
        try:
            original(self, trainer, pl_module, stage)
        finally:
            fsspec.config.conf.pop(protocol)
            if before is not None:
                fsspec.config.conf[protocol] = before

    setup.borrows = True  # type: ignore[attr-defined]
    ModelCheckpoint.setup = setup  # type: ignore[method-assign]


def checkpoint_directory(callback: ModelCheckpoint, trainer: Trainer) -> str:
    """Where a `ModelCheckpoint` saves, whether or not it was told (`__resolve_ckpt_dir`, 1.9 on)."""
    return os.fspath(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]


def find_last(find: Callable[[Trainer, list[str]], str | None]) -> None:
    """Answer `ckpt_path="last"` for directories that are URLs.

    Lightning strips `s3://` from what it finds there, looks for that on the local disk, finds nothing and begins from
    step 0 (`_CheckpointConnector._parse_ckpt_path`, 2.0 on; Lightning issue 18261). Called again it changes nothing.

    Args:
        find: Gets the trainer and the directories; answers with the checkpoint, with an empty string if there is
            none, or with None if this is Lightning's to answer.
    """
    original = _CheckpointConnector._parse_ckpt_path
    if getattr(original, "finds_remotely", False):
        return

    def parse(self: _CheckpointConnector, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        if ckpt_path == "last":
            callbacks = [item for item in self.trainer.checkpoint_callbacks if isinstance(item, ModelCheckpoint)]
            found = find(self.trainer, [checkpoint_directory(callback, self.trainer) for callback in callbacks])
            if found is not None:
                return found or None
        return original(self, state_fn, ckpt_path, *args, **kwargs)

    parse.finds_remotely = True  # type: ignore[attr-defined]
    _CheckpointConnector._parse_ckpt_path = parse  # type: ignore[method-assign]


LAST = ModelCheckpoint.CHECKPOINT_NAME_LAST


def save_interval(callback: ModelCheckpoint) -> int:
    """Optimizer steps between two saves of a `ModelCheckpoint`; 0 when epochs or time decide.

    `ModelCheckpoint._every_n_train_steps` (1.5 on) is read at every batch and is public only as an argument.
    """
    return callback._every_n_train_steps


def set_save_interval(callback: ModelCheckpoint, steps: int) -> None:
    """The opposite of :func:`save_interval`."""
    callback._every_n_train_steps = steps


def last_saved_step(callback: ModelCheckpoint) -> int:
    """The step of the newest save of a `ModelCheckpoint` (`_last_global_step_saved`, 1.5 on)."""
    return callback._last_global_step_saved


# --- in-process restart ------------------------------------------------------------------------------------
# Lightning 2.6.6, as above: what the loops remember is spread over their attributes.


def progress_trackers(loop: _Loop) -> list[Any]:
    """All counters of a loop and its children, innermost last (`_BaseProgress`, 2.0 on)."""
    found: list[Any] = []
    for child in all_loops(loop):
        for value in vars(child).values():
            if isinstance(value, _BaseProgress):
                found += _with_parts(value)
    return found


def _with_parts(progress: _BaseProgress) -> list[_BaseProgress]:
    inner = (value for value in vars(progress).values() if isinstance(value, _BaseProgress))
    return [progress, *(part for value in inner for part in _with_parts(value))]


def all_loops(loop: _Loop) -> list[_Loop]:
    """A loop and the loops inside it."""
    inner = [child for value in vars(loop).values() if isinstance(value, _Loop) for child in all_loops(value)]
    return [loop, *inner]


def connector_attributes(trainer: Trainer) -> dict[str, Any]:
    """What the logging code remembers: metrics for the progress bar, the loggers and the callbacks."""
    return vars(trainer._logger_connector)


def training_results(trainer: Trainer) -> ResultCollection:
    """What was logged in the running epoch."""
    return trainer.fit_loop.epoch_loop._results


def evaluation_results(trainer: Trainer) -> ResultCollection:
    """What was logged in validation."""
    return trainer.fit_loop.epoch_loop.val_loop._results


def is_lightning_class(cls: type) -> bool:
    """Whether Lightning itself defines a class, so that its attributes are all there is to it."""
    return cls.__module__.startswith(("lightning.", "pytorch_lightning."))


def call_train_batch_end(trainer: Trainer, outputs: Any, batch: Any, batch_idx: int) -> None:
    """The hooks after a batch, in the order of `_TrainingEpochLoop.advance`."""
    call._call_callback_hooks(trainer, "on_train_batch_end", outputs, batch, batch_idx)
    call._call_lightning_module_hook(trainer, "on_train_batch_end", outputs, batch, batch_idx)
    trainer._logger_connector.on_batch_end()


def update_train_step_metrics(trainer: Trainer) -> None:
    """Send what was logged in a step to the loggers."""
    trainer._logger_connector.update_train_step_metrics()


def renumber(environment: ClusterEnvironment, rank: int, world_size: int) -> None:
    """Make this process another rank of fewer, for all who ask a cluster environment or the environment variables.

    Environments of torchrun and Slurm take no number but their own (`set_global_rank`, 2.0 on, does nothing there), and
    some code asks for their type; so methods of the instance are replaced. The local rank stays: it tells the device.
    """
    answers = {"global_rank": lambda: rank, "world_size": lambda: world_size}
    ignored = ("set_global_rank", "set_world_size", "validate_settings")
    vars(environment).update(answers, **dict.fromkeys(ignored, lambda *_, **__: None))
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if name in os.environ:
            os.environ[name] = str(value)
    for marked in (rank_zero_only, fabric_rank_zero_only):
        vars(marked)["rank"] = rank


def accumulation_schedulers(trainer: Trainer) -> list[GradientAccumulationScheduler]:
    """Callbacks that set `accumulate_grad_batches` at the start of an epoch; public, here for the list of them."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler)]


def forget_loaders(loop: _FitLoop) -> None:
    """Let loaders be asked for again, with the samplers that go with the present ranks: `setup_data` (2.0 on)."""
    validation = loop.epoch_loop.val_loop
    abandon_evaluation(validation)
    validation._combined_loader = None
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
    loop._combined_loader = loop._data_fetcher = None


class PatientObserver(_ChildProcessObserver):
    """Watches the processes that Lightning has started; ends all when one fails, unless the others can go on.

    Args:
        processes: All but this one.
        can_spare: Whether the others go on without so many; asked at each failure.
    """

    def __init__(self, processes: Sequence[Any], can_spare: Callable[[int], bool]) -> None:
        super().__init__(os.getpid(), list(processes))
        self._can_spare = can_spare
        self._spared = 0

    def _run(self) -> bool:
        failed = [process for process in self._child_processes if process.poll()]
        if failed and self._can_spare(self._spared + len(failed)):
            self._spared += len(failed)
            self._child_processes = [process for process in self._child_processes if process not in failed]
        return super()._run()


def observe_patiently(launcher: _Launcher, can_spare: Callable[[int], bool]) -> None:
    """Let the next launch be watched by a `PatientObserver`, if it starts processes.

    `_SubprocessScriptLauncher.launch` (2.0 on) starts its own observer by a function of its module.
    """
    if not isinstance(launcher, _SubprocessScriptLauncher) or launcher.cluster_environment.creates_processes_externally:
        return
    name, functions = "_launch_process_observer", vars(subprocess_script)
    original = functions[name]

    def launch_process_observer(processes: list[Any]) -> None:
        functions[name] = original
        PatientObserver(processes, can_spare).start()

    functions[name] = launch_process_observer


def abandon_evaluation(loop: _EvaluationLoop) -> list[Any]:
    """End a validation that was interrupted; returns its loaders, whose workers have ended."""
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
        loop._data_fetcher = None
    loop._logged_outputs = []
    return [] if loop._combined_loader is None else loop._combined_loader.flattened


def step_outputs(output: Any, accumulated: int) -> dict[str, Any]:
    """What hooks at the end of a batch get for what a training step returned (`ClosureResult`, 2.0 on)."""
    return ClosureResult.from_training_step_output(output, accumulated).asdict() if output is not None else {}


def restore_while_training(trainer: Trainer, path: str) -> None:
    """Load a checkpoint into a trainer that is training: what `Trainer._run` does at its start (2.0 on).

    What was logged so far and what `ModelCheckpoint` remembers of saves that lie ahead now is forgotten.
    """
    connector = trainer._checkpoint_connector
    type(connector).resume_start(connector, path)  # not ours, which asks all ranks: they have agreed already
    connector.restore_model()
    connector.restore_datamodule()
    connector.restore_callbacks()
    connector.restore_training_state()
    connector.resume_end()
    trainer._logger_connector.reset_results()
    trainer._logger_connector.reset_metrics()
    evaluation_results(trainer).reset()
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._last_global_step_saved = min(callback._last_global_step_saved, trainer.global_step)


def given_loaders(trainer: Trainer) -> list[Any]:
    """The loaders that `fit` was given, if any; those that hooks return are not there yet (`_data_source`, 2.0 on)."""
    fit_loop = trainer.fit_loop
    sources = (fit_loop._data_source, fit_loop.epoch_loop.val_loop._data_source)
    given = [source.instance for source in sources if not source.is_module()]
    return [loader for one in given if one is not None for loader in CombinedLoader(one).flattened]


def notice_sigterm(trainer: Trainer) -> None:
    """Let SIGTERM do no more than be noticed, and be passed on to the processes that this one has started.

    `_SignalConnector._sigterm_notifier_fn` (2.6) broadcasts inside the signal handler: when not every rank is
    signalled, or one in the middle of a collective, that never ends. Call it before the handlers are registered.
    """
    connector = trainer._signal_connector

    def notice(signum: int, _: Any) -> None:
        first, connector.received_sigterm = not connector.received_sigterm, True
        if first and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)

    vars(connector)["_sigterm_notifier_fn"] = notice


def abandon_fit(trainer: Trainer) -> None:
    """Undo what `Trainer._run` holds when it is left in the middle and will be run again (2.0 on).

    As `Trainer._teardown` does, but strategy, loggers and callbacks go on.
    """
    abandon_evaluation(trainer.fit_loop.epoch_loop.val_loop)
    trainer.fit_loop.teardown()
    trainer._signal_connector.teardown()
