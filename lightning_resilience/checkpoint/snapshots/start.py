"""The start of a run with snapshots: which run it is, what its ranks hold, and whether to go on from that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from lightning_resilience.checkpoint.exchange import Exchange, gather_json, together
from lightning_resilience.checkpoint.snapshots import leftovers
from lightning_resilience.checkpoint.snapshots.choice import (
    Request,
    Stored,
    explain,
    is_as_new,
    may_stand_in,
    newest_common,
)
from lightning_resilience.checkpoint.snapshots.engine import Snapshots
from lightning_resilience.checkpoint.snapshots.run import Run, new_run, read_run, write_run
from lightning_resilience.checkpoint.storage import Place
from lightning_resilience.checkpoint.verify import can_go_on_from
from lightning_resilience.errors import SaveError

log = logging.getLogger(__name__)


def begin_run(
    snapshots: Snapshots,
    directory: Place,
    request: Request,
    stored: Callable[[], Sequence[Stored]],
    *,
    fall_back: bool = True,
) -> int | None:
    """Find what predecessors have left, and choose. Called on all ranks.

    The snapshot to go on from is counted to the new start before the new start is written down: a kill in between
    leaves it good, whichever of the two the next start compares it with.

    Args:
        snapshots: Of this rank.
        directory: The run's checkpoint directory; rank 0's counts.
        request: What was asked for; rank 0's counts.
        stored: Finds the checkpoints in the directory, newest first; called on rank 0.
        fall_back: Whether an older state may take the place of a newest checkpoint that is damaged.

    Returns:
        The step of the snapshot to load in place of what was asked for; None to do what was asked.

    Raises:
        SaveError: The run's directory cannot be read or written.
        LoadError: A checkpoint cannot be read, for another reason than damage.
    """
    exchange = snapshots.exchange
    run, found, may = _facts(exchange, directory, request, stored)
    newest = found[0] if found else None
    snapshots.open(run)
    held = held_by_all(snapshots)
    chosen = None
    if may:
        chosen = newest_state(
            snapshots,
            found if fall_back else found[:1],
            lambda step, one: is_as_new(step, one, run.base_ns),
            lambda one: not fall_back or can_go_on_from(Place(directory.storage, one.path), exchange),
        )
    if chosen is None and any(held) and exchange.rank == 0:
        log.info("snapshots of an earlier start are not used: %s", explain(newest_common(held), may, newest))
    run = run.next(newest.created_ns if newest else 0)
    snapshots.keep(chosen, run.start)
    exchange.all_gather(b"")  # every rank has taken over what is its own, and counted it to this start
    together(exchange, lambda: write_run(directory, run) if exchange.rank == 0 else None, SaveError)
    snapshots.open(run)
    leftovers.remove_run(snapshots.shm_dir, run.id)
    leftovers.sweep(snapshots.shm_dir)
    return chosen


def held_by_all(snapshots: Snapshots) -> list[list[int]]:
    """Which steps each rank holds; a collective."""
    return gather_json(snapshots.exchange, snapshots.steps())


def newest_state(
    snapshots: Snapshots,
    stored: Sequence[Stored],
    is_ahead: Callable[[int, Stored | None], bool],
    is_whole: Callable[[Stored], bool],
) -> int | None:
    """The step of the snapshot that is the newest whole state; None where a checkpoint is. A collective.

    A snapshot that is behind a checkpoint is given up only when every byte of that checkpoint has been found right:
    loading would fall back to the checkpoint before, which may be older than the snapshot.

    Args:
        snapshots: Of this rank.
        stored: The checkpoints, newest first; the same on all ranks, as for the rest.
        is_ahead: Whether a snapshot of this step is to be preferred to that checkpoint, or to having none (None).
        is_whole: Whether training can go on from a checkpoint; a collective.
    """
    for one in (*stored, None):
        held = held_by_all(snapshots)
        step = newest_whole(snapshots, held, lambda step, one=one: is_ahead(step, one))  # type: ignore[misc]
        if step is not None or one is None:
            return step
        if newest_common(held_by_all(snapshots)) is None or is_whole(one):
            return None
    return None


def newest_whole(snapshots: Snapshots, held: Sequence[Sequence[int]], wanted: Callable[[int], bool]) -> int | None:
    """The newest step that all ranks hold undamaged; a collective, with the same result on each.

    What is damaged on one rank is dropped on all, with an error in the log that names it.

    Args:
        snapshots: Of this rank.
        held: From :func:`held_by_all`.
        wanted: Whether a step is of use; the same on all ranks.
    """
    while (step := newest_common(held)) is not None and wanted(step):
        faults = [answer.decode() for answer in snapshots.exchange.all_gather(snapshots.verify(step).encode())]
        if not any(faults):
            return step
        snapshots.drop(step)
        held = [[other for other in steps if other != step] for steps in held]
        if snapshots.exchange.rank == 0:
            told = "; ".join(f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault)
            log.error("DAMAGED SNAPSHOT: %s. An older state is used instead. Have the memory tested.", told)
    return None


def _facts(
    exchange: Exchange, directory: Place, request: Request, stored: Callable[[], Sequence[Stored]]
) -> tuple[Run, list[Stored], bool]:
    """What rank 0 sees, told to all."""
    facts: dict[str, Any] = {}

    def look() -> None:
        if exchange.rank == 0:
            run, found = read_run(directory) or new_run(), stored()
            may = may_stand_in(request, found[0] if found else None, directory.path)
            facts.update(run=vars(run), stored=[vars(one) for one in found], may=may)

    together(exchange, look, SaveError)
    told = gather_json(exchange, facts)[0]
    return Run(**told["run"]), [Stored(**one) for one in told["stored"]], told["may"]
