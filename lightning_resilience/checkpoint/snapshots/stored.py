"""What the run has on storage, as far as snapshots are concerned."""

from __future__ import annotations

from lightning_resilience.checkpoint.candidates import find
from lightning_resilience.checkpoint.snapshots.choice import Stored
from lightning_resilience.checkpoint.storage import Place


def stored_in(directory: Place) -> list[Stored]:
    """The checkpoints in the run's directory that can be whole, newest first."""
    return [
        Stored(one.place.resolved().path, one.proof.step if one.proof else None, one.created_ns)
        for one in find(directory)
        if not one.fault
    ]


def newest_stored(directory: Place) -> Stored | None:
    """The newest checkpoint in the run's directory that can be whole."""
    return next(iter(stored_in(directory)), None)
