"""Every way to write that is compared: from the call until the bytes are durable. Runs in the rank."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.stall.methods import DcpSave, Method, Nvrx, Ours, RawWrite
from benchmarks.stall.state import local, local_tensors, size_of
from lightning_resilience.checkpoint.storage.local import write_durably

_POLL_S = 0.002
_PATIENCE_S = 600.0


class OurFile:
    """What our writer process does with the bytes of a rank, without everything around it."""

    def __init__(self, state: Any) -> None:
        self._memory = mmap.mmap(-1, size_of(state))
        end = 0
        for tensor in local_tensors(state):
            data = tensor.reshape(-1).view(torch.uint8).numpy()
            self._memory[end : end + len(data)] = data.tobytes()
            end += len(data)
        self._done_at: float | None = None

    def save(self, path: Path, step: int) -> None:
        """Checksums, write, flush."""
        path.mkdir(exist_ok=True)
        write_durably(path / f"{dist.get_rank()}.bin", memoryview(self._memory))
        self._done_at = time.monotonic()

    def durable_at(self) -> float | None:
        """When the call returned."""
        return self._done_at

    def close(self) -> None:
        """Nothing to do."""


class TorchSave:
    """A file per rank."""

    def __init__(self, state: Any) -> None:
        self._tensors = [local(tensor) for tensor in local_tensors(state)]
        self._done_at: float | None = None

    def save(self, path: Path, step: int) -> None:
        """Write and flush."""
        path.mkdir(exist_ok=True)
        with open(path / f"{dist.get_rank()}.pt", "wb") as file:
            torch.save(self._tensors, file)
            file.flush()
            os.fsync(file.fileno())
        self._done_at = time.monotonic()

    def durable_at(self) -> float | None:
        """When the call returned."""
        return self._done_at

    def close(self) -> None:
        """Nothing to do."""


MAKERS: dict[str, Callable[[Any], Method]] = {
    "raw": RawWrite,
    "ours-file": OurFile,
    "ours": Ours,
    "dcp-save": DcpSave,
    "torch-save": TorchSave,
    "nvrx": Nvrx,
}


def seconds_until_durable(method: Method, path: Path) -> float:
    """Save once."""
    began = time.monotonic()
    method.save(path, 1)
    while (done_at := method.durable_at()) is None:
        if time.monotonic() > began + _PATIENCE_S:
            raise TimeoutError(f"{type(method).__name__}: not durable after {_PATIENCE_S:.0f} s")
        time.sleep(_POLL_S)
    return done_at - began
