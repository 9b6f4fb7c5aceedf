"""What the run has on storage, as far as snapshots are concerned."""

from __future__ import annotations

from lightning_resilience.checkpoint.candidates import find
from lightning_resilience.checkpoint.snapshots.choice import Stored
from lightning_resilience.checkpoint.storage import Place


def newest_stored(directory: Place) -> Stored | None:
    """The newest checkpoint in the run's directory that can be whole."""
    for candidate in find(directory):
        if not candidate.fault:
            step = candidate.proof.step if candidate.proof else None
            return Stored(candidate.place.resolved().path, step, candidate.created_ns)
    return None
