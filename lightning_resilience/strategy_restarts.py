"""What Lightning asks a strategy while it trains, translated for the restart engine."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from typing_extensions import override

from lightning_resilience import _lightning, _torch_groups
from lightning_resilience._torch import forget_interrupted_batch, memory_of_batches, workers_end_quickly
from lightning_resilience._torch_groups import Groups, Store
from lightning_resilience.beginning import Beginning
from lightning_resilience.checkpoint.exchange import gather_json
from lightning_resilience.checkpoint.snapshots.choice import Stored
from lightning_resilience.checkpoint.snapshots.start import newest_state
from lightning_resilience.checkpoint.snapshots.stored import stored_in
from lightning_resilience.checkpoint.verify import can_go_on_from
from lightning_resilience.checkpoint_io import AsyncCheckpointIO
from lightning_resilience.data import installed_loop
from lightning_resilience.data.commits import Commits
from lightning_resilience.data.fit_loop import ResumableFitLoop
from lightning_resilience.errors import PeerFailed, StateLost
from lightning_resilience.events import EventLog, event_file
from lightning_resilience.process_wide import note_generation, process_wide, process_wide_after
from lightning_resilience.restart.control import open_control
from lightning_resilience.restart.engine import Patience, RestartEngine
from lightning_resilience.restart.events import Incident
from lightning_resilience.restart.fence import Fence
from lightning_resilience.restart.from_the_start import run_from_the_start
from lightning_resilience.restart.health import HealthCheck, begin, checked, default_checks, failures
from lightning_resilience.restart.meeting import FromCommit, FromRestorePoint, FromTheStart, Resumption
from lightning_resilience.restart.policy import RestartPolicy
from lightning_resilience.restart.reports import SETTING_UP, Standing
from lightning_resilience.restart.timeouts import Section, Timeouts, hang_seconds
from lightning_resilience.restart.watchdog import Heart
from lightning_resilience.restart.world import World
from lightning_resilience.strategy_snapshots import SnapshottingStrategy

log = logging.getLogger(__name__)

_FENCE_LIMIT_S = 10.0

EXIT_CODE_SIGTERM = 128 + signal.SIGTERM
"""What a shell shows for a process that SIGTERM has ended."""
_SIGTERM = f"{SIGTERMException.__module__}.{SIGTERMException.__qualname__}"


class RestartingStrategy(SnapshottingStrategy):
    """The restart hooks of ``ResilientFSDPStrategy``; each is called on all ranks by the thread that trains.

    ``patience`` of an instance may be replaced before ``fit``.

    Args:
        restart: When to restart; None for never.
        health_checks: What is checked before going on; None for the usual.
        hang_timeout: How long a step may take; None to learn it.
        options: For the strategies below.
    """

    def __init__(
        self,
        *,
        restart: RestartPolicy | None,
        health_checks: Sequence[HealthCheck] | None,
        hang_timeout: timedelta | float | None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.patience = Patience()
        self._health_checks = checked(health_checks)
        self._checks: Sequence[HealthCheck] = ()
        self._timeouts = Timeouts(hang_seconds(hang_timeout))
        self._heart = Heart(self._timeouts)
        self.restart = restart
        if restart is not None:
            _torch_groups.watch_groups()
        self._engine: RestartEngine | None = None
        self._stepped = self._gradients_ready = False
        self._fence = Fence(_FENCE_LIMIT_S)
        self._beginning: Beginning | None = None

    # --- life

    @override
    def _configure_launcher(self) -> None:
        """Ours, around the one that Lightning would use, if any."""
        super()._configure_launcher()
        if self.restart is not None:
            self._launcher = RestartLauncher(self, self._launcher)

    def guard_setup(self) -> None:
        """From here on faults are recovered from. Called at the end of `setup_environment`."""
        if self.restart is not None and self._trainer.state.fn == TrainerFn.FITTING and self._engine is None:
            if older := _torch_groups.groups_that_cannot_be_cut():
                log.warning(
                    "a hang in the process groups %s cannot be ended, only exceptions are recovered from there: they"
                    " were made before the strategy. Create the strategy first.",
                    older,
                )
            self._beginning = Beginning(self._trainer)
            self._engine = self._make_engine(self.restart)
            self._engine.start()

    def model_is_built(self) -> None:
        """Called in `setup` when the models of all ranks are made."""
        if self._engine is not None and self._beginning is not None:
            self._beginning.model_is_built()

    def adopt_earlier_model(self) -> None:
        """Called in `setup` before anything is made of the model."""
        if self._engine is not None and self._beginning is not None:
            self._beginning.put_back_model()

    def _make_engine(self, policy: RestartPolicy) -> RestartEngine:
        shared = process_wide()
        if shared.control is None:
            assert self.cluster_environment is not None
            first, host = _torch_groups.first_store(), self.cluster_environment.main_address
            shared.control = open_control(first, self.global_rank, self.world_size, host)
        return RestartEngine(
            control=shared.control,
            policy=policy,
            workload=Training(self),
            fence=self._fence,
            health=lambda: failures(self._checks),
            heart=self._heart,
            timeouts=self._timeouts,
            events=EventLog(event_file(str(self._trainer.default_root_dir)), rank=self.global_rank),
            generation=shared.generation,
            patience=self.patience,
        )

    def can_spare(self, failed: int) -> bool:
        """Whether training goes on without so many of the processes that there were at first. Called by any thread."""
        least = self.restart.min_world_size if self.restart is not None else None
        if least is None or self._engine is None or not self._engine.training:
            return False
        return self.num_nodes * self.num_processes - failed >= least

    def guard_training(self) -> None:
        """Training will be guarded by itself, and goes on from commits. Called at the end of `setup`."""
        if self._engine is None:
            return
        if isinstance(plugin := self.checkpoint_io, AsyncCheckpointIO):
            self._timeouts.saves_may_wait(plugin.patience_s)
        loop = self._loop
        loop.guard = self._engine.guard
        loop.commits = Commits(self._trainer, self._committed)
        loop.epoch_loop.entering = self.enter
        self._stepped = False
        self._checks = self._default_checks() if self._health_checks is None else self._health_checks
        begin(self._checks)

    def _default_checks(self) -> Sequence[HealthCheck]:
        directories = [self._trainer.default_root_dir]
        plugin = self.checkpoint_io
        if isinstance(plugin, AsyncCheckpointIO):
            directories.append(plugin.shm_dir)
        return default_checks(self.root_device, directories, self._memory_of_batches)

    def _memory_of_batches(self, device: torch.device) -> int:
        return memory_of_batches(self.model, self.optimizers, device)

    def end_restarts(self) -> None:
        """`fit` is over, or has failed."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            note_generation(engine.generation + 1)
            self._beginning = None
            self._loop.stand_alone()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """`fit` ends with this. Lightning's exception for SIGTERM would let the process end as if all were well."""
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = EXIT_CODE_SIGTERM
        super().on_exception(exception)

    # --- while training

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._gradients_ready = False
        self._loop.epoch_loop.note_batch(batch, batch_idx)
        if self._engine is not None:
            self._engine.check()
        super().on_train_batch_start(batch, batch_idx)

    def note_output(self, output: Any) -> None:
        """A training step has returned this."""
        self._loop.epoch_loop.note_output(output)

    def enter(self, section: Section) -> None:
        """Say what is being done from now on."""
        if section is Section.TRAIN_STEP and not self._stepped:
            section = Section.FIRST_STEP
        self._heart.enter(section)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._gradients_ready = self._module.automatic_optimization and not self._loop._should_accumulate()

    def before_update(self) -> None:
        """Gradients are ready. From here to the next commit an interruption must wait."""
        self._fence.close()
        self.enter(Section.OPTIMIZER)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        with self.asking_storage():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @contextmanager
    def asking_storage(self) -> Iterator[None]:
        """What is done here waits for storage, which may take its time: that is no hang of training."""
        before = self._heart.enter(Section.CHECKPOINT)
        try:
            yield
        finally:
            self._heart.enter(before)

    def _committed(self) -> None:
        if self._fence.closed:
            self._stepped = True
            self._beginning = None
        self._fence.open()
        self._gradients_ready = False
        self.enter(Section.HOOKS)
        assert self._engine is not None
        self._engine.committed()

    # --- for the engine

    def begin_again(self, *, built: bool) -> None:
        """Back to where `fit` began."""
        assert self._beginning is not None
        self._loop.stand_alone()
        self._gradients_ready = self._stepped = False
        self._beginning.put_back(built=built)

    def drop_interrupted_batch(self) -> None:
        """All of it but complete gradients. Local: collectives are not possible."""
        assert self.model is not None
        forget_interrupted_batch(self.model)

    @property
    def is_ready_for_update(self) -> bool:
        """Whether gradients are complete and the update has not begun."""
        return self._gradients_ready and not self._fence.closed

    def go_to(self, standing: Standing) -> None:
        """Put back a commit; or do the update that leads to it, if that is all there is to do."""
        newest = self._loop.commits.newest if self._loop.commits is not None else None
        if newest is not None and newest.step < standing.step:
            self._loop.epoch_loop.finish_update(self._update)
        self._gradients_ready = False
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._loop.go_back(standing.step, standing.stage)

    def go_to_restore_point(self, reason: str) -> None:
        """Load the newest snapshot that all ranks have in memory, or else the newest checkpoint.

        Raises:
            StateLost: There is neither. On all ranks alike.
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        at = self._trainer.global_step
        path = self._newest_restore_point()
        if path is None:
            raise StateLost(
                f"{reason}, and there is neither a snapshot nor a checkpoint to go back to. Take snapshots:"
                " Trainer(plugins=[AsyncCheckpointIO(snapshot_every_n_steps=...)]), or save checkpoints more often."
            )
        commit = None if self._loop.commits is None else self._loop.commits.newest
        if commit is not None:
            commit.put_back()  # modes of modules and the like, which no checkpoint has
        _lightning.restore_while_training(self._trainer, path)
        self._loop.enter_loaded()
        step = self._trainer.global_step
        if self.is_global_zero:
            log.warning("%s: going back from step %d to step %d, to %s", reason, at, step, path)

    def _newest_restore_point(self) -> str | None:
        """Its path, or the name of a snapshot; a collective."""
        plugin = self.checkpoint_io
        if not isinstance(plugin, AsyncCheckpointIO):
            return None
        plugin.wait()
        found = stored_in(self._run_directory(plugin)) if self.is_global_zero else []
        stored = [Stored(**one) for one in gather_json(self._exchange, [vars(one) for one in found])[0]]
        path = stored[0].path if stored else None
        snapshot = None
        if plugin.snapshots is not None:
            snapshot = newest_state(
                plugin.snapshots,
                stored if plugin.fall_back else stored[:1],
                lambda step, one: one is None or step >= (one.step or 0),
                lambda one: not plugin.fall_back or can_go_on_from(plugin.place(one.path), self._exchange),
            )
        if snapshot is None:
            return path
        self._to_load = snapshot, path
        return f"the snapshot of step {snapshot}"

    def _update(self) -> None:
        """Of the one optimizer, with gradients as they are."""
        self.optimizer_step(self.optimizers[0], lambda: None, self.model)

    @property
    def _loop(self) -> ResumableFitLoop:
        return installed_loop(self._trainer)

    def use_groups(self, groups: Groups) -> None:
        """Replace process groups in everything known to hold them."""
        module = self._module
        shared = process_wide_after(groups)
        meshes = [mesh for both in shared.all_meshes for mesh in (both.job, both.sharding)]
        _torch_groups.show_new_groups(groups, [*meshes, *_torch_groups.fsdp_meshes(module)], module)
        for owner in (*module.modules(), *self._trainer.callbacks, self):  # type: ignore[attr-defined]  # in a connector
            _torch_groups.replace_attributes(owner, groups)

    def why_not_with(self, world_size: int) -> str:
        """Why training cannot go on with so many ranks; empty if it can."""
        raise NotImplementedError

    def move(self, world: World, store: Store) -> None:
        """Go on as a rank of fewer."""
        raise NotImplementedError


class RestartLauncher(_Launcher):
    """Starts processes as the launcher inside it does, and ends what the engine began when `fit` is over.

    Args:
        strategy: Whose launcher this is.
        inner: The launcher that Lightning would use; None when the processes are there already.
    """

    def __init__(self, strategy: RestartingStrategy, inner: _Launcher | None) -> None:
        self._strategy = strategy
        self._inner = inner

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self._inner is not None and self._inner.is_interactive_compatible

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        run = partial(self._run, function)
        if self._inner is None:
            return run(*args, **kwargs)
        if self._strategy.restart is not None and self._strategy.restart.min_world_size is not None:
            _lightning.observe_patiently(self._inner, self._strategy.can_spare)
        return self._inner.launch(run, *args, trainer=trainer, **kwargs)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return run_from_the_start(partial(function, *args, **kwargs), lambda: self._strategy._engine)
        except PeerFailed as failed:
            if _SIGTERM not in failed.types:
                raise
            raise SIGTERMException(EXIT_CODE_SIGTERM) from failed  # a stop is one of all ranks
        finally:
            self._strategy.end_restarts()

    @override
    def kill(self, signum: Any) -> None:
        if self._inner is not None:
            self._inner.kill(signum)


class Training:
    """The workload of the engine: training with Lightning.

    Args:
        strategy: Of the trainer.
    """

    def __init__(self, strategy: RestartingStrategy) -> None:
        self._strategy = strategy

    def recovering(self) -> AbstractContextManager[None]:
        """See :class:`lightning_resilience.restart.engine.Workload`, as for all below."""
        return workers_end_quickly()

    def standing(self) -> Standing:
        """What the loop has committed."""
        commits = self._strategy._loop.commits
        newest = None if commits is None else commits.newest
        return SETTING_UP if newest is None else Standing(step=newest.step, stage=newest.stage)

    def whole(self) -> bool:
        """True outside updates."""
        return not self._strategy._fence.closed

    def ready(self) -> bool:
        """Backward is over, the update has not begun."""
        return self._strategy.is_ready_for_update

    def built(self) -> bool:
        """A barrier was passed after sharding."""
        beginning = self._strategy._beginning
        return beginning is None or beginning.built

    def updated(self) -> bool:
        """The beginning is forgotten at the first update."""
        return self._strategy._beginning is None or self._strategy._fence.closed

    def first_groups(self, *, built: bool) -> Collection[str]:
        """Those of the strategy, and of a model that stays."""
        assert self._strategy._beginning is not None
        return self._strategy._beginning.groups(built=built)

    def stop(self) -> None:
        """Forget the batch."""
        self._strategy.drop_interrupted_batch()

    def use_groups(self, groups: Groups) -> None:
        """In meshes, in FSDP2, in the checkpoint engine, in attributes of modules and callbacks."""
        self._strategy.use_groups(groups)

    def why_not_with(self, world_size: int) -> str:
        """The mesh may not divide, or the user has sharded."""
        return self._strategy.why_not_with(world_size)

    def move(self, world: World, store: Store) -> None:
        """Another rank, other groups, meshes, shards, samplers."""
        self._strategy.move(world, store)

    def restore(self, resumption: Resumption) -> None:
        """Back to a commit."""
        self._strategy._fence.open()
        match resumption:
            case FromCommit(standing=standing):
                self._strategy.go_to(standing)
            case FromRestorePoint(reason=reason):
                self._strategy.go_to_restore_point(reason)
            case FromTheStart(built=built):
                self._strategy.begin_again(built=built)

    def announce(self, incident: Incident) -> None:
        """Call `on_restart(trainer, pl_module, incident)` of the callbacks and the module that have it."""
        trainer = self._strategy._trainer
        module = trainer.lightning_module
        for owner in (*trainer.callbacks, module):  # type: ignore[attr-defined]  # in a connector
            hook = getattr(owner, "on_restart", None)
            if callable(hook):
                hook(trainer, module, incident)
