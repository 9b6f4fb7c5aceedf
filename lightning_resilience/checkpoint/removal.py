"""Carries out what retention has decided; runs in rank 0's writer process, after a newer checkpoint is committed."""

from __future__ import annotations

from lightning_resilience.checkpoint.catalog import catalog, committed, linked
from lightning_resilience.checkpoint.messages import Retain
from lightning_resilience.checkpoint.retention import decode_policies, doomed
from lightning_resilience.checkpoint.storage import Place, place_for


def retain(request: Retain, run_started_ns: int) -> list[Place]:
    """Delete what may be deleted in a directory of checkpoints, and return what that was.

    What is there is looked at anew each time: others commit and delete too. What a link names is kept.

    Args:
        request: Directory, policies, and what to keep in any case.
        run_started_ns: When this run began, in nanoseconds since the epoch.

    Raises:
        OSError: The storage did not do it.
    """
    directory = place_for(request.path, request.storage_options)
    found = catalog(directory)
    whole = committed(found)
    spared = {*linked(directory), *(_resolved(path, request) for path in request.spared)}
    if request.resumed_from and not any(item.resumable and item.created_ns > run_started_ns for item in whole):
        spared.add(_resolved(request.resumed_from, request))
    names = {str(item.place): str(item.place.resolved()) for item in found}
    kept = [path for path, real in names.items() if path in spared or real in spared]
    going = [item.path for item in doomed(whole, decode_policies(request.policies), kept)]
    places = [place_for(path, request.storage_options) for path in going]
    for place in places:
        place.delete()
    return places


def _resolved(path: str, request: Retain) -> str:
    return str(place_for(path, request.storage_options).resolved())
