"""Which run a snapshot belongs to: a small file in the run's checkpoint directory gives it an identity.

Two jobs on one machine may use the same path in different containers, and a directory may be emptied to begin anew;
the identity is that of the directory's content. The count of starts tells snapshots of the last start from ones that
a machine has kept from before the run went on elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from dataclasses import dataclass

from lightning_resilience.checkpoint.storage import Place

RUN_FILE = ".lightning-resilience-run.json"


@dataclass(frozen=True)
class Run:
    """A run, as its directory knows it.

    Attributes:
        id: Made up at its first start.
        start: How many starts with snapshots there were, this one included.
        base_ns: Commit time of the newest checkpoint in the directory at this start; 0 without any.
    """

    id: str
    start: int
    base_ns: int

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    def next(self, base_ns: int) -> Run:
        """The run at its next start."""
        return Run(self.id, self.start + 1, base_ns)


def new_run() -> Run:
    """A run that has not started yet."""
    return Run(uuid.uuid4().hex[:16], 0, 0)


def read_run(directory: Place) -> Run | None:
    """The run whose directory this is; None where none was started with snapshots, or the file says nothing."""
    try:
        fields = json.loads((directory / RUN_FILE).read())
        run = Run(str(fields["id"]), int(fields["start"]), int(fields["base_ns"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return run if run.id.isalnum() else None


def write_run(directory: Place, run: Run) -> None:
    """Remember it."""
    directory.storage.make_directory(directory.path)
    (directory / RUN_FILE).put(run.encode())


def forget_run(directory: Place) -> None:
    """No snapshot belongs to this directory from now on."""
    if (directory / RUN_FILE).exists():
        (directory / RUN_FILE).delete()
