"""What to measure: imported by the command and by every rank, and light for that."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

METHODS = {
    "dcp-save": "dcp.save, synchronous",
    "dcp-thread": "dcp.async_save, thread",
    "dcp-process": "dcp.async_save, process",
    "nvrx": "NVRx, copied to a warm buffer first",
    "ours-wait": 'lightning_resilience, on_busy="wait"',
    "ours": 'lightning_resilience, on_busy="latest"',
}
"""Every method by its short name, in the order of the table. A peer that is asked for a save while one is open
waits for that one, as its own documentation has it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One measurement.

    Attributes:
        mb: Size of the state per rank in MB (1e6 bytes).
        saves: How many each method is asked for.
        ranks: Training processes.
        step_ms: How long a training-like step takes.
        methods: Short names.
        directory: Where checkpoints go.
    """

    mb: int
    saves: int
    ranks: int
    step_ms: float
    methods: tuple[str, ...]
    directory: str

    def encode(self) -> str:
        """For the command line of a rank."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Plan:
        """The opposite of :meth:`encode`."""
        fields = json.loads(text)
        return Plan(**{**fields, "methods": tuple(fields["methods"])})


@dataclass(frozen=True)
class Run:
    """What one rank saw of one method.

    Attributes:
        method: Its short name.
        training_s: Seconds that so many steps take when nothing is saved.
        wall_s: Seconds they took with the saves.
        blocked_s: How many of them the training thread spent in saving, waiting for the save before included.
        saved: Saves that became durable, of those asked for.
    """

    method: str
    training_s: float
    wall_s: float
    blocked_s: float
    saved: int

    @property
    def efficiency(self) -> float:
        """Part of the time that went into training."""
        return self.training_s / self.wall_s
