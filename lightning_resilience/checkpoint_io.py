"""`Trainer(plugins=[AsyncCheckpointIO()])`: Lightning's checkpoint hooks, translated for the checkpoint engine."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from lightning.fabric.plugins.io import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_resilience import _lightning
from lightning_resilience.checkpoint.adviser import Adviser, advice_from
from lightning_resilience.checkpoint.engine import CheckpointEngine, EngineOptions
from lightning_resilience.checkpoint.exchange import Alone, Exchange
from lightning_resilience.checkpoint.history import SaveReport
from lightning_resilience.checkpoint.interval import ASSUMED_MTBF_S, IntervalAdvice
from lightning_resilience.checkpoint.reader import load_archive
from lightning_resilience.checkpoint.retention import KeepEvery, KeepLatest, checked_policies
from lightning_resilience.checkpoint.snapshots.engine import Snapshots
from lightning_resilience.checkpoint.storage import Place, is_url, place_for
from lightning_resilience.checkpoint.verify import choose
from lightning_resilience.errors import ConfigurationError, MismatchedCheckpointError, SaveError
from lightning_resilience.kept import scope_of

log = logging.getLogger(__name__)

_PATIENCE_ON_ERROR_S = 30.0
_MEASURED = 3  # saves before advice is given unasked: the first is not like the others


class AsyncCheckpointIO(CheckpointIO):
    """Copies the state to shared memory and returns; a process beside each rank writes, verifies and commits it.

    Unlike Lightning's class of the same name, which clones tensors on their device and pickles them in a thread of
    the training process, this one also takes sharded checkpoints, keeps saves, deletions and loads in order, shows
    a checkpoint only when it is complete, and checks every byte when it is loaded.

    With :class:`~lightning_resilience.ResilientFSDPStrategy` every rank writes its own shards. With DDP and on a
    single device rank 0 writes one file. Lightning's own sharded strategies do not call a checkpoint plugin.

    Args:
        shm_dir: Directory on a memory file system where the state is staged. Each rank needs ``slots`` times the
            size of its part of the state there.
        slots: How many states can be staged or being written at a time. A save waits while all are in use.
        timeout: How long a save may take to become durable, in seconds or as a timedelta.
        on_damage: What ``fit`` does when the checkpoint it shall resume from is damaged: use the one "previous" to
            it with a loud warning, or "raise".
        trust: Unpickle any object when loading. It can run any code: only for checkpoints you trust.
        storage_options: How to reach a file system that is named by a URL (`s3://bucket/run`), as fsspec takes it:
            credentials, endpoints. Plain values only; they are passed on as they are and never shown.
        snapshot_every_n_steps: Keep the newest complete state of each rank in `shm_dir` and take a new one every so
            many optimizer steps, or as often as 1 % of the time allows with "auto". A restart on the same machines
            goes on from it. Needs room for two more states beside ``slots``, and `ResilientFSDPStrategy`.
        keep: Which checkpoints in the ``dirpath`` of a ``ModelCheckpoint`` stay, as in ``[KeepLatest(3),
            KeepEvery(1000)]``; what any policy keeps is kept. The others are deleted after each commit.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(
        self,
        *,
        shm_dir: str = "/dev/shm",
        slots: int = 2,
        timeout: float | timedelta = 1800.0,
        on_damage: Literal["previous", "raise"] = "previous",
        trust: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        snapshot_every_n_steps: int | Literal["auto"] | None = None,
        keep: Sequence[KeepLatest | KeepEvery] | None = None,
    ) -> None:
        super().__init__()
        every = _interval(snapshot_every_n_steps)
        self.snapshots = None if every is None else Snapshots(shm_dir, every)
        self._storage_options = plain_options(storage_options)
        self._options_of: dict[str, Mapping[str, Any]] = {}  # by path, of saves that brought their own
        self._options = EngineOptions(
            shm_dir=shm_dir, slots=_at_least_one(slots), deadline_s=_seconds(timeout), on_busy="wait"
        )
        self.fall_back = _falls_back(on_damage)
        self.trust = trust
        self._exchange: Exchange = Alone()
        self._connected = False
        self._engine: CheckpointEngine | None = None
        self._history: list[SaveReport] = []
        self._adviser = Adviser()
        self._keep = checked_policies(keep)
        self._in_fit = True  # as far as is known: nothing tells a plugin when training starts
        _lightning.show_pending_saves(_is_pending)

    @property
    def history(self) -> list[SaveReport]:
        """How each save of this rank went, oldest first: stall, bytes, seconds until durable, error."""
        return [*self._history, *(self._engine.history if self._engine else [])]

    def advice(self, *, mean_time_between_faults: float | timedelta = ASSUMED_MTBF_S) -> IntervalAdvice | None:
        """How often to save, from what saves have cost so far; None before the first is durable.

        Args:
            mean_time_between_faults: In seconds or as a timedelta; a day by default.
        """
        stalls_s = [report.stall_s for report in self.history]
        writes_s = [report.durable_s for report in self.history if report.durable_s is not None]
        mtbf_s = mean_time_between_faults
        return advice_from(stalls_s, writes_s, mtbf_s.total_seconds() if isinstance(mtbf_s, timedelta) else mtbf_s)

    # --- what Lightning calls with DDP and single devices, on rank 0 -------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Stage ``checkpoint`` as one file that ``torch.load`` reads.

        Raises:
            SaveError: It could not be staged; outside ``fit``, also when it could not be written.
        """
        target = self._place_to_save(path, storage_options).path
        trainer = _lightning.calling_trainer()
        self._in_fit = self._in_fit or (trainer is not None and trainer.training)
        self._warn_if_no_snapshots()
        step = int(checkpoint.get("global_step", 0))
        self._started().save_file(target, step, checkpoint, storage_options=self._options_for(target))
        self._say_advice(step)
        self._retain(target)
        self._finish_outside_fit()

    @override
    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify and read a single-file checkpoint, or the newest valid one before it.

        Raises:
            LoadError: There is none that can be used.
        """
        self.wait(path)
        trainer = _lightning.calling_trainer()
        fitting = trainer is None or trainer.state.fn == TrainerFn.FITTING
        chosen = choose(self.place(path), Alone(), fall_back=fitting and self.fall_back)
        if trainer is not None and chosen.path != self.place(path).path:
            _lightning.set_resumed_path(trainer, str(chosen))
        if chosen.is_dir():
            raise MismatchedCheckpointError(
                f"{chosen} is a sharded checkpoint, and this strategy reads single files. Use ResilientFSDPStrategy,"
                f" or convert it: python -m lightning.fabric.utilities.consolidate_checkpoint {chosen}"
            )
        content: dict[str, Any] = load_archive(
            chosen, str(chosen), self.trusts(weights_only), map_location=map_location or "cpu"
        )
        return content

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Delete a checkpoint once everything saved before this call is committed."""
        place = self.place(path)
        if self._engine is not None:
            self._engine.remove(place.path, self._options_for(place.path))
            return
        if self._in_fit and not self._history:
            log.warning(
                "Lightning asked AsyncCheckpointIO to delete a checkpoint that it never asked it to save: this strategy"
                " writes sharded checkpoints itself, synchronously. Use ResilientFSDPStrategy for asynchronous ones."
            )
        place.delete()

    @override
    def teardown(self) -> None:
        """Wait until everything is durable and give the shared memory back.

        Raises:
            SaveError: The last save failed. Not while another exception is being handled: then it is logged, and
                what is pending is left to the writer processes, which finish it in any case.
        """
        handling = sys.exc_info()[1] is not None
        self._in_fit = False
        failure: SaveError | None = None
        try:
            self._close(_PATIENCE_ON_ERROR_S if handling else None)
        except SaveError as error:
            failure = error
        if handling and failure is not None:
            log.error("%s", failure)
        elif not handling:
            if isinstance(self._exchange, Alone):
                _meet()
            if failure is not None:
                raise failure

    # --- what our strategy calls, on all ranks -----------------------------------------------------------------

    def connect(self, exchange: Exchange) -> None:
        """From now on this is one rank of several."""
        self._exchange, self._connected = exchange, True
        if self.snapshots is not None:
            self.snapshots.exchange = exchange

    def reserve(self, nbytes: int) -> None:
        """Training starts: get shared memory for this many bytes ready, and a writer to take them.

        Raises:
            ArenaError: There is not enough shared memory.
        """
        self._in_fit = True
        self._started().reserve(nbytes)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """The optimizers have their state now: see ``CheckpointEngine.prepare``."""
        self._started().prepare(state)

    def save_sharded(
        self,
        path: _PATH,
        step: int,
        state: Mapping[str, Any],
        files: Mapping[str, bytes],
        storage_options: Any | None = None,
    ) -> None:
        """Stage this rank's part of a sharded checkpoint; see ``CheckpointEngine.save_sharded``."""
        target = self._place_to_save(path, storage_options).path
        self._started().save_sharded(target, step, state, files, storage_options=self._options_for(target))
        self._say_advice(step)
        self._retain(target)
        self._finish_outside_fit()

    def wait(self, path: _PATH | None = None) -> None:
        """Wait until the pending saves (to ``path``) are durable or have failed."""
        if self._engine is not None:
            self._engine.wait(None if path is None else self.place(path).path, self._options.deadline_s)

    def is_pending(self, path: _PATH) -> bool:
        """Whether a checkpoint of this name is on its way."""
        place = self.place(path)  # an error for a path that cannot be, also before the first save
        return self._engine is not None and not self._engine.wait(place.path, timeout_s=0.0)

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self._engine is not None and not self._engine.wait(timeout_s=0.0)

    def trusts(self, weights_only: bool | None) -> bool:
        """Whether any object may be unpickled; what a call asks for wins over the plugin's argument."""
        return self.trust if weights_only is None else not weights_only

    def place(self, path: _PATH) -> Place:
        """A path as Lightning has it, on its storage.

        Raises:
            ConfigurationError: It is a URL of a kind that nothing here knows.
        """
        return place_for(path, self._options_for(os.fspath(path)))

    def _options_for(self, path: str) -> Mapping[str, Any] | None:
        return self._options_of.get(path, self._storage_options) if is_url(path) else None

    def _place_to_save(self, path: _PATH, storage_options: Mapping[str, Any] | None) -> Place:
        """The same for a save, which may bring options of its own; they hold for whatever happens to that path."""
        text = os.fspath(path)
        if storage_options is not None:
            if not is_url(text):
                raise ConfigurationError(
                    f"storage_options are for remote file systems, and {text} is a local path. Leave them out."
                )
            self._options_of[text] = plain_options(storage_options) or {}
        return self.place(path)

    def _warn_if_no_snapshots(self) -> None:
        if self.snapshots is not None and not self._connected:
            self.snapshots = None
            log.warning(
                "AsyncCheckpointIO(snapshot_every_n_steps=...) takes no snapshots with this strategy, which tells a"
                " plugin only of saves. Use ResilientFSDPStrategy, or leave it out."
            )

    def _started(self) -> CheckpointEngine:
        if self._engine is None:
            self._engine = CheckpointEngine(self._options, self._exchange)
        return self._engine

    def _say_advice(self, step: int) -> None:
        self._adviser.saved(step, time.monotonic())
        measured = sum(report.durable_s is not None for report in self.history)
        if self._in_fit and self._exchange.rank == 0 and measured >= _MEASURED:
            if news := self._adviser.news(self.advice()):
                log.info("%s", news)

    def _retain(self, path: str) -> None:
        """Ask for what the policies let go, once what was saved just now is committed."""
        if self._keep and self._exchange.rank == 0 and (scope := scope_of(_lightning.calling_trainer(), path)):
            options = self._options_for(path)
            self._started().retain(
                scope.directory,
                self._keep,
                spared=scope.spared,
                resumed_from=scope.resumed_from,
                storage_options=options,
            )

    def _finish_outside_fit(self) -> None:
        """After training nobody tears us down, and whoever saves then expects the checkpoint to be there."""
        if not self._in_fit:
            self._close(None)

    def _close(self, patience_s: float | None) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            engine.close(patience_s)
        finally:
            self._history.extend(engine.history)


