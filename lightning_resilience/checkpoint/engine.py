"""The checkpoint engine of one rank: stage, hand over, remember how it went.

Has never heard of Lightning. Its methods are called by the training thread; with several ranks, every rank
calls them in the same order. The flow of a save:

1. the ranks agree on path and attempt, whether everybody knows the layout, and what happens when storage is behind
   (one small collective);
2. the first time: layouts are planned and told to rank 0 (one more);
3. a slot of the arena is taken; when none is free a waiting save gives way, or the new one, or training waits;
4. the state is copied into it - from here on training may change every tensor;
5. the writer process is told, and does the rest.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_resilience._torch import is_dense, tensors_in
from lightning_resilience.checkpoint import heirs, staging
from lightning_resilience.checkpoint.admission import Admission, Wish, admit
from lightning_resilience.checkpoint.attempts import folder_of
from lightning_resilience.checkpoint.backpressure import Action, OnBusy
from lightning_resilience.checkpoint.envelope import without_crc
from lightning_resilience.checkpoint.exchange import Alone, Exchange
from lightning_resilience.checkpoint.history import History, SaveReport, Verdict
from lightning_resilience.checkpoint.layout import Leaf, flatten, signature
from lightning_resilience.checkpoint.messages import Done, FileImage, Link, Remove, Rescue, Retain, Save
from lightning_resilience.checkpoint.plans import Plans
from lightning_resilience.checkpoint.retention import KeepEvery, KeepLatest, encode_policies
from lightning_resilience.checkpoint.slots import SLACK, Slots
from lightning_resilience.checkpoint.snapshots.run import Run
from lightning_resilience.checkpoint.staging import Slot
from lightning_resilience.checkpoint.values import archived
from lightning_resilience.checkpoint.writer import WriterClient, nobody
from lightning_resilience.errors import SaveError, WriterError
from lightning_resilience.events import Event

log = logging.getLogger(__name__)

_PATIENCE_AT_EXIT_S = 30.0


@dataclass(frozen=True)
class EngineOptions:
    """How the engine stages and writes.

    Attributes:
        shm_dir: Directory on a memory file system for the arena.
        slots: States that can be staged or being written at a time; each costs a shard's size of host memory.
        deadline_s: Seconds, from when its turn came, after which a save that is not durable counts as failed.
        on_busy: What happens to a save when every slot is taken; see ``backpressure``.
        max_consecutive_failures: So many failed saves in a row are an error; None for never.
    """

    shm_dir: str = "/dev/shm"
    slots: int = 2
    deadline_s: float = 1800.0
    on_busy: OnBusy = "latest"
    max_consecutive_failures: int | None = None

    @property
    def patience_s(self) -> float:
        """How long to wait for a slot: longer than for the deadline of a save, which ends it and frees its slot."""
        return 1.2 * self.deadline_s + 5.0


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A save that is on its way through this rank's training thread."""

    path: str
    step: int
    tag: int
    required: bool
    began: float
    attempt: str
    world_size: int
    storage_options: Mapping[str, Any] | None = field(repr=False)
    waited_s: float


