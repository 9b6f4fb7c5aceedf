"""What Lightning asks a sharding strategy about checkpoints, translated for the checkpoint engine."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_resilience import _lightning
from lightning_resilience._torch import map_tensors
from lightning_resilience.checkpoint.candidates import META, RANK_FILE
from lightning_resilience.checkpoint.envelope import archive
from lightning_resilience.checkpoint.exchange import Alone, Exchange, gather_json, together
from lightning_resilience.checkpoint.reader import load_archive
from lightning_resilience.checkpoint.restore import OPTIMIZERS, RANK_STATES, Target, apply_optimizers, restore
from lightning_resilience.checkpoint.state import by_number, expected_bytes, model_state, optimizer_state
from lightning_resilience.checkpoint_io import AsyncCheckpointIO
from lightning_resilience.data import capture_rank_state, install, stash_rank_state
from lightning_resilience.errors import CheckpointError, LoadError, SaveError, UntrustedCheckpointError
from lightning_resilience.process_wide import process_wide
from lightning_resilience.sharding.shard import reshard_all

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class CheckpointingStrategy(ModelParallelStrategy):
    """The checkpoint hooks of ``ResilientFSDPStrategy``; every one is called on all ranks.

    Saves go to :class:`AsyncCheckpointIO` if that is the trainer's plugin, and otherwise to stock Lightning's
    synchronous code. Loading is ours in both cases.
    """

    _exchange: Exchange = Alone()
    _readable_checked = False
    _optimizers_from: tuple[str, bool] | None = None  # see `apply_optimizers`; while their state is not yet in place
    _prepared = False
    _roll_call: tuple[BaseException, bool] | None = None

    @override
    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        if self.world_size > 1:
            self._exchange = self._make_exchange(self.world_size)
        if isinstance(self.checkpoint_io, AsyncCheckpointIO):
            self.checkpoint_io.connect(self._exchange)
        install(self._trainer)
        _lightning.notice_sigterm(self._trainer)
        _lightning.agree_on_resume(self._trainer, self._agreed_resume_path)

    def _make_exchange(self, world_size: int) -> Exchange:
        """Of so many ranks, which are all there are; a collective."""
        if world_size == 1:
            return Alone()
        return process_wide().exchange(self._timeout)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._prepared = False
        plugin = self.checkpoint_io
        if isinstance(plugin, AsyncCheckpointIO) and self._trainer.checkpoint_callbacks:
            nbytes = expected_bytes(self._module, self.optimizers)
            self._together(lambda: plugin.reserve(nbytes), SaveError)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Once, when the optimizers have done a step: plan the saves, so that the first is as short as any."""
        super().on_train_batch_start(batch, batch_idx)
        plugin = self.checkpoint_io
        if self._prepared or not all(optimizer.state for optimizer in self.optimizers):
            return
        self._prepared = True
        wanted = self._trainer.checkpoint_callbacks and self._save_distributed_checkpoint
        if wanted and isinstance(plugin, AsyncCheckpointIO):
            state = self._named_state(
                self.lightning_module_state_dict(), [self.optimizer_state(item) for item in self.optimizers]
            )
            self._together(lambda: plugin.prepare(state), SaveError)

    @staticmethod
    def _named_state(model: dict[str, Any], optimizers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """As Lightning names them in a sharded checkpoint."""
        return {"state_dict": model, **{f"optimizer_{index}": item for index, item in enumerate(optimizers)}}

    @property
    def _as_shards(self) -> bool:
        """Whether the state is asked for in the pieces of this rank."""
        return self._save_distributed_checkpoint

    # --- save --------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """References to the live shards, not copies; with ``state_dict_type="full"`` whole tensors on rank 0."""
        reshard_all(self._module)
        state = model_state(self._module)
        return state if self._as_shards else self._gathered(state)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The same for an optimizer; never runs a step to find out what its state would be."""
        optimizer = _lightning.unwrapped(optimizer)
        state = optimizer_state(self._module, optimizer)
        if self._as_shards:
            return state
        gathered = self._gathered(state)
        return by_number(gathered, self._module) if gathered else {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        plugin = self.checkpoint_io
        if self._is_alone:
            return
        if not isinstance(plugin, AsyncCheckpointIO):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self._save_distributed_checkpoint:
            self._save_sharded(plugin, dict(checkpoint), filepath, storage_options)
        else:
            self._save_full(plugin, checkpoint, filepath, storage_options)

    @property
    def _is_alone(self) -> bool:
        """Whether an exception is being handled with which other ranks have nothing to do.

        They are in the middle of something else and will not come to save: whoever waited for them would hang.
        """
        error, plugin = sys.exc_info()[1], self.checkpoint_io
        if error is None or self.world_size == 1 or not isinstance(plugin, AsyncCheckpointIO):
            return False
        if self._roll_call is None or self._roll_call[0] is not error:
            self._roll_call = error, plugin.all_here(self._trainer)
        return not self._roll_call[1]

    @override
    def barrier(self, name: str | None = None) -> None:
        if name != "Trainer.save_checkpoint" or not self._is_alone:
            super().barrier(name)

    def _save_sharded(
        self, plugin: AsyncCheckpointIO, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None
    ) -> None:
        """Two steps, as an error of one rank must not meet another rank in a collective."""
        state = self._named_state(checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", []))
        files = self._together(lambda: self._small_files(plugin, checkpoint), SaveError)
        step = checkpoint["global_step"]
        self._together(lambda: plugin.save_sharded(path, step, state, files, storage_options), SaveError)

    def _small_files(self, plugin: AsyncCheckpointIO, checkpoint: dict[str, Any]) -> dict[str, bytes]:
        files = {RANK_FILE.format(self.global_rank): archive(capture_rank_state(self._trainer))}
        if self.is_global_zero:
            files[META] = archive(checkpoint)
        self._warn_if_untrusted(plugin, files)
        return files

    def _save_full(
        self, plugin: AsyncCheckpointIO, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None
    ) -> None:
        state = self._together(lambda: archive(capture_rank_state(self._trainer)), SaveError)
        content = {**checkpoint, RANK_STATES: self._exchange.all_gather(state)}

        def save() -> None:
            if self.is_global_zero:
                plugin.save_checkpoint(content, path, storage_options)

        self._together(save, SaveError)

    def _warn_if_untrusted(self, plugin: AsyncCheckpointIO, files: Mapping[str, bytes]) -> None:
        """Once, and now rather than on the day the checkpoint is needed."""
        if plugin.trust or self._readable_checked:
            return
        self._readable_checked = True
        try:
            for name, data in files.items():
                load_archive(io.BytesIO(data), f"{name} of this run's checkpoints", trust=False)
        except UntrustedCheckpointError as error:
            log.warning("resuming will need AsyncCheckpointIO(trust=True): %s", error)

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """Whole tensors in host memory on rank 0, nothing elsewhere; one tensor at a time."""

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            return whole.cpu() if self.is_global_zero else torch.empty(0)

        if self._is_alone:
            return {}
        with torch.no_grad():
            gathered = map_tensors(gather, state)
        return gathered if self.is_global_zero else {}

    # --- load --------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Put the newest usable checkpoint, at or before this path, into the model.

        In ``fit`` the optimizers' state is read too. It is put in place by :meth:`load_optimizer_state_dict`, when
        callbacks have theirs: some add parameter groups.

        Raises:
            LoadError: There is none that can be used.
        """
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        plugin = self.checkpoint_io if isinstance(self.checkpoint_io, AsyncCheckpointIO) else AsyncCheckpointIO()
        plugin.wait(checkpoint_path)
        self.barrier()
        asked = plugin.place(checkpoint_path)
        target = self._target(plugin, weights_only, fitting)
        restored = restore(asked, target, self._exchange, fall_back=fitting and plugin.fall_back)
        stash_rank_state(self._trainer, restored.rank_state)
        self._optimizers_from = (str(restored.place), not restored.place.is_dir()) if fitting else None
        if fitting and restored.place.path != asked.path:
            _lightning.set_resumed_path(self._trainer, str(restored.place))
        return restored.content

    def _target(self, plugin: AsyncCheckpointIO, weights_only: bool | None, fitting: bool) -> Target:
        reshard_all(self._module)
        return Target(
            module=self._module,
            optimizers=[_lightning.unwrapped(optimizer) for optimizer in self.optimizers] if fitting else (),
            strict=self._module.strict_loading,
            trust=plugin.trusts(weights_only),
        )

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        """Whether something is left to do for :meth:`load_optimizer_state_dict`."""
        return self._optimizers_from is not None

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Lightning calls this in ``fit`` when model and callbacks are restored.

        Raises:
            MismatchedCheckpointError: The checkpoint belongs to other optimizers.
        """
        assert self._optimizers_from is not None
        (label, whole), self._optimizers_from = self._optimizers_from, None
        _lightning.restore_parameter_groups(self._trainer)
        target = Target(self._module, [_lightning.unwrapped(optimizer) for optimizer in self.optimizers])
        self._together(lambda: apply_optimizers(target, checkpoint[OPTIMIZERS], label, whole=whole), LoadError)

    def _agreed_resume_path(self, path: str | None) -> str | None:
        """Rank 0's, which every rank must be able to follow."""
        paths = gather_json(self._exchange, path)
        if paths[0] is None and any(paths):
            rank = next(rank for rank, other in enumerate(paths) if other)
            raise LoadError(
                f"rank {rank} was told to resume from {paths[rank]} and rank 0 from nothing. Does every rank see the"
                " same checkpoint directory? It must be on a file system that all nodes share."
            )
        agreed: str | None = paths[0]
        return agreed

    def _together(self, act: Callable[[], _T], error_type: type[CheckpointError]) -> _T:
        return together(self._exchange, act, error_type)

    # --- end ---------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        """Leave when every save is committed: what a rank does next may depend on the files it finds."""
        super().teardown()
        self._roll_call = None
        if sys.exc_info()[1] is None:
            self._together(self.checkpoint_io.teardown, SaveError)
        else:  # the other ranks may never come
            self.checkpoint_io.teardown()

    @property
    def _module(self) -> Any:
        module = self.lightning_module
        assert module is not None
        return module

    @property
    def _trainer(self) -> Trainer:
        trainer: Trainer = self._module.trainer
        return trainer
