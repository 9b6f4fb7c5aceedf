"""The snapshots of one rank: taken beside training, found again by whoever runs as that rank next.

Has never heard of Lightning. Its methods are called by the training thread; with "auto", :meth:`Snapshots.take` talks
to the other ranks, so every rank calls it at the same steps. The flow:

1. ``open``: the file that a dead predecessor has left is taken over (``start.begin_run`` does it, for all ranks);
2. ``load``: the state of a step is put back, without storage and without the other ranks;
3. at the end of a batch ``is_due`` says whether it is time, and ``take`` copies the state to the slot that does not
   hold the newest snapshot;
4. before an update ``hold_back`` makes it wait for a copy that is still under way (GPU only);
5. ``close`` leaves the file to a successor, or removes it when training has ended well.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_resilience.checkpoint.candidates import META
from lightning_resilience.checkpoint.exchange import Alone, Exchange, gather_json
from lightning_resilience.checkpoint.layout import ShardLayout, flatten, plan_own, signature
from lightning_resilience.checkpoint.reader import load_archive
from lightning_resilience.checkpoint.restore import OPTIMIZERS, Target, restore_pieces
from lightning_resilience.checkpoint.snapshots.contents import INDEX, RANK_STATE, Small, SnapshotReader, pack
from lightning_resilience.checkpoint.snapshots.copies import Copies, Pair
from lightning_resilience.checkpoint.snapshots.file import Snapshot, SnapshotFile, create, take_over
from lightning_resilience.checkpoint.snapshots.header import digest_of
from lightning_resilience.checkpoint.snapshots.pace import Measured, Pace
from lightning_resilience.checkpoint.snapshots.points import Restored, State
from lightning_resilience.checkpoint.snapshots.run import Run
from lightning_resilience.checkpoint.staging import Slot, leaves_by_kind, local_part
from lightning_resilience.checkpoint.transfer import fair_threads
from lightning_resilience.errors import LoadError

log = logging.getLogger(__name__)

_ROOM = 1 << 20  # in a slot, for small parts that grow
_SPARE = 16 << 20  # a file that was taken over may be bigger by so much


@dataclass
class _Pending:
    file: SnapshotFile
    slot: Slot
    snapshot: Snapshot


class Snapshots:
    """Owned by the checkpoint IO; lives as long as it, over several fits.

    Args:
        shm_dir: Directory on a memory file system.
        every: Optimizer steps between two snapshots, or "auto".
        exchange: How ranks agree; alone by default.
        copies: How states are copied; tests pass their own.
        clock: Seconds.

    Attributes:
        on_complete: Told of the file in which a snapshot has become complete.
    """

    def __init__(
        self,
        shm_dir: str,
        every: int | Literal["auto"],
        exchange: Exchange | None = None,
        copies: Copies | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_complete: Callable[[str], None] = lambda path: None
        self.shm_dir = shm_dir
        self.exchange = exchange or Alone()
        self._copies = copies or Copies()
        self._clock = clock
        self._pace = Pace(every, clock)
        self._run: Run | None = None
        self._file: SnapshotFile | None = None
        self._outgrown: SnapshotFile | None = None
        self._pending: _Pending | None = None
        self._layouts: dict[int, tuple[ShardLayout, bytes]] = {}
        self._left: object = None

    # --- a start -----------------------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Take over what a predecessor of this rank in this run has left; no collective."""
        if self._file is None or self._run is None or self._run.id != run.id:
            self._release(keep=True)
            self._file = take_over(self.shm_dir, run.id, self.exchange.rank)
        self._run = run

    def keep(self, step: int | None, start: int) -> None:
        """Training goes on from the snapshot of this step, or from none: all others are void."""
        if self._file is not None:
            self._file.void(lambda other: other != step)
            if step is not None:
                self._file.stamp(step, start)

    @property
    def run(self) -> Run | None:
        """The run that training is part of; None before it begins."""
        return self._run

    # --- restore points ----------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """See :class:`RestorePoints`."""
        self._settle_if_done()
        return [snapshot.step for _, _, snapshot in self._usable()]

    def verify(self, step: int) -> str:
        """See :class:`RestorePoints`."""
        for file, slot, snapshot in self._usable():
            if snapshot.step == step:
                digest, tensors = file.seal(slot), slot.bytes[: snapshot.tensor_bytes]
                if digest is not None and digest_of(tensors, fair_threads(self.exchange.world_size)) != digest:
                    return f"the tensors in the snapshot of step {step} in {file.path} are not what they were"
        return ""

    def drop(self, step: int) -> None:
        """See :class:`RestorePoints`."""
        for file in (self._file, self._outgrown):
            if file is not None:
                file.void(lambda other: other == step)

    def load(self, step: int, target: Target) -> Restored:
        """See :class:`RestorePoints`."""
        self._settle_if_done()
        for file, slot, snapshot in self._usable():
            if snapshot.step == step:
                return _load(file, slot, snapshot, target)
        raise LoadError(f"rank {self.exchange.rank} holds no snapshot of step {step}; it has {self.steps()}")

    def _usable(self) -> list[tuple[SnapshotFile, Slot, Snapshot]]:
        """Complete, this rank's, of as many ranks as now, and not from before the run went on elsewhere."""
        mine = (self.exchange.rank, self.exchange.world_size)
        return [
            (file, slot, snapshot)
            for file in (self._file, self._outgrown)
            if file is not None and self._run is not None
            for slot, snapshot in file.snapshots()
            if (snapshot.rank, snapshot.world_size) == mine and snapshot.start >= self._run.start
        ]

    # --- while training ----------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Training begins with this many optimizer steps done."""
        self._pace.begin(step)

    def is_due(self, step: int) -> bool:
        """A batch has ended with this many optimizer steps done: whether to take a snapshot now."""
        self._settle_if_done()
        return self._run is not None and self._pace.batch_done(step)

    def prepare(self, state: State) -> None:
        """Do beforehand what the first snapshot would have to: plan, and get the memory.

        Raises:
            ArenaError: There is not enough shared memory.
        """
        small = self._pack(state)
        self._fit(small.needed).lay_out(small.layout)

    def take(self, step: int, make: Callable[[], State]) -> None:
        """Take a snapshot of the state as it is now.

        Args:
            step: Optimizer steps done.
            make: Makes the state; what that takes counts as part of the stall.

        Raises:
            SaveError: It cannot be taken; the one before is unharmed.
        """
        began = self._clock()
        self._settle()
        state = make()
        small = self._pack(state)
        file = self._fit(small.needed)
        slot = file.begin()
        slot.prepare(small.layout)
        self._copies.start(*_pairs(slot, small.layout, state))
        self._pending = _Pending(file, slot, self._header(step, file, small, slot))
        self._settle_if_done()
        self._note(step, self._clock() - began)

    def finish(self) -> None:
        """Wait for a copy that is under way."""
        self._settle()

    def hold_back(self) -> None:
        """An optimizer update comes next: it must not overtake a copy."""
        if self._pending is not None:
            self._copies.hold_back()

    def close(self, keep: bool) -> None:
        """Training has ended.

        Args:
            keep: Leave the newest snapshot to a successor; otherwise nothing is left.
        """
        self._release(keep)
        self._run = None

    def leave_world(self) -> None:
        """This is another rank soon: its snapshots are void."""
        self._release(keep=False)
        self._layouts.clear()

    def join_world(self) -> None:
        """The exchange is that of the new ranks, and all of them have left."""
        if self._run is not None:
            self.open(self._run)

    def _header(self, step: int, file: SnapshotFile, small: Small, slot: Slot) -> Snapshot:
        assert self._run is not None
        parts = small.put(slot)
        return Snapshot(
            step=step,
            generation=1 + max((taken.generation for _, taken in file.snapshots()), default=0),
            rank=self.exchange.rank,
            world_size=self.exchange.world_size,
            tensor_bytes=small.layout.size,
            layout=parts[INDEX].xxh3,
            parts=parts,
            start=self._run.start,
        )

    def _pack(self, state: State) -> Small:
        leaves = flatten(state.tensors)
        key = signature(leaves)
        if key not in self._layouts:
            layout = plan_own(leaves, self.exchange.rank)
            self._layouts[key] = layout, layout.encode()
        layout, index = self._layouts[key]
        return pack(layout, index, leaves_by_kind(leaves)[1], state.files)

    def _fit(self, nbytes: int) -> SnapshotFile:
        """A file with slots of that size. One that was outgrown stays until a snapshot in the new one is complete."""
        if self._file is not None and nbytes <= self._file.slot_bytes <= nbytes + _ROOM + _SPARE:
            return self._file
        assert self._run is not None
        file = create(self.shm_dir, self._run.id, self.exchange.rank, nbytes + _ROOM)
        if self._outgrown is None:
            self._outgrown = self._file
        elif self._file is not None:
            self._file.close(keep=False)
        self._file = file
        return file

    def _settle_if_done(self) -> None:
        if self._pending is not None and self._copies.are_done():
            self._settle()

    def _settle(self) -> None:
        """Wait for the copy that is under way; from then on its snapshot counts."""
        self._copies.finish()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.file.complete(pending.slot, pending.snapshot)
            self.on_complete(pending.file.path)
            self._drop_outgrown()

    def _drop_outgrown(self) -> None:
        if self._outgrown is not None:
            self._outgrown.close(keep=False)
            self._outgrown = None

    def _release(self, keep: bool) -> None:
        if keep and not self._copies.are_done():
            self._abandon()
            return
        self._settle()
        self._drop_outgrown()
        if self._file is not None:
            self._file.close(keep)
        self._file = None

    def _abandon(self) -> None:
        """After a fault a device may never finish its copy, or do so later: leave it the memory. The slot is void."""
        self._left = (self._file, self._outgrown, self._copies)
        self._file = self._outgrown = self._pending = None
        self._copies = self._copies.anew()

    def _note(self, step: int, stall_s: float) -> None:
        self._pace.taken(stall_s)
        log.debug("snapshot of step %d: %.1f ms", step, 1e3 * stall_s)
        if not self._pace.automatic:
            return
        measured = [Measured(**answer) for answer in gather_json(self.exchange, vars(self._pace.measured))]
        if self._pace.adapt(measured):
            slowest = max(measured, key=lambda one: one.cost_s)
            log.log(
                logging.INFO if self.exchange.rank == 0 else logging.DEBUG,
                "snapshots: one every %d steps from now on; each takes %.1f ms of training, a step %.1f ms",
                self._pace.every,
                1e3 * slowest.cost_s,
                1e3 * slowest.step_s,
            )


def _pairs(slot: Slot, layout: ShardLayout, state: State) -> tuple[list[Pair], list[Pair]]:
    """What only an update changes, and the rest."""
    tensors = leaves_by_kind(flatten(state.tensors))[0]
    steady: list[Pair] = []
    changing: list[Pair] = []
    with torch.no_grad():
        for chunk, target in zip(layout.chunks, slot.destinations, strict=True):
            kind = steady if chunk.name in state.steady else changing
            kind.append((target, local_part(tensors[chunk.name])))
    return steady, changing


def _load(file: SnapshotFile, slot: Slot, snapshot: Snapshot, target: Target) -> Restored:
    parts = {name: file.part(slot, part) for name, part in snapshot.parts.items()}
    label = f"the snapshot of step {snapshot.step} in {file.path}"
    states = restore_pieces(SnapshotReader(slot, snapshot, parts), f"of step {snapshot.step} in {file.path}", target)
    content = load_archive(io.BytesIO(parts[META]), label, target.trust)
    if target.optimizers:
        content[OPTIMIZERS] = states
    return Restored(content, load_archive(io.BytesIO(parts[RANK_STATE]), label, target.trust))
