"""What to measure: imported by the command and by every rank, and light for that."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Facts:
    """What the report must know of a method.

    Attributes:
        label: How it is called in the table.
        peer: Whether it is somebody else's asynchronous save that never mixes two states, to be compared with ours.
    """

    label: str
    peer: bool = False


METHODS: dict[str, Facts] = {
    "memcpy": Facts("memcpy, warm buffer"),
    "memcpy-fresh": Facts("memcpy, fresh memory"),
    "raw": Facts("raw write + fsync in a thread"),
    "raw-nice": Facts("the same at our writer's priority"),
    "dcp-save": Facts("dcp.save, synchronous"),
    "dcp-thread": Facts("dcp.async_save, thread", peer=True),
    "dcp-process": Facts("dcp.async_save, process", peer=True),
    "nvrx": Facts("NVRx, copied to a warm buffer first", peer=True),
    "nvrx-torn": Facts("NVRx as documented, torn"),
    "ours": Facts("lightning_resilience"),
    "snapshot": Facts("lightning_resilience, snapshot in memory"),
}
"""Every method by its short name, in the order of the table."""

DEFAULT_METHODS = tuple(name for name in METHODS if name != "nvrx-torn")
QUICK_METHODS = tuple(name for name in DEFAULT_METHODS if name not in ("dcp-process", "nvrx"))
"""Without the peers whose own process needs up to half a minute to start on busy cores."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One measurement.

    Attributes:
        mb: Size of the state per rank in MB (1e6 bytes).
        tensors: 0 for a state like a language model's; otherwise so many small tensors, whatever ``mb`` says.
        saves: How often each method saves.
        ranks: Number of training processes.
        step_ms: How long a training-like step shall take.
        budget_s: No further round starts when it would end later than this.
        methods: Short names.
        directory: Where checkpoints go; exists, and is emptied by whoever made it.
    """

    mb: int
    tensors: int
    saves: int
    ranks: int
    step_ms: float
    budget_s: float
    methods: tuple[str, ...]
    directory: str

    def encode(self) -> str:
        """For the command line of a rank."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Options:
        """The opposite of :meth:`encode`."""
        fields = json.loads(text)
        return Options(**{**fields, "methods": tuple(fields["methods"])})


@dataclass(frozen=True)
class Sample:
    """One save of one method on one rank.

    Attributes:
        method: Its short name.
        round: Which save of this method, from 0.
        rank: The rank.
        idle_s: Durations in seconds of training-like steps just before, with no save in flight.
        stall_s: Seconds for which the call kept the training thread.
        stall_cpu_s: How many of them the training thread was computing; the rest it waited for others.
        busy_s: Durations in seconds of the steps until the save was durable on all ranks.
        durable_s: Seconds from the call until this rank's part was durable (rank 0: the checkpoint).
    """

    method: str
    round: int
    rank: int
    idle_s: tuple[float, ...]
    stall_s: float
    stall_cpu_s: float
    busy_s: tuple[float, ...]
    durable_s: float
