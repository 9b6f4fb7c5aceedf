"""What is to be measured, and the methods. Both the command and the ranks import it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

LOADS = {
    "raw": "raw readinto, 1 thread",
    "raw-threads": "raw readinto, 2 threads",
    "ours": "lightning_resilience, verified",
    "dcp-load": "dcp.load",
    "torch-load": "torch.load of a file per rank",
}
WRITES = {
    "raw": "raw write + fsync",
    "ours-file": "our write of one file, checksums on",
    "ours": "lightning_resilience, save to committed",
    "dcp-save": "dcp.save",
    "torch-save": "torch.save + fsync of a file per rank",
    "nvrx": "NVRx TorchAsyncCheckpoint, flushed",
}


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        task: "load" or "write".
        mb: Size of the state per rank in MB.
        rounds: How often each method is measured.
        ranks: Processes.
        methods: Which.
        directory: On the file system to measure.
    """

    task: str
    mb: int
    rounds: int
    ranks: int
    methods: tuple[str, ...]
    directory: str

    def encode(self) -> str:
        """As one argument of a command line."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Plan:
        """The opposite of :meth:`encode`."""
        fields = json.loads(text)
        return Plan(**{**fields, "methods": tuple(fields["methods"])})


@dataclass(frozen=True)
class Sample:
    """One measurement of one rank.

    Attributes:
        method: Its short name.
        cold: Whether the files had been dropped from the page cache.
        seconds: How long it took.
    """

    method: str
    cold: bool
    seconds: float