class CheckpointEngine:
    """Owned by the checkpoint IO; lives from the first use in a ``fit`` to :meth:`close`.

    Args:
        options: How to stage and write.
        exchange: How ranks agree; alone by default.
        writer: Makes the client of the writer process from ``emit``; tests pass their own.
        emit: Told what happens, on the training thread or on one that must not be held up.
    """

    def __init__(
        self,
        options: EngineOptions,
        exchange: Exchange | None = None,
        writer: Callable[[Callable[[Event], None]], WriterClient] = lambda emit: WriterClient(emit=emit),
        emit: Callable[[Event], None] = nobody,
    ) -> None:
        self._options = options
        self._exchange = exchange or Alone()
        self._writer = writer(emit)
        rank = self._exchange.rank
        self._slots = Slots(options.shm_dir, options.slots, options.patience_s, f"rank{rank}", self._writer)
        self._plans = Plans(self._exchange)
        self._history = History(logging.INFO if rank == 0 else logging.DEBUG, emit)
        self._verdicts: list[Verdict] = []
        self._failures = 0
        self._put_off: deque[tuple[str, Mapping[str, Any] | None]] = deque()
        self._held: dict[str, int] = {}
        self._last_save = 0
        self._next_id = 0
        self._rescued_run: str | None = None
        self._pid = os.getpid()
        atexit.register(self._close_at_exit)

    @property
    def history(self) -> list[SaveReport]:
        """Reports of all saves, oldest first."""
        return self._history.reports

    @property
    def writer_pid(self) -> int:
        """Process id of the writer."""
        return self._writer.pid

    def take_verdicts(self) -> list[Verdict]:
        """What became of saves, as all ranks know it since the last call."""
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def take_news(self) -> list[Verdict]:
        """What became of saves that other ranks were not told yet; only rank 0 knows of commits."""
        return self._history.take_news()

    def reserve(self, nbytes: int) -> None:
        """Get the arena ready for states of this size; returns at once, the memory is touched meanwhile.

        Raises:
            ArenaError: There is not enough shared memory.
        """
        self._slots.reserve(nbytes + nbytes // 50)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Do beforehand what the first save of such a state would have to: plan it, and lay out the slots."""
        leaves = flatten(state)
        key = signature(leaves)
        known = self._exchange.all_gather(b"known" if key in self._plans else b"")
        plan = self._plans.get(key, leaves, known=all(known))
        _, others = staging.leaves_by_kind(leaves)
        values = self._values(others)
        self._slots.take(staging.needed_bytes(plan.shard, values, plan.metadata(others, values)))
        for slot in self._slots.free():
            slot.prepare(plan.shard)

    def save_sharded(
        self,
        path: str,
        step: int,
        state: Mapping[str, Any],
        files: Mapping[str, bytes],
        *,
        storage_options: Mapping[str, Any] | None = None,
        required: bool = False,
        tag: int = 0,
    ) -> None:
        """Take the state as it is now, unless storage is behind; it is durable later.

        Args:
            path: The checkpoint directory; rank 0's counts.
            step: Optimizer steps done.
            state: Nested dictionaries of tensors, ``DTensor`` and values that torch can save.
            files: Small files of this rank that go beside them, by name.
            storage_options: For the file system of a URL.
            required: Never skip it, and never replace it by a newer one; rank 0's counts.
            tag: What the caller calls it, for :meth:`take_verdicts`.

        Raises:
            SaveError: It cannot be taken, or too many before it have failed. The state is unharmed and nothing that
                was saved before is lost.
        """
        began = time.monotonic()
        leaves = flatten(state)
        key = signature(leaves)
        admission = self._admit(Wish(path, step, required, key in self._plans), self._exchange, began, tag)
        plan = self._plans.get(key, leaves, known=admission.known)
        if admission.skipped:
            return
        tensors, others = staging.leaves_by_kind(leaves)
        values = self._values(others)
        files = {**files, **plan.metadata(others, values, folder_of(admission.path, admission.attempt))}
        slot, waited_s = self._take_slot(staging.needed_bytes(plan.shard, values, files), admission)
        shard = staging.stage_shard(slot, plan.shard, tensors, values)
        end = shard.offset - slot.offset + shard.size
        images = [shard, *staging.stage_files(slot, end, files)]
        call = _Call(
            path=admission.path,
            step=step,
            tag=tag,
            required=required,
            began=began,
            attempt=admission.attempt,
            world_size=self._exchange.world_size,
            storage_options=storage_options,
            waited_s=waited_s,
        )
        self._submit(slot, call, images)

    def save_file(
        self,
        path: str,
        step: int,
        content: object,
        *,
        storage_options: Mapping[str, Any] | None = None,
        required: bool = False,
        tag: int = 0,
    ) -> None:
        """Take ``content`` as it is now, as one file that ``torch.load`` reads; called on one rank only.

        Args:
            path: The file.
            step: Optimizer steps done.
            content: What to save.
            storage_options: For the file system of a URL.
            required: Never skip it, and never replace it by a newer one.
            tag: What the caller calls it, for :meth:`take_verdicts`.

        Raises:
            SaveError: It cannot be taken, or too many before it have failed.
        """
        began = time.monotonic()
        admission = self._admit(Wish(path, step, required, True), Alone(), began, tag)
        if admission.skipped:
            return
        slot, file, waited_s = self._stage_file(content, _content_bytes(content) + SLACK, admission)
        if not file.fits:  # something big that is not a tensor
            slot, file, _ = self._stage_file(content, file.size, admission)
        call = _Call(
            path=path,
            step=step,
            tag=tag,
            required=required,
            began=began,
            attempt=admission.attempt,
            world_size=1,
            storage_options=storage_options,
            waited_s=waited_s,
        )
        self._submit(slot, call, [FileImage("", slot.offset, file.size)])

    def remove(
        self,
        path: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        persist: bool = True,
        held: bool = False,
    ) -> None:
        """Delete a checkpoint after the newest save is committed; called on rank 0 only.

        Args:
            path: The checkpoint.
            storage_options: For the file system of a URL.
            persist: If that save is not committed, delete it after the next one that is.
            held: Wait for :meth:`release` besides, for :meth:`close`, or for the death of this process.
        """

        def report(done: Done) -> None:
            if done.error:
                log.warning("the checkpoint %s could not be deleted: %s", path, done.error)
            elif done.void and persist:
                self._put_off.append((path, storage_options))

        number = self._new_id()
        if held:
            self._held[path] = number
        self._writer.submit(Remove(number, path, self._last_save, storage_options, held), report)

    def release(self, path: str) -> None:
        """Let the held removal of a checkpoint happen."""
        if (number := self._held.pop(path, None)) is not None:
            self._writer.release(number)

    def retain(
        self,
        directory: str,
        policies: Sequence[KeepLatest | KeepEvery],
        *,
        spared: Sequence[str] = (),
        resumed_from: str = "",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Delete what no policy keeps, after the newest save is committed; called on rank 0 only.

        Args:
            directory: Where the checkpoints are.
            policies: What any of them keeps is kept.
            spared: Paths to keep in any case.
            resumed_from: To keep until this run has committed something that training can go on from.
            storage_options: For the file system of a URL.
        """

        def report(done: Done) -> None:
            if done.error:
                log.warning("old checkpoints in %s could not be deleted: %s", directory, done.error)

        encoded = encode_policies(policies)
        request = Retain(
            self._new_id(), directory, encoded, list(spared), resumed_from, self._last_save, storage_options
        )
        self._writer.submit(request, report)

    def link(self, path: str, link: str) -> None:
        """Make ``link`` another name of the checkpoint at ``path``, which was saved last, when it is committed."""

        def report(done: Done) -> None:
            if done.error:
                log.warning("%s could not be linked to %s: %s", link, path, done.error)

        self._writer.submit(Link(self._new_id(), path, link, self._last_save), report)

    def wait(self, path: str | None = None, timeout_s: float | None = None) -> bool:
        """Wait until all saves (or those to ``path``) are durable or failed; False when time ran out."""
        return self._writer.wait_idle(timeout_s, path)

    def rescue(self, run: Run, shm_dir: str, directory: str, storage_options: Mapping[str, Any] | None) -> None:
        """What the writer does with this rank's snapshots should this process end before :meth:`close`.

        Args:
            run: Whose snapshots they are.
            shm_dir: Where they are.
            directory: Where the run's checkpoints are.
            storage_options: For the file system of a URL.
        """
        heirs.call_off(run.id)
        self._rescued_run = run.id
        self._writer.rescue(
            Rescue(
                directory=directory,
                shm_dir=shm_dir,
                run=run.id,
                start=run.start,
                base_ns=run.base_ns,
                rank=self._exchange.rank,
                world_size=self._exchange.world_size,
                deadline_s=self._options.deadline_s,
                storage_options=storage_options,
            )
        )

    def seal(self, path: str) -> None:
        """A snapshot in this file is complete: the writer computes the digest of its tensors."""
        self._writer.seal(path)

    def close(self, patience_s: float | None = None, *, to_heir: bool = False) -> None:
        """Finish what is pending and give everything back.

        Args:
            patience_s: How long to wait; by default as long as a save may take. What is not finished then is left
                to the writer, which goes on without us.
            to_heir: Training has not ended well: the writer stays until this process ends, for :meth:`rescue`.

        Raises:
            SaveError: The last save failed, or what is pending did not become durable in time.
        """
        atexit.unregister(self._close_at_exit)
        for path in list(self._held):
            self.release(path)
        patience_s = self._options.deadline_s if patience_s is None else patience_s
        finished = False
        try:
            finished = self._finish(patience_s, to_heir)
        finally:  # a signal handler may raise here
            self._slots.close(keep_file=not finished)
        if not finished:
            raise SaveError(
                f"a checkpoint was still not durable after {patience_s:.0f} s; its writer process goes on. Look at the"
                " storage's speed, or raise AsyncCheckpointIO(timeout=...)."
            )
        ended = [report for report in self.history if report.outcome in ("saved", "failed")]
        if ended and ended[-1].error:
            raise SaveError(f"the last checkpoint, {ended[-1].path}, was not saved: {ended[-1].error}")

    def _finish(self, patience_s: float, to_heir: bool) -> bool:
        """Whether everything was done in time."""
        if not to_heir or self._rescued_run is None or not self._writer.wait_idle(patience_s):
            return self._writer.close(patience_s)
        self._writer.detach()
        heirs.leave(self._rescued_run, self._writer)
        return True

    def _close_at_exit(self) -> None:
        """The interpreter ends and nobody has closed us: in a container what is pending would be killed with it."""
        if os.getpid() != self._pid:  # a forked child
            return
        try:
            self.close(_PATIENCE_AT_EXIT_S)
        except SaveError as error:
            log.error("%s", error)

    def _admit(self, wish: Wish, exchange: Exchange, began: float, tag: int) -> Admission:
        options = self._options
        admission = admit(wish, exchange, self._writer, self._history, options.on_busy, options.slots)
        self._verdicts += admission.news
        self._count_failures(admission.news)
        if admission.skipped:
            report = SaveReport(admission.path, wish.step, stall_s=time.monotonic() - began, tag=tag)
            self._verdicts.append(self._history.skipped(self._new_id(), report, "storage is behind"))
        return admission

    def _count_failures(self, news: Sequence[Verdict]) -> None:
        for verdict in news:
            if verdict.outcome == "failed":
                self._failures += 1
            elif verdict.outcome == "saved":
                self._failures = 0
            limit = self._options.max_consecutive_failures
            if limit is not None and self._failures >= limit:
                raise SaveError(
                    f"{self._failures} checkpoints in a row were not saved, the last of them because: {verdict.error}."
                    " Training stops, as a fault would now cost more and more of it. Repair the storage, or raise"
                    " AsyncCheckpointIO(max_consecutive_failures=...)."
                )

    def _stage_file(self, content: object, nbytes: int, admission: Admission) -> tuple[Slot, staging.SlotFile, float]:
        slot, waited_s = self._take_slot(nbytes, admission)
        file = staging.SlotFile(slot)
        with without_crc():
            torch.save(content, file)  # type: ignore[arg-type]  # write is all it needs
        return slot, file, waited_s

    def _take_slot(self, nbytes: int, admission: Admission) -> tuple[Slot, float]:
        """A free slot, and the seconds that training had to wait until there was one."""
        began = time.monotonic()
        slot = self._slots.take(nbytes)
        return slot, time.monotonic() - began if admission.decision.action is Action.WAIT else 0.0

    def _values(self, others: Sequence[Leaf]) -> list[bytes]:
        """What is not a tensor is rank 0's, all of it."""
        return [archived(leaf.value) for leaf in others] if self._exchange.rank == 0 else []

    def _submit(self, slot: Slot, call: _Call, images: Sequence[FileImage]) -> None:
        save = Save(
            id=self._new_id(),
            path=call.path,
            attempt=call.attempt,
            step=call.step,
            rank=self._exchange.rank,
            world_size=call.world_size,
            files=tuple(images),
            deadline_s=self._options.deadline_s,
            required=call.required,
            storage_options=call.storage_options,
        )
        slot.request_id = self._last_save = save.id
        if (number := self._held.pop(call.path, None)) is not None:  # saved anew
            self._writer.cancel(number)
        staged = sum(image.size for image in images)
        stall_s = time.monotonic() - call.began
        report = SaveReport(call.path, call.step, staged, stall_s, call.waited_s, tag=call.tag)
        self._history.staged(save.id, report)
        try:
            self._writer.submit(
                save, lambda done: self._history.finished(save.id, call.began, done.error, done.retried)
            )
        except WriterError as error:
            self._history.finished(save.id, call.began, str(error))
            raise
        for _ in range(len(self._put_off)):
            path, storage_options = self._put_off.popleft()
            if path != call.path:  # saved anew meanwhile
                self.remove(path, storage_options)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id


def _content_bytes(content: object) -> int:
    """Bytes of all dense tensors in nested containers, at least as many as ``torch.save`` will write of them."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(content) if is_dense(tensor))
