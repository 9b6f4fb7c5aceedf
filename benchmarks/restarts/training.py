"""What all methods train, and how a rank notes down when a fault struck and when each step was done."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.restarts.plan import Plan

_LAYERS = 16
_BATCH = 4


def build_model(millions: int) -> nn.Sequential:
    """Square layers that hold about so many million parameters."""
    width = round((millions * 1e6 / _LAYERS) ** 0.5)
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(_LAYERS)])


def batch_for(step: int, rank: int, width: int) -> torch.Tensor:
    """The same batch whenever this step is done."""
    return torch.randn(_BATCH, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def width_of(model: nn.Module) -> int:
    """How wide the layers are."""
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    return layer.in_features


class Injected(RuntimeError):
    """The fault of the benchmark; its text names the step, as no two faults are the same."""


class Notebook:
    """A rank's notes: when faults struck and steps were done, in seconds of the clock that all processes share.

    Args:
        plan: The job.
        rank: Whose notes.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._file = Path(plan.directory, f"rank{rank}.jsonl").open("a", buffering=1)
        self._struck: set[int] = set()

    def begin_step(self, step: int) -> None:
        """Strike here if it is our turn, once."""
        if self._plan.faulty_rank(step) != self._rank or step in self._struck:
            return
        self._struck.add(step)
        self._note("fault", step)
        if self._plan.kind == "exception":
            raise Injected(f"injected in step {step}")
        while True:  # runs bytecode, as most hangs of a data loader or a retry loop do
            time.sleep(0.01)

    def end_step(self, step: int) -> None:
        """The optimizer's step is done."""
        self._note("step", step)

    def noticed(self) -> None:
        """Recovery begins here: for hangs, the end of detection."""
        self._note("noticed", -1)

    def _note(self, what: str, step: int) -> None:
        self._file.write(json.dumps({"what": what, "step": step, "at": time.monotonic()}) + "\n")
