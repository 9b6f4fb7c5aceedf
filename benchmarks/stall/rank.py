"""One training process of the benchmark: ``python -m benchmarks.stall.rank OPTIONS``, with its place in ``RANK``.

Saves by all methods round after round, each round in another order: whatever else the machine does, and whatever
one method leaves behind for the next, hits all of them alike.
Training-like steps run before each save and until it is durable.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.stall.methods import MAKERS, Method
from benchmarks.stall.options import Options, Sample
from benchmarks.stall.state import size_of, small_tensors, training_state

_IDLE_STEPS = 5
_FEWEST_ROUNDS = 2  # without a second one there is no steady state
_WARM_UP_STEPS = 30
_PATIENCE_S = 120.0
_MATRIX = 768  # small enough for the cache: a step needs the processor more than the memory bus


class Training:
    """Steps that do nothing but multiply matrices, and take equally long on all ranks."""

    def __init__(self, step_ms: float) -> None:
        self._left, self._right = torch.rand(_MATRIX, _MATRIX), torch.rand(_MATRIX, _MATRIX)
        self._out = torch.empty(_MATRIX, _MATRIX)
        self._products = 1
        single_s = median(self._processor_time() for _ in range(20))
        products = torch.tensor(max(1, round(step_ms / 1e3 / single_s)))
        dist.all_reduce(products, op=dist.ReduceOp.MAX)
        self._products = int(products)

    def step(self) -> float:
        """How long it took, in seconds."""
        began = time.monotonic()
        for _ in range(self._products):
            torch.mm(self._left, self._right, out=self._out)
        return time.monotonic() - began

    def _processor_time(self) -> float:
        """Of one step in seconds: what it would take if nothing else ran."""
        began = time.thread_time()
        self.step()
        return time.thread_time() - began


class Flags:
    """How ranks see, without a collective, that a save is durable on all of them: a byte each in a mapped file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if dist.get_rank() == 0:
            path.write_bytes(bytes(dist.get_world_size()))
        dist.barrier()
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 0)
        self._turn = 0

    def next_save(self) -> None:
        """From now on flags mean the next save; between two barriers."""
        self._turn = self._turn % 255 + 1

    def raise_mine(self) -> None:
        """This rank is done."""
        self._bytes[dist.get_rank()] = self._turn

    def all_raised(self) -> bool:
        """Whether all ranks are done."""
        return all(byte == self._turn for byte in self._bytes[:])


class Measurement:
    """All that one rank measures."""

    def __init__(self, options: Options) -> None:
        mesh = init_device_mesh("cpu", (options.ranks,))
        self._options = options
        self._directory = Path(options.directory)
        self._rank = dist.get_rank()
        state = small_tensors(mesh, options.tensors) if options.tensors else training_state(mesh, options.mb * 10**6)
        self.state_bytes = size_of(state)
        self._flags = Flags(self._directory / "flags")
        self._methods: dict[str, Method] = {name: MAKERS[name](state) for name in options.methods}
        self._training = Training(options.step_ms)

    def run(self) -> Iterator[Sample]:
        """Round after round, while they fit into the budget."""
        for _ in range(_WARM_UP_STEPS):
            self._training.step()
        names = list(self._methods)
        began, longest = time.monotonic(), 0.0
        for round_number in range(self._options.saves):
            now = time.monotonic()
            if not self._agree(round_number < _FEWEST_ROUNDS or now - began + longest < self._options.budget_s):
                break
            for name in Random(round_number).sample(names, len(names)):  # no method always runs after the same one
                yield self._measure(name, round_number)
            if round_number > 0:  # in the first one the peers' processes start
                longest = max(longest, time.monotonic() - now)
        for method in self._methods.values():
            method.close()

    def _measure(self, name: str, round_number: int) -> Sample:
        method, path = self._methods[name], self._directory / f"{name}-{round_number}"
        idle = tuple(self._training.step() for _ in range(_IDLE_STEPS))
        self._flags.next_save()
        dist.barrier()
        began, cpu_began = time.monotonic(), time.thread_time()
        method.save(path, round_number)
        stall_s, stall_cpu_s = time.monotonic() - began, time.thread_time() - cpu_began
        busy = tuple(self._steps_until_durable(method))
        durable_s = (method.durable_at() or began) - began
        self._delete(path)
        return Sample(name, round_number, self._rank, idle, stall_s, stall_cpu_s, busy, durable_s)

    def _steps_until_durable(self, method: Method) -> Iterator[float]:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            if method.durable_at() is not None:
                self._flags.raise_mine()
            if self._flags.all_raised():
                return
            yield self._training.step()
        raise TimeoutError(f"{type(method).__name__}: not durable after {_PATIENCE_S:.0f} s")

    def _delete(self, path: Path) -> None:
        dist.barrier()
        if self._rank == 0 and path.exists():
            shutil.rmtree(path)
        dist.barrier()

    def _agree(self, go_on: bool) -> bool:
        """What rank 0 says."""
        answer = torch.tensor(int(go_on))
        dist.broadcast(answer, src=0)
        return bool(answer)


def main(options: Options) -> None:
    """Measure, and leave the samples in ``rank<n>.json``."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    rank = int(os.environ["RANK"])
    meeting = f"file://{options.directory}/store"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=options.ranks)
    measurement = Measurement(options)
    samples = list(measurement.run())
    result = {
        "state_bytes": measurement.state_bytes,
        "step_s": median(seconds for sample in samples for seconds in sample.idle_s),
        "samples": [asdict(sample) for sample in samples],
    }
    Path(options.directory, f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Options.decode(sys.argv[1]))
