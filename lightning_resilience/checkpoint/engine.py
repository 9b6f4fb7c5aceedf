"""The checkpoint engine of one rank: stage, hand over, remember how it went.

Has never heard of Lightning. Its methods are called by the training thread; with several ranks, every rank
calls them in the same order. The flow of a save:

1. the ranks agree on path and attempt, and whether everybody knows the layout (one small collective);
2. the first time: layouts are planned and told to rank 0 (one more);
3. a slot of the arena is taken, when both are being written the older one is waited for;
4. the state is copied into it - from here on training may change every tensor;
5. the writer process is told, and does the rest.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_resilience._torch import cuda_in_use, pin, tensors_in, unpin
from lightning_resilience.checkpoint import staging
from lightning_resilience.checkpoint.arena import Arena
from lightning_resilience.checkpoint.candidates import METADATA
from lightning_resilience.checkpoint.envelope import archive, without_crc
from lightning_resilience.checkpoint.exchange import Alone, Exchange
from lightning_resilience.checkpoint.layout import (
    GlobalLayout,
    Leaf,
    Path,
    ShardLayout,
    flatten,
    plan_shard,
    signature,
)
from lightning_resilience.checkpoint.messages import FileImage, Remove, Save
from lightning_resilience.checkpoint.staging import Slot
from lightning_resilience.checkpoint.writer import WriterClient
from lightning_resilience.errors import SaveError, WriterError

log = logging.getLogger(__name__)

_SLACK = 4 << 20  # for what grows: meta files, values that are not tensors


@dataclass(frozen=True)
class SaveReport:
    """How one save went, seen from this rank.

    Attributes:
        path: Where the checkpoint is, or was to be.
        step: Optimizer steps done when the state was taken.
        bytes: Bytes that this rank staged.
        stall_s: Seconds for which training waited.
        durable_s: Seconds from the call until it was committed (on other ranks than 0: until this rank's part
            was durable); None while that is open or when it failed.
        error: Why it failed, in words; None while it is open or when it succeeded.
    """

    path: str
    step: int
    bytes: int
    stall_s: float
    durable_s: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class _Plan:
    shard: ShardLayout
    whole: GlobalLayout | None  # rank 0 has it


@dataclass(frozen=True)
class EngineOptions:
    """How the engine stages and writes.

    Attributes:
        shm_dir: Directory on a memory file system for the arena.
        slots: States that can be staged or being written at a time; each costs a shard's size of host memory.
        deadline_s: Seconds after which a save that is not durable counts as failed.
    """

    shm_dir: str = "/dev/shm"
    slots: int = 2
    deadline_s: float = 1800.0


class CheckpointEngine:
    """Owned by the checkpoint IO; lives from the first use in a ``fit`` to :meth:`close`.

    Args:
        options: How to stage and write.
        exchange: How ranks agree; alone by default.
        writer: Tests pass their own.
    """

    def __init__(
        self,
        options: EngineOptions,
        exchange: Exchange | None = None,
        writer: Callable[[], WriterClient] = WriterClient,
    ) -> None:
        self._options = options
        self._exchange = exchange or Alone()
        self._writer = writer()
        self._arena: Arena | None = None
        self._memory: torch.Tensor | None = None
        self._pinned = False
        self._slots: list[Slot] = []
        self._plans: dict[int, _Plan] = {}
        self._next_id = 0
        self._reports: dict[int, SaveReport] = {}
        self._lock = threading.Lock()

    @property
    def history(self) -> list[SaveReport]:
        """Reports of all saves, oldest first."""
        with self._lock:
            return [self._reports[key] for key in sorted(self._reports)]

    @property
    def writer_pid(self) -> int:
        """Process id of the writer."""
        return self._writer.pid

    def reserve(self, nbytes: int) -> None:
        """Get the arena ready for states of this size; returns at once, the memory is touched meanwhile.

        Raises:
            ArenaError: There is not enough shared memory.
        """
        self._make_arena(nbytes + nbytes // 50)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Do beforehand what the first save of such a state would have to: plan it, and lay out the slots."""
        leaves = flatten(state)
        plan = self._agree("", leaves)[2]
        _, others = staging.leaves_by_kind(leaves)
        values = [_archived(leaf.value) for leaf in others] if self._exchange.rank == 0 else []
        self._take_slot(staging.needed_bytes(plan.shard, values, self._metadata_file(plan, others, values)))
        for slot in self._slots:
            self._wait_written(slot)
            slot.prepare(plan.shard)

    def save_sharded(self, path: str, step: int, state: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Take the state as it is now; it is durable later.

        Args:
            path: The checkpoint directory; rank 0's counts.
            step: Optimizer steps done.
            state: Nested dictionaries of tensors, ``DTensor`` and values that torch can save.
            files: Small files of this rank that go beside them, by name.

        Raises:
            SaveError: It cannot be taken. The state is unharmed and nothing that was saved before is lost.
        """
        began = time.monotonic()
        leaves = flatten(state)
        path, attempt, plan = self._agree(path, leaves)
        tensors, others = staging.leaves_by_kind(leaves)
        values = [_archived(leaf.value) for leaf in others] if self._exchange.rank == 0 else []
        files = {**files, **self._metadata_file(plan, others, values)}
        slot = self._take_slot(staging.needed_bytes(plan.shard, values, files))
        shard = staging.stage_shard(slot, plan.shard, tensors, values)
        end = shard.offset - slot.offset + shard.size
        self._submit(slot, path, step, attempt, [shard, *staging.stage_files(slot, end, files)], began)

    def save_file(self, path: str, step: int, content: object) -> None:
        """Take ``content`` as it is now, as one file that ``torch.load`` reads; called on one rank only.

        Raises:
            SaveError: It cannot be taken.
        """
        began = time.monotonic()
        slot, file = self._stage_file(content, _content_bytes(content) + _SLACK)
        if not file.fits:  # something big that is not a tensor
            slot, file = self._stage_file(content, file.size)
        image = FileImage("", slot.offset, file.size)
        self._submit(slot, path, step, _new_attempt(), [image], began, world_size=1)

    def remove(self, path: str) -> None:
        """Delete a checkpoint after everything asked for before is committed; called on rank 0 only."""

        def report(error: str) -> None:
            if error:
                log.warning("the checkpoint %s could not be deleted: %s", path, error)

        self._writer.submit(Remove(self._new_id(), path), report)

    def wait(self, path: str | None = None, timeout_s: float | None = None) -> bool:
        """Wait until all saves (or those to ``path``) are durable or failed; False when time ran out."""
        return self._writer.wait_idle(timeout_s, path)

    def close(self, patience_s: float | None = None) -> None:
        """Finish what is pending and give everything back.

        Args:
            patience_s: How long to wait; by default as long as a save may take. What is not finished then is left
                to the writer, which goes on without us.

        Raises:
            SaveError: The last save failed, or what is pending did not become durable in time.
        """
        patience_s = self._options.deadline_s if patience_s is None else patience_s
        finished = False
        try:
            finished = self._writer.close(patience_s)
        finally:  # a signal handler may raise here
            self._drop_arena(keep_file=not finished)
        if not finished:
            raise SaveError(
                f"a checkpoint was still not durable after {patience_s:.0f} s; its writer process goes on. Look at the"
                " storage's speed, or raise AsyncCheckpointIO(timeout=...)."
            )
        if (history := self.history) and history[-1].error:
            raise SaveError(f"the last checkpoint, {history[-1].path}, was not saved: {history[-1].error}")

    def _stage_file(self, content: object, nbytes: int) -> tuple[Slot, staging.SlotFile]:
        slot = self._take_slot(nbytes)
        file = staging.SlotFile(slot)
        with without_crc():
            torch.save(content, file)  # type: ignore[arg-type]  # write is all it needs
        return slot, file

    def _agree(self, path: str, leaves: Sequence[Leaf]) -> tuple[str, str, _Plan]:
        key = signature(leaves)
        mine = json.dumps({"path": path, "attempt": _new_attempt(), "known": key in self._plans})
        answers = [json.loads(answer) for answer in self._exchange.all_gather(mine.encode())]
        if not all(answer["known"] for answer in answers):
            self._plans[key] = self._make_plan(leaves)
        return answers[0]["path"], answers[0]["attempt"], self._plans[key]

    def _make_plan(self, leaves: Sequence[Leaf]) -> _Plan:
        shard = plan_shard(leaves, self._exchange.rank)
        layouts = [ShardLayout.decode(data) for data in self._exchange.all_gather(shard.encode())]
        whole, fault = None, ""
        if self._exchange.rank == 0:
            try:
                whole = GlobalLayout(layouts)
            except SaveError as error:
                fault = str(error)
        if fault := self._exchange.all_gather(fault.encode())[0].decode():  # all ranks raise, or none
            raise SaveError(fault)
        return _Plan(shard, whole)

    def _metadata_file(self, plan: _Plan, others: Sequence[Leaf], values: Sequence[bytes]) -> dict[str, bytes]:
        if plan.whole is None:
            return {}
        places: list[tuple[str, Path, int, int]] = []
        start = plan.shard.size
        for leaf, value in zip(others, values, strict=True):
            places.append((leaf.name, leaf.path, start, len(value)))
            start += len(value)
        return {METADATA: plan.whole.encode(tuple(places))}

    def _take_slot(self, nbytes: int) -> Slot:
        """A slot that nobody reads, of at least this size; the one used longest ago."""
        self._make_arena(nbytes)
        slot = min(self._slots, key=lambda slot: -1 if slot.request_id is None else slot.request_id)
        self._wait_written(slot)
        assert self._arena is not None
        self._arena.ready()
        self._pin()
        return slot

    def _wait_written(self, slot: Slot) -> None:
        patience_s = self._options.deadline_s
        if slot.request_id is not None and not self._writer.wait_written(slot.request_id, patience_s):
            raise WriterError(
                f"the writer process {self.writer_pid} has not written an earlier checkpoint in {patience_s:.0f} s, so"
                " there is no room for another. Look at the storage, or raise AsyncCheckpointIO(timeout=...)."
            )

    def _make_arena(self, nbytes: int) -> None:
        """Have an arena whose slots hold this much and what may come on top."""
        if self._arena is not None and self._arena.slot_bytes >= nbytes:
            return
        for slot in self._slots:
            self._wait_written(slot)
        self._drop_arena()
        rank = f"rank{self._exchange.rank}"
        arena = Arena(self._options.shm_dir, nbytes + _SLACK, self._options.slots, rank)
        memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        offsets = range(0, arena.size, arena.slot_bytes)
        self._slots = [Slot(offset, memory[offset : offset + arena.slot_bytes]) for offset in offsets]
        self._arena, self._memory = arena, memory
        self._writer.attach(arena.path)

    def _pin(self) -> None:
        """Where there is a GPU its copies go straight into the arena."""
        if self._pinned or self._memory is None or not cuda_in_use():
            return
        self._pinned = pin(self._memory)
        if not self._pinned:
            log.warning("CUDA could not pin the staging memory: saves will stall training longer than they need to")

    def _drop_arena(self, keep_file: bool = False) -> None:
        if self._memory is not None and self._pinned:
            unpin(self._memory)
        self._slots, self._memory, self._pinned = [], None, False
        if self._arena is not None:
            self._arena.close(keep_file)
        self._arena = None

    def _submit(
        self,
        slot: Slot,
        path: str,
        step: int,
        attempt: str,
        images: Sequence[FileImage],
        began: float,
        world_size: int | None = None,
    ) -> None:
        save = Save(
            id=self._new_id(),
            path=path,
            attempt=attempt,
            step=step,
            rank=self._exchange.rank,
            world_size=world_size or self._exchange.world_size,
            files=tuple(images),
            deadline_s=self._options.deadline_s,
        )
        slot.request_id = save.id
        staged = sum(image.size for image in images)
        with self._lock:
            self._reports[save.id] = SaveReport(path, step, staged, time.monotonic() - began)
        try:
            self._writer.submit(save, lambda error: self._on_done(save.id, began, error))
        except WriterError as error:
            self._on_done(save.id, began, str(error))
            raise

    def _on_done(self, request_id: int, began: float, error: str) -> None:
        seconds = time.monotonic() - began
        with self._lock:
            report = self._reports[request_id]
            outcome: dict[str, Any] = {"error": error} if error else {"durable_s": seconds}
            self._reports[request_id] = dataclasses.replace(report, **outcome)
        if error:
            log.error("the checkpoint %s (step %d) was NOT saved: %s", report.path, report.step, error)
        else:
            log.log(
                logging.INFO if self._exchange.rank == 0 else logging.DEBUG,
                "checkpoint %s (step %d): %.1f MB staged in %.1f ms, durable after %.2f s",
                report.path,
                report.step,
                report.bytes / 1e6,
                1e3 * report.stall_s,
                seconds,
            )

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id


def _new_attempt() -> str:
    return uuid.uuid4().hex[:12]


def _content_bytes(content: object) -> int:
    """Bytes of all tensors in nested containers, at least as many as ``torch.save`` will write of them."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(content))


def _archived(value: Any) -> bytes:
    """``archive(value)``, remembered for values that cannot change; NumPy's scalars as Python's own."""
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, (bool, int, float, str, type(None))):
        return _remembered(type(value), repr(value), value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return _remembered(list, "\0".join(value), value)
    return archive(value)


_memory: dict[tuple[type, str], bytes] = {}


def _remembered(kind: type, text: str, value: object) -> bytes:
    key = (kind, text)
    if key not in _memory:
        if len(_memory) > 1000:
            _memory.clear()
        _memory[key] = archive(value)
    return _memory[key]