def _meet() -> None:
    """With DDP only rank 0 knows of saves; the others may look for files next, so they wait until those are there."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _is_pending(trainer: Trainer, path: str) -> bool:
    plugin = trainer.strategy.checkpoint_io
    return isinstance(plugin, AsyncCheckpointIO) and plugin.is_pending(path)


def plain_options(options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Options that can be told to another process.

    Raises:
        ConfigurationError: One of them is an object; the message says which, and does not show it.
    """
    for key, value in (options or {}).items():
        try:
            same = json.loads(json.dumps({key: value})) == {key: value}
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ConfigurationError(
                f"storage_options[{key!r}] holds a {type(value).__name__}. The options travel to another process, so"
                " they must be plain values: strings, numbers, lists, dictionaries with strings as keys. Credentials"
                " can also come from the environment or from fsspec's configuration files."
            )
    return None if options is None else dict(options)


def _at_least_one(slots: int) -> int:
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 1:
        raise ConfigurationError(f"AsyncCheckpointIO(slots={slots!r}): how many states to stage at a time, 1 or more")
    return slots


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or seconds <= 0:
        raise ConfigurationError(f"AsyncCheckpointIO(timeout={timeout!r}): seconds or a timedelta, more than 0")
    return float(seconds)


def _falls_back(on_damage: str) -> bool:
    if on_damage not in ("previous", "raise"):
        raise ConfigurationError(f'AsyncCheckpointIO(on_damage={on_damage!r}): "previous" or "raise"')
    return on_damage == "previous"


def _interval(every: int | Literal["auto"] | None) -> int | Literal["auto"] | None:
    if every is None or every == "auto" or (isinstance(every, int) and not isinstance(every, bool) and every >= 1):
        return every
    raise ConfigurationError(
        f'AsyncCheckpointIO(snapshot_every_n_steps={every!r}): optimizer steps, 1 or more, "auto", or None for none'
    )
