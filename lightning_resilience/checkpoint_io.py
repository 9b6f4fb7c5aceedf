"""`Trainer(plugins=[AsyncCheckpointIO()])`: Lightning's checkpoint hooks, translated for the checkpoint engine."""

from __future__ import annotations

import io
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
from lightning_resilience._torch import own_store
from lightning_resilience.checkpoint.adviser import Adviser, advice_from
from lightning_resilience.checkpoint.archives import load_archive
from lightning_resilience.checkpoint.backpressure import POLICIES, OnBusy
from lightning_resilience.checkpoint.candidates import newest_in
from lightning_resilience.checkpoint.engine import CheckpointEngine, EngineOptions
from lightning_resilience.checkpoint.envelope import archive
from lightning_resilience.checkpoint.exchange import Alone, Exchange, gather_json
from lightning_resilience.checkpoint.history import SaveCounts, SaveReport, Verdict
from lightning_resilience.checkpoint.interval import ASSUMED_MTBF_S, IntervalAdvice
from lightning_resilience.checkpoint.restore import OPTIMIZERS, weights_only_error
from lightning_resilience.checkpoint.retention import KeepEvery, KeepLatest, checked_policies
from lightning_resilience.checkpoint.roll_call import RollCall
from lightning_resilience.checkpoint.snapshots.engine import Snapshots
from lightning_resilience.checkpoint.storage import Place, in_process_only, is_url, place_for
from lightning_resilience.checkpoint.verify import check_share, examined, first_usable
from lightning_resilience.durations import checked_seconds
from lightning_resilience.errors import (
    ConfigurationError,
    LoadError,
    MismatchedCheckpointError,
    SaveError,
    UntrustedCheckpointError,
)
from lightning_resilience.events import Event, EventLog
from lightning_resilience.keeper import CommitKeeper
from lightning_resilience.kept import scope_of

log = logging.getLogger(__name__)

