"""One training process: ``python -m benchmarks.efficiency.rank PLAN``, with its place in ``RANK``.

Measures how long a plain write of the state takes, and lets every method save in that interval.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.efficiency.plan import Plan, Run
from benchmarks.stall.methods import DcpAsyncSave, DcpSave, Method, Nvrx, Ours, RawWrite
from benchmarks.stall.rank import Training
from benchmarks.stall.state import size_of, training_state
from lightning_resilience.checkpoint.engine import EngineOptions

_UNDISTURBED_STEPS = 15
_RAW_WRITES = 3
_POLL_S = 0.005
_PATIENCE_S = 240.0

MAKERS: dict[str, Callable[[Any], Method]] = {
    "dcp-save": DcpSave,
    "dcp-thread": lambda state: DcpAsyncSave(state, AsyncCheckpointerType.THREAD),
    "dcp-process": lambda state: DcpAsyncSave(state, AsyncCheckpointerType.PROCESS),
    "nvrx": Nvrx,
    "ours-wait": lambda state: Ours(state, EngineOptions(on_busy="wait")),
    "ours": lambda state: Ours(state, EngineOptions(on_busy="latest")),
}


class Measurement:
    """All that one rank measures."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._state = training_state(init_device_mesh("cpu", (plan.ranks,)), plan.mb * 10**6)
        self.state_bytes = size_of(self._state)
        self._training = Training(plan.step_ms)
        self.step_s = self._undisturbed()
        self.write_s = self._raw_write_s()
        self.steps_between = max(1, round(self.write_s / self.step_s))

    def run(self) -> Iterator[Run]:
        """One method after the other."""
        for name in self._plan.methods:
            method = MAKERS[name](self._state)
            yield self._measure(name, method)
            method.close()

    def _measure(self, name: str, method: Method) -> Run:
        self._save_alone(name, method)
        step_s, blocked_s, saved = self._undisturbed(), 0.0, 0
        waits = not isinstance(method, Ours)  # a peer takes one save at a time, ours decides for itself
        dist.barrier()
        began = time.monotonic()
        for number in range(self._plan.saves):
            called = time.monotonic()
            if waits and number > 0:
                _wait(method)
            method.save(self._path(name, number), number)
            blocked_s += time.monotonic() - called
            for _ in range(self.steps_between):
                self._training.step()
        wall_s = time.monotonic() - began
        _wait(method)
        saved = method.outcomes().count("saved") - 1 if isinstance(method, Ours) else self._plan.saves
        self._delete(name)
        steps = self._plan.saves * self.steps_between
        return Run(name, steps * step_s, wall_s, blocked_s, saved)

    def _save_alone(self, name: str, method: Method) -> None:
        """The first save starts processes and fills buffers."""
        method.save(self._path(name, -1), 0)
        _wait(method)
        self._delete(name)

    def _undisturbed(self) -> float:
        """Seconds of a step while nothing is saved; the slowest rank's, as training waits for it."""
        dist.barrier()
        steps = torch.tensor(median(self._training.step() for _ in range(_UNDISTURBED_STEPS)))
        dist.all_reduce(steps, op=dist.ReduceOp.MAX)
        return float(steps)

    def _raw_write_s(self) -> float:
        """Seconds to write and flush the state's bytes while nothing else is done; the slowest rank's."""
        method, times = RawWrite(self._state), []
        for number in range(_RAW_WRITES):
            dist.barrier()
            began = time.monotonic()
            method.save(self._path("raw", number), number)
            times.append(_wait(method) - began)
            self._delete("raw")
        method.close()
        seconds = torch.tensor(median(times))
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    def _path(self, name: str, number: int) -> Path:
        return Path(self._plan.directory, name, f"{number}.ckpt")

    def _delete(self, name: str) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(Path(self._plan.directory, name), ignore_errors=True)
            Path(self._plan.directory, name).mkdir()
        dist.barrier()


def _wait(method: Method) -> float:
    """Until the last save is durable; when that was."""
    deadline = time.monotonic() + _PATIENCE_S
    while (done_at := method.durable_at()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{type(method).__name__}: not durable after {_PATIENCE_S:.0f} s")
        time.sleep(_POLL_S)
    return done_at


def main(plan: Plan) -> None:
    """Measure, and leave the figures in ``rank<n>.json``."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // plan.ranks))
    rank = int(os.environ["RANK"])
    if rank == 0:
        for name in ("raw", *plan.methods):
            Path(plan.directory, name).mkdir(exist_ok=True)
    meeting = f"file://{plan.directory}/store"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=plan.ranks)
    measurement = Measurement(plan)
    result = {
        "runs": [asdict(run) for run in measurement.run()],
        "state_bytes": measurement.state_bytes,
        "step_s": measurement.step_s,
        "write_s": measurement.write_s,
        "steps_between": measurement.steps_between,
    }
    Path(plan.directory, f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Plan.decode(sys.argv[1]))
