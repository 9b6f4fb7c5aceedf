"""Checkpoints that have failed to load again and again: they are passed over without being read once more.

Storage that answers with other bytes now and then, or a file that is damaged, costs each start a whole reading and a
way back. The count lies in a hidden file beside the checkpoints, for all starts of all jobs; a checkpoint that loads,
or that is found whole by `lightning-resilience checkpoints verify`, begins anew, and so does one that is written again.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass

from lightning_resilience.checkpoint.storage import Place

log = logging.getLogger(__name__)

FILE = ".lightning-resilience-failed-loads.json"
LIMIT = 3


@dataclass(frozen=True)
class Failures:
    """Of one checkpoint.

    Attributes:
        count: How often it has failed to load.
        created_ns: Its commit time: one that is written under the same name later has not failed.
        fault: What was wrong the last time.
    """

    count: int
    created_ns: int
    fault: str

    @property
    def are_plain(self) -> bool:
        """What somebody else has written may be of any kind; only rank 0 reads it, and must not fail alone."""
        return type(self.count) is int and type(self.created_ns) is int and type(self.fault) is str


def note_failure(place: Place, created_ns: int, fault: str) -> None:
    """It has failed once more. Storage that cannot be written to keeps no count."""
    known = _read(place.parent)
    before = known.get(place.name)
    count = before.count if before is not None and before.created_ns == created_ns else 0
    known[place.name] = Failures(count + 1, created_ns, fault)
    _write(place.parent, known)


def forgive(place: Place) -> bool:
    """It is whole; returns whether it had failed before."""
    known = _read(place.parent)
    if known.pop(place.name, None) is None:
        return False
    _write(place.parent, known)
    return True


class Quarantine:
    """What is passed over; asks storage once for each directory, so it is for one search."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Failures]] = {}

    def why(self, place: Place, created_ns: int) -> str:
        """Why a checkpoint is not even tried; empty if it is."""
        directory = place.parent
        if directory.path not in self._known:
            self._known[directory.path] = _read(directory)
        found = self._known[directory.path].get(place.name)
        if found is None or found.count < LIMIT or found.created_ns != created_ns:
            return ""
        return (
            f"{place} has failed to load {found.count} times, the last time because {found.fault}. Try it again with"
            " `lightning-resilience checkpoints verify`, or name it as ckpt_path"
        )


def _read(directory: Place) -> dict[str, Failures]:
    try:
        found = {name: Failures(**fields) for name, fields in json.loads((directory / FILE).read()).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # none has failed; or nobody can say
        return {}
    return {name: failures for name, failures in found.items() if failures.are_plain}


def _write(directory: Place, known: dict[str, Failures]) -> None:
    file = directory / FILE
    try:
        if known:
            file.put(json.dumps({name: asdict(failures) for name, failures in known.items()}).encode())
        else:
            file.delete()
    except OSError as error:
        log.warning("failed loads are not counted: %s cannot be written (%s)", file, error)