_PATIENCE_ON_ERROR_S = 30.0
_PATIENCE_WITH_LOST_S = 5.0
_ROLL_CALL_S = 10.0
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
        slots: How many states can be staged or being written at a time.
        on_busy: What a `ModelCheckpoint` gets when storage is behind and all slots are in use: "latest", the new state
            takes the place of the oldest that waits for its turn; "skip", it is not saved; "wait", training waits.
            What is saved otherwise, and the last state of `fit`, is never skipped or replaced.
        timeout: How long a save may take from when its turn came until it is durable, in seconds or as a timedelta.
            One that takes longer has failed, and the next ones are tried.
        max_consecutive_failures: Training stops with an error after so many failed saves in a row; None for never.
        events: File to which every rank appends what happens, one JSON object a line; None for no file.
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
        on_busy: OnBusy = "latest",
        timeout: float | timedelta = 1800.0,
        max_consecutive_failures: int | None = 3,
        events: str | None = None,
        on_damage: Literal["previous", "raise"] = "previous",
        trust: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        snapshot_every_n_steps: int | Literal["auto"] | None = None,
        keep: Sequence[KeepLatest | KeepEvery] | None = None,
    ) -> None:
        super().__init__()
        every = _interval(snapshot_every_n_steps)
        shm_dir = _path("shm_dir", shm_dir)
        self.snapshots = None if every is None else Snapshots(shm_dir, every)
        self._storage_options = plain_options(storage_options)
        self._options_of: dict[str, Mapping[str, Any]] = {}  # by path, of saves that brought their own
        self._options = EngineOptions(
            shm_dir=shm_dir,
            slots=_at_least_one("slots", slots, "how many states to stage at a time"),
            deadline_s=checked_seconds(timeout, "AsyncCheckpointIO(timeout={})"),
            on_busy=_policy(on_busy),
            max_consecutive_failures=_failures(max_consecutive_failures),
        )
        self._events_path = None if events is None else _path("events", events)
        self._events: EventLog | None = None
        self.fall_back = _falls_back(on_damage)
        self.trust = _trusts(trust)
        self._exchange: Exchange = Alone()
        self._connected = False
        self._engine: CheckpointEngine | None = None
        self._history: list[SaveReport] = []
        self._adviser = Adviser()
        self._keep = checked_policies(keep)
        self._untold: list[Verdict] = []
        self._in_fit = True  # as far as is known: nothing tells a plugin when training starts
        self._roll_call: tuple[dist.ProcessGroup, RollCall] | None = None
        self._readable_checked = False
        self.shm_dir = shm_dir
        self.tag = 0
        self.called = ""
        self.keeper = CommitKeeper(self)
        _lightning.show_pending_saves(_is_pending)
        _lightning.hand_over(_keeper_of)
        _lightning.lend_storage_options(_options_of)
        _lightning.find_last(_last_of)

    @property
    def history(self) -> list[SaveReport]:
        """How each save of this rank went, oldest first: stall, bytes, seconds until durable, outcome, error."""
        return [*self._history, *(self._engine.history if self._engine else [])]

    @property
    def counts(self) -> SaveCounts:
        """How many saves of this rank ended how, and for how long training has waited for storage."""
        return SaveCounts.of(self.history)

    @property
    def patience_s(self) -> float:
        """For how long, in seconds, a save may wait for a free slot or an earlier save before that is an error."""
        return self._options.patience_s

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
        self.called = "file"
        self._warn_if_untrusted(checkpoint)
        self._started().save_file(
            target,
            step,
            checkpoint,
            storage_options=self.options_for(target),
            required=self._is_required(trainer),
            tag=self.tag,
        )
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
        trust, resuming = self.trusts(weights_only), trainer is not None and fitting

        def attempt(place: Place) -> tuple[Place, dict[str, Any]]:
            check_share(examined(place), 0, 1, trust)
            return place, _load_file(place, trust, map_location or "cpu", resuming)

        asked = self.place(path)
        chosen, content = first_usable(asked, Alone(), attempt, fall_back=fitting and self.fall_back)
        if trainer is not None and chosen.path != asked.path:
            _lightning.set_resumed_path(trainer, str(chosen))
        return content

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Delete a checkpoint once everything saved before this call is committed."""
        place = self.place(path)
        if self._engine is not None:
            self._engine.remove(place.path, self.options_for(place.path))
            return
        if self._in_fit and not self._history:
            log.warning(
                "Lightning asked AsyncCheckpointIO to delete a checkpoint that it never asked it to save: this strategy"
                " writes sharded checkpoints itself, synchronously. Use ResilientFSDPStrategy for asynchronous ones."
            )
        try:
            place.delete()
        except OSError as error:  # as when the writer deletes: one checkpoint too many is no reason to end a run
            log.warning("the checkpoint %s could not be deleted: %s", place, error.strerror or error)

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
            self._close(_PATIENCE_ON_ERROR_S if handling else None, to_heir=handling and self.snapshots is not None)
        except SaveError as error:
            failure = error
        self._settle(alone=handling)
        if handling and failure is not None:
            log.error("%s", failure)
        elif not handling and failure is not None:
            raise failure

    def _settle(self, alone: bool) -> None:
        """Everything is committed or has failed: tell the callbacks, unless other ranks may not come any more."""
        trainer = _lightning.calling_trainer()
        news, self._untold = self._untold, []
        if alone and trainer is not None and trainer.world_size > 1:
            self.keeper.forget()
            return
        if isinstance(self._exchange, Alone) and not alone:
            _meet()
        if trainer is not None:
            self.keeper.finish(trainer, news)

    # --- what our strategy calls, on all ranks -----------------------------------------------------------------

    def connect(self, exchange: Exchange) -> None:
        """From now on this is one rank of several."""
        self._exchange, self._connected = exchange, True
        if self.snapshots is not None:
            self.snapshots.exchange = exchange

    def leave_world(self) -> None:
        """Ranks are out for good: what they had a part in and is not committed yet never will be. Local.

        :meth:`join_world` comes next, when all ranks that go on have done this.
        """
        try:
            self._close(_PATIENCE_WITH_LOST_S)
        except SaveError as error:
            log.warning("%s", error)
        self._untold.clear()
        self.keeper.forget()
        self._exchange, self._roll_call = Alone(), None
        if self.snapshots is not None:
            self.snapshots.leave_world()

    def join_world(self, exchange: Exchange) -> None:
        """From now on this is one rank of those that go on; books of callbacks are to be restored after this."""
        self.connect(exchange)
        exchange.all_gather(b"")  # all have left: no rank takes over what another is about to delete
        if self.snapshots is not None:
            self.snapshots.join_world()

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
        self.called = "sharded"
        self._started().save_sharded(
            target,
            step,
            state,
            files,
            storage_options=self.options_for(target),
            required=self._is_required(_lightning.calling_trainer()),
            tag=self.tag,
        )
        self._say_advice(step)
        self._retain(target)
        self._finish_outside_fit()

    def rescue_snapshots(self, directory: Place) -> None:
        """Training begins: what the writer does with snapshots should this process end before it is told to leave.

        Args:
            directory: Where the run's checkpoints are.
        """
        assert self.snapshots is not None
        assert self.snapshots.run is not None
        self.snapshots.on_complete = self._started().seal
        self._started().rescue(
            self.snapshots.run, self.snapshots.shm_dir, directory.path, self.options_for(directory.path)
        )

    # --- what the keeper of ModelCheckpoint's books calls ------------------------------------------------------

    def take_verdicts(self) -> list[Verdict]:
        """See ``keeper.Saver``."""
        verdicts, self._untold = self._untold, []
        return verdicts + (self._engine.take_verdicts() if self._engine is not None else [])

    def tell(self, trainer: Trainer, message: dict[str, Any]) -> dict[str, Any]:
        """See ``keeper.Saver``."""
        if not isinstance(self._exchange, Alone):
            told: dict[str, Any] = gather_json(self._exchange, message)[0]
            return told
        return trainer.strategy.broadcast(message) if trainer.world_size > 1 else message

    def exists(self, path: str) -> bool:
        """See ``keeper.Saver``; what cannot be looked at counts as there."""
        try:
            return self.place(path).exists()
        except (OSError, ConfigurationError):
            return True

    def link(self, path: str, link: str) -> None:
        """See ``keeper.Saver``."""
        self._started().link(self.place(path).path, self.place(link).path)

    def remove_after_newest(self, path: str) -> None:
        """See ``keeper.Saver``."""
        if self._engine is None:
            self.remove_checkpoint(path)
        else:
            self._engine.remove(self.place(path).path, self.options_for(os.fspath(path)), persist=False, held=True)

    def release(self, path: str) -> None:
        """See ``keeper.Saver``."""
        if self._engine is not None:
            self._engine.release(self.place(path).path)

    def all_here(self, trainer: Trainer) -> bool:
        """Whether all ranks have come to save during an exception, at the same step; the same answer on each.

        Waits a bounded time for the others. What they save must be one state, so the step counts.
        """
        if trainer.world_size == 1 or not dist.is_initialized():
            return True
        group = dist.group.WORLD
        assert group is not None
        if self._roll_call is None or self._roll_call[0] is not group:
            store = own_store("lightning_resilience/roll_call", _ROLL_CALL_S)
            self._roll_call = group, RollCall(store, trainer.world_size, _ROLL_CALL_S)
        if self._roll_call[1](f"step {trainer.global_step}"):
            return True
        log.warning(
            "no checkpoint is saved because of the exception: within %.0f s not every rank came to save step %d. The"
            " newest checkpoint is the one to go on from.",
            _ROLL_CALL_S,
            trainer.global_step,
        )
        return False

    # --- for everybody -----------------------------------------------------------------------------------------

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
        return place_for(path, self.options_for(os.fspath(path)))

    def options_for(self, path: str) -> Mapping[str, Any] | None:
        """How to reach the storage of a path; None for a local one."""
        return self._options_of.get(path, self._storage_options) if is_url(path) else None

    def _place_to_save(self, path: _PATH, storage_options: Mapping[str, Any] | None) -> Place:
        """The same for a save, which may bring options of its own; they hold for whatever happens to that path."""
        text = os.fspath(path)
        if in_process_only(text) and max(_world_size(), self._exchange.world_size) > 1:
            raise ConfigurationError(
                f"{text} is in the memory of one process, and this job has several: no other could read it. Use a"
                " directory that all can see."
            )
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

    def _warn_if_untrusted(self, checkpoint: Mapping[str, Any]) -> None:
        """Once, and now rather than on the day the checkpoint is needed."""
        if self.trust or self._readable_checked:
            return
        self._readable_checked = True
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        try:
            load_archive(io.BytesIO(archive(rest)), "this run's checkpoint", trust=False)
        except UntrustedCheckpointError as error:
            log.warning("resuming will need AsyncCheckpointIO(trust=True): %s", error)

    def _is_required(self, trainer: Trainer | None) -> bool:
        """Whether just this state must be saved: it is not one of many, or there will be no other."""
        return self.tag == 0 or (trainer is not None and _lightning.ends_training(trainer))

    def _started(self) -> CheckpointEngine:
        if self._engine is None:
            if self._events_path is not None:
                rank = dist.get_rank() if dist.is_initialized() else 0
                self._events = EventLog(self._events_path, rank=rank)
            self._engine = CheckpointEngine(self._options, self._exchange, emit=self._emit)
        return self._engine

    def _emit(self, event: Event) -> None:
        if self._events is not None:
            self._events.write(event)

    def _say_advice(self, step: int) -> None:
        self._adviser.saved(step, time.monotonic())
        measured = sum(report.durable_s is not None for report in self.history)
        if self._in_fit and self._exchange.rank == 0 and measured >= _MEASURED:
            if news := self._adviser.news(self.advice()):
                log.info("%s", news)

    def _retain(self, path: str) -> None:
        """Ask for what the policies let go, once what was saved just now is committed."""
        if self._keep and self._exchange.rank == 0 and (scope := scope_of(_lightning.calling_trainer(), path)):
            options = self.options_for(path)
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

    def _close(self, patience_s: float | None, *, to_heir: bool = False) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            engine.close(patience_s, to_heir=to_heir)
        finally:
            self._history.extend(engine.history)
            self._untold += engine.take_verdicts() + engine.take_news()
            events, self._events = self._events, None
            if events is not None:
                events.close()


def _load_file(place: Place, trust: bool, map_location: Any, resuming: bool) -> dict[str, Any]:
    if place.is_dir():
        raise MismatchedCheckpointError(
            f"{place} is a sharded checkpoint, and this strategy reads single files. Use ResilientFSDPStrategy, or"
            f" convert it: lightning-resilience checkpoints consolidate {place} plain.ckpt"
        )
    content: dict[str, Any] = load_archive(place, str(place), trust, map_location=map_location)
    if resuming and OPTIMIZERS not in content:
        raise weights_only_error(place)
    return content


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _meet() -> None:
    """With DDP only rank 0 knows of saves; the others may look for files next, so they wait until those are there."""
    if _world_size() > 1:
        dist.barrier()


def _keeper_of(trainer: Trainer) -> CommitKeeper | None:
    plugin = trainer.strategy.checkpoint_io
    return plugin.keeper if isinstance(plugin, AsyncCheckpointIO) else None


def _is_pending(trainer: Trainer, path: str) -> bool:
    plugin = trainer.strategy.checkpoint_io
    return isinstance(plugin, AsyncCheckpointIO) and plugin.is_pending(path)


def _options_of(trainer: Trainer, directory: str) -> Mapping[str, Any] | None:
    plugin = trainer.strategy.checkpoint_io
    if not isinstance(plugin, AsyncCheckpointIO):
        return None
    plugin.place(directory)  # an error for one that cannot be, before training rather than at the first save
    return plugin.options_for(directory)


def _last_of(trainer: Trainer, directories: list[str]) -> str | None:
    """What ``ckpt_path="last"`` means for directories that are URLs; empty where there is nothing, None if none is.

    Raises:
        LoadError: There are checkpoints, but none is called "last", or none is valid.
    """
    plugin = trainer.strategy.checkpoint_io
    if not isinstance(plugin, AsyncCheckpointIO):
        return None
    places = [plugin.place(directory) for directory in directories if is_url(directory)]
    if not places:
        return None
    found = [newest_in(place, wanted=lambda name: name.startswith(_lightning.LAST)) for place in places]
    if candidates := [candidate for candidate in found if candidate is not None]:
        return max(candidates, key=lambda candidate: candidate.created_ns).path
    if others := [candidate.path for place in places if (candidate := newest_in(place, wait_s=0.0)) is not None]:
        raise LoadError(
            f'ckpt_path="last": no checkpoint of that name in {places[0]}, but there is {others[0]}. Set'
            " ModelCheckpoint(save_last=True), or pass ckpt_path=newest_checkpoint(...), which needs no such name."
        )
    log.warning('ckpt_path="last": there is no checkpoint yet in %s, training begins at step 0', places[0])
    return ""


def plain_options(options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Options that can be told to another process.

    Raises:
        ConfigurationError: They are no mapping, or one of them is an object; the message does not show the value.
    """
    if options is not None and not isinstance(options, Mapping):  # not shown: it may be a password
        raise ConfigurationError(f"storage_options is a {type(options).__name__}: a dictionary, as in {{'anon': True}}")
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


def _at_least_one(name: str, number: int, what: str) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigurationError(f"AsyncCheckpointIO({name}={number!r}): {what}, 1 or more")
    return number


def _failures(limit: int | None) -> int | None:
    what = "how many failed saves in a row stop training"
    return None if limit is None else _at_least_one("max_consecutive_failures", limit, what)


def _policy(on_busy: OnBusy) -> OnBusy:
    if on_busy not in POLICIES:
        raise ConfigurationError(f'AsyncCheckpointIO(on_busy={on_busy!r}): "latest", "skip" or "wait"')
    return on_busy


def _path(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"AsyncCheckpointIO({name}={value!r}): a path")
    return os.fspath(value)


def _trusts(trust: bool) -> bool:
    if not isinstance(trust, bool):  # a word such as "no" would count as yes
        raise ConfigurationError(f"AsyncCheckpointIO(trust={trust!r}): True or False")
    return trust


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
