"""What Lightning does around snapshots, translated for the snapshot engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_resilience import _lightning
from lightning_resilience.checkpoint.candidates import META, brought_up_to_date, was_asked_for
from lightning_resilience.checkpoint.envelope import archive
from lightning_resilience.checkpoint.restore import Target
from lightning_resilience.checkpoint.snapshots.choice import Request
from lightning_resilience.checkpoint.snapshots.contents import RANK_STATE
from lightning_resilience.checkpoint.snapshots.engine import Snapshots
from lightning_resilience.checkpoint.snapshots.points import Restored, State
from lightning_resilience.checkpoint.snapshots.run import RUN_FILE, forget_run
from lightning_resilience.checkpoint.snapshots.start import begin_run
from lightning_resilience.checkpoint.snapshots.stored import stored_in
from lightning_resilience.checkpoint.state import clean_name
from lightning_resilience.checkpoint.storage import Place
from lightning_resilience.checkpoint_io import AsyncCheckpointIO
from lightning_resilience.data import capture_rank_state, listen, mark_not_validated, stash_rank_state
from lightning_resilience.errors import LoadError, MismatchedCheckpointError, SaveError
from lightning_resilience.strategy_checkpoints import CheckpointingStrategy

log = logging.getLogger(__name__)


class SnapshottingStrategy(CheckpointingStrategy):
    """The snapshot hooks of ``ResilientFSDPStrategy``; every one is called on all ranks.

    A snapshot holds what a checkpoint of the same moment holds: it is taken when a batch with an optimizer step is
    over, all its hooks included, and before the validation that may be due.
    """

    _to_load: tuple[int, str | None] | None = None  # step of the snapshot, and the path it stands in for
    _snapshots_prepared = False
    _taking = False
    _listening = False

    # --- a start -----------------------------------------------------------------------------------------------

    @override
    def _agreed_resume_path(self, path: str | None) -> str | None:
        """The checkpoint to load; the name of a snapshot if that is newer."""
        plugin = self.checkpoint_io
        if self._trainer.state.fn != TrainerFn.FITTING or not isinstance(plugin, AsyncCheckpointIO):
            return super()._agreed_resume_path(path)
        if self.is_global_zero:
            path = brought_up_to_date(path, self._run_directory(plugin))
        path = super()._agreed_resume_path(path)
        directory = self._run_directory(plugin)
        if plugin.snapshots is None:
            self._together(lambda: forget_run(directory) if self.is_global_zero else None, SaveError)
            return path
        request = Request(plugin.place(path).resolved().path if path else None, was_asked_for(directory))
        step = begin_run(plugin.snapshots, directory, request, lambda: stored_in(directory), fall_back=plugin.fall_back)
        if step is None:
            return path
        self._to_load = step, path
        if self.is_global_zero:
            self._tell_choice(step, path, directory, plugin.snapshots.shm_dir)
        return f"the snapshot of step {step} in {plugin.snapshots.shm_dir}"

    def _tell_choice(self, step: int, path: str | None, directory: Place, shm_dir: str) -> None:
        found = f"going on from the snapshot of step {step} in {shm_dir}"
        if path is not None:
            log.info("%s, in place of %s", found, path)
        else:  # a start that was killed before its first save; or somebody has removed what was there
            log.warning("%s, as there is no checkpoint in %s. %s", found, directory, _how_to_begin_anew(directory))

    def _run_directory(self, plugin: AsyncCheckpointIO) -> Place:
        """Where the run's checkpoints go; this tells one run from another."""
        callback = self._trainer.checkpoint_callback
        dirpath = getattr(callback, "dirpath", None) or self._trainer.default_root_dir
        place = plugin.place(dirpath)
        return place.resolved()

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Put the state back: of the snapshot that was chosen, or of a checkpoint.

        Raises:
            LoadError: It cannot be used.
        """
        if self._to_load is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        (step, path), self._to_load = self._to_load, None
        plugin, snapshots = self._plugin_with_snapshots()
        target = self._target(plugin, weights_only, fitting=True)
        restored = self._together(lambda: self._from_snapshot(snapshots, step, target), LoadError)
        stash_rank_state(self._trainer, restored.rank_state)
        self._optimizers_from = f"(the snapshot of step {step})", False
        _lightning.set_resumed_path(self._trainer, path)
        return restored.content

    def _from_snapshot(self, snapshots: Snapshots, step: int, target: Target) -> Restored:
        try:
            return snapshots.load(step, target)
        except MismatchedCheckpointError as error:
            how = _how_to_begin_anew(self._run_directory(self._plugin_with_snapshots()[0]))
            raise MismatchedCheckpointError(
                f"{error} It is in memory, from the last start of this run. {how}"
            ) from None

    def _plugin_with_snapshots(self) -> tuple[AsyncCheckpointIO, Snapshots]:
        plugin = self.checkpoint_io
        assert isinstance(plugin, AsyncCheckpointIO)
        assert plugin.snapshots is not None
        return plugin, plugin.snapshots

    @property
    def _snapshots(self) -> Snapshots | None:
        plugin = self.checkpoint_io
        return plugin.snapshots if isinstance(plugin, AsyncCheckpointIO) else None

    # --- while training ----------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._snapshots_prepared = False
        if self._snapshots is not None:
            self._snapshots.begin(self._trainer.global_step)
            self._name_heir()
            listen(self._trainer, self)
            self._listening = True

    def _name_heir(self) -> None:
        """Should this process end without a word, its writer makes a checkpoint of the newest snapshot."""
        if self._trainer.checkpoint_callbacks:
            plugin, _ = self._plugin_with_snapshots()
            plugin.rescue_snapshots(self._run_directory(plugin))

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Once, when the optimizers have done a step: plan, so that the first snapshot is as short as any."""
        super().on_train_batch_start(batch, batch_idx)
        snapshots = self._snapshots
        if snapshots is None or self._snapshots_prepared or not all(item.state for item in self.optimizers):
            return
        self._snapshots_prepared = True
        with self._state_as_shards():
            state = self._named_state(
                self.lightning_module_state_dict(), [self.optimizer_state(item) for item in self.optimizers]
            )
        self._together(lambda: snapshots.prepare(State(state, self._steady(state), {})), SaveError)

    def batch_done(self) -> None:
        """See ``BatchListener``."""
        snapshots, step = self._snapshots, self._trainer.global_step
        if snapshots is None or not snapshots.is_due(step):
            return
        snapshots.take(step, self._state)
        if not self._module.automatic_optimization:  # its updates may not pass through `optimizer_step`
            snapshots.finish()

    def pausing(self) -> None:
        """See ``BatchListener``: what comes may swap weights (averages of them, for a validation)."""
        if self._snapshots is not None:
            self._snapshots.hold_back()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The closure is forward and backward; the update after it waits for a snapshot that is being copied."""
        snapshots = self._snapshots
        if snapshots is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def closure_then_wait() -> Any:
            result = closure()
            snapshots.hold_back()
            return result

        return super().optimizer_step(optimizer, closure_then_wait, model, **kwargs)

    def _state(self) -> State:
        with self._state_as_shards():
            checkpoint = _lightning.dump_checkpoint(self._trainer)
        mark_not_validated(checkpoint)
        state = self._named_state(checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states"))
        files = {META: archive(checkpoint), RANK_STATE: archive(capture_rank_state(self._trainer))}
        self._warn_if_untrusted(self._plugin_with_snapshots()[0], files)
        return State(state, self._steady(state), files)

    def _steady(self, state: dict[str, Any]) -> set[str]:
        """Flat names of parameters and of what optimizers keep for them."""
        parameters = self._module.named_parameters(remove_duplicate=False)
        names = {f"state_dict.{clean_name(name)}" for name, _ in parameters}
        for key in state.keys() - {"state_dict"}:
            for name, values in state[key]["state"].items():
                names.update(f"{key}.state.{name}.{value}" for value in values)
        return names

    @property
    @override
    def _as_shards(self) -> bool:
        return self._taking or super()._as_shards

    @contextmanager
    def _state_as_shards(self) -> Iterator[None]:
        """Also with ``state_dict_type="full"``: nothing is gathered for a snapshot."""
        self._taking = True
        try:
            yield
        finally:
            self._taking = False

    # --- end ---------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        """Snapshots have served when all is committed; after a fault, or a save that failed, they wait for the next."""
        keep, handling = True, sys.exc_info()[1] is not None
        try:
            super().teardown()
            keep = handling
        finally:
            if self._listening:
                listen(self._trainer, None)
                self._listening = False
            if self._snapshots is not None:
                self._snapshots.close(keep)


def _how_to_begin_anew(directory: Place) -> str:
    """For whoever did not want to go on from a snapshot."""
    return (
        f"To begin anew, call fit without ckpt_path, or remove {directory} with all in it: the hidden {RUN_FILE} says"
        " which snapshots belong to it."
    )
