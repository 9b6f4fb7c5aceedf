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

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_resilience._torch import tensors_in
from lightning_resilience.checkpoint import staging
from lightning_resilience.checkpoint.attempts import folder_of
from lightning_resilience.checkpoint.envelope import without_crc
from lightning_resilience.checkpoint.exchange import Alone, Exchange
from lightning_resilience.checkpoint.history import History, SaveReport
from lightning_resilience.checkpoint.layout import Leaf, flatten, signature
from lightning_resilience.checkpoint.messages import FileImage, Remove, Save
from lightning_resilience.checkpoint.plans import Plan, Plans
from lightning_resilience.checkpoint.slots import SLACK, Slots
from lightning_resilience.checkpoint.staging import Slot
from lightning_resilience.checkpoint.values import archived
from lightning_resilience.checkpoint.writer import WriterClient
from lightning_resilience.errors import SaveError, WriterError

log = logging.getLogger(__name__)


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
        rank = self._exchange.rank
        self._slots = Slots(options.shm_dir, options.slots, options.deadline_s, f"rank{rank}", self._writer)
        self._plans = Plans(self._exchange)
        self._history = History(logging.INFO if rank == 0 else logging.DEBUG)
        self._next_id = 0

    @property
    def history(self) -> list[SaveReport]:
        """Reports of all saves, oldest first."""
        return self._history.reports

    @property
    def writer_pid(self) -> int:
        """Process id of the writer."""
        return self._writer.pid

    def reserve(self, nbytes: int) -> None:
        """Get the arena ready for states of this size; returns at once, the memory is touched meanwhile.

        Raises:
            ArenaError: There is not enough shared memory.
        """
        self._slots.reserve(nbytes + nbytes // 50)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Do beforehand what the first save of such a state would have to: plan it, and lay out the slots."""
        leaves = flatten(state)
        plan = self._agree("", leaves)[2]
        _, others = staging.leaves_by_kind(leaves)
        values = self._values(others)
        self._slots.take(staging.needed_bytes(plan.shard, values, plan.metadata(others, values)))
        for slot in self._slots:
            self._slots.wait_written(slot)
            slot.prepare(plan.shard)

    def save_sharded(
        self,
        path: str,
        step: int,
        state: Mapping[str, Any],
        files: Mapping[str, bytes],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the state as it is now; it is durable later.

        Args:
            path: The checkpoint directory; rank 0's counts.
            step: Optimizer steps done.
            state: Nested dictionaries of tensors, ``DTensor`` and values that torch can save.
            files: Small files of this rank that go beside them, by name.
            storage_options: For the file system of a URL.

        Raises:
            SaveError: It cannot be taken. The state is unharmed and nothing that was saved before is lost.
        """
        began = time.monotonic()
        leaves = flatten(state)
        path, attempt, plan = self._agree(path, leaves)
        tensors, others = staging.leaves_by_kind(leaves)
        values = self._values(others)
        files = {**files, **plan.metadata(others, values, folder_of(path, attempt))}
        slot = self._slots.take(staging.needed_bytes(plan.shard, values, files))
        shard = staging.stage_shard(slot, plan.shard, tensors, values)
        end = shard.offset - slot.offset + shard.size
        images = [shard, *staging.stage_files(slot, end, files)]
        self._submit(slot, path, step, attempt, images, began, storage_options)

    def save_file(
        self, path: str, step: int, content: object, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Take ``content`` as it is now, as one file that ``torch.load`` reads; called on one rank only.

        Raises:
            SaveError: It cannot be taken.
        """
        began = time.monotonic()
        slot, file = self._stage_file(content, _content_bytes(content) + SLACK)
        if not file.fits:  # something big that is not a tensor
            slot, file = self._stage_file(content, file.size)
        image = FileImage("", slot.offset, file.size)
        self._submit(slot, path, step, _new_attempt(), [image], began, storage_options, world_size=1)

    def remove(self, path: str, storage_options: Mapping[str, Any] | None = None) -> None:
        """Delete a checkpoint after everything asked for before is committed; called on rank 0 only."""

        def report(error: str) -> None:
            if error:
                log.warning("the checkpoint %s could not be deleted: %s", path, error)

        self._writer.submit(Remove(self._new_id(), path, storage_options), report)

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
            self._slots.close(keep_file=not finished)
        if not finished:
            raise SaveError(
                f"a checkpoint was still not durable after {patience_s:.0f} s; its writer process goes on. Look at the"
                " storage's speed, or raise AsyncCheckpointIO(timeout=...)."
            )
        if (history := self.history) and history[-1].error:
            raise SaveError(f"the last checkpoint, {history[-1].path}, was not saved: {history[-1].error}")

    def _stage_file(self, content: object, nbytes: int) -> tuple[Slot, staging.SlotFile]:
        slot = self._slots.take(nbytes)
        file = staging.SlotFile(slot)
        with without_crc():
            torch.save(content, file)  # type: ignore[arg-type]  # write is all it needs
        return slot, file

    def _agree(self, path: str, leaves: Sequence[Leaf]) -> tuple[str, str, Plan]:
        key = signature(leaves)
        mine = json.dumps({"path": path, "attempt": _new_attempt(), "known": key in self._plans})
        answers = [json.loads(answer) for answer in self._exchange.all_gather(mine.encode())]
        plan = self._plans.get(key, leaves, known=all(answer["known"] for answer in answers))
        return answers[0]["path"], answers[0]["attempt"], plan

    def _values(self, others: Sequence[Leaf]) -> list[bytes]:
        """What is not a tensor is rank 0's, all of it."""
        return [archived(leaf.value) for leaf in others] if self._exchange.rank == 0 else []

    def _submit(
        self,
        slot: Slot,
        path: str,
        step: int,
        attempt: str,
        images: Sequence[FileImage],
        began: float,
        storage_options: Mapping[str, Any] | None,
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
            storage_options=storage_options,
        )
        slot.request_id = save.id
        staged = sum(image.size for image in images)
        self._history.staged(save.id, SaveReport(path, step, staged, time.monotonic() - began))
        try:
            self._writer.submit(save, lambda error: self._history.finished(save.id, began, error))
        except WriterError as error:
            self._history.finished(save.id, began, str(error))
            raise

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id


def _new_attempt() -> str:
    return uuid.uuid4().hex[:12]


def _content_bytes(content: object) -> int:
    """Bytes of all tensors in nested containers, at least as many as ``torch.save`` will write of them."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(content))
