"""One process: ``python -m benchmarks.throughput.rank PLAN``, with its place in ``RANK``."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.stall.state import size_of, training_state
from benchmarks.throughput.loads import Loads
from benchmarks.throughput.plan import Plan, Sample
from benchmarks.throughput.writes import MAKERS, seconds_until_durable


def measure_loads(plan: Plan, state: Any) -> Iterator[Sample]:
    """Every method in turn, warm and cold; the order rotates, and the first round does not count."""
    loads = Loads(state, Path(plan.directory))
    loads.check()
    for number in range(plan.rounds + 1):
        for cold in (False, True):
            for name in _rotated(plan.methods, number):
                if cold:
                    dist.barrier()
                    loads.forget()
                dist.barrier()
                began = time.monotonic()
                loads.methods[name]()
                if number > 0:
                    yield Sample(name, cold, time.monotonic() - began)


def measure_writes(plan: Plan, state: Any) -> Iterator[Sample]:
    """Every method in turn; the order rotates, and the first round does not count: it starts processes."""
    methods = {name: MAKERS[name](state) for name in plan.methods}
    path = Path(plan.directory, "a.ckpt")
    for number in range(plan.rounds + 1):
        for name in _rotated(plan.methods, number):
            dist.barrier()
            seconds = seconds_until_durable(methods[name], path)
            if number > 0:
                yield Sample(name, False, seconds)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)
    for method in methods.values():
        method.close()


def _rotated(methods: Sequence[str], number: int) -> list[str]:
    first = number % len(methods)
    return [*methods[first:], *methods[:first]]


def main(plan: Plan) -> None:
    """Measure, and leave the figures in ``rank<n>.json``."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // plan.ranks))
    rank = int(os.environ["RANK"])
    meeting = f"file://{plan.directory}/store"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=plan.ranks)
    state = training_state(init_device_mesh("cpu", (plan.ranks,)), plan.mb * 10**6)
    measure = measure_loads if plan.task == "load" else measure_writes
    samples = [asdict(sample) for sample in measure(plan, state)]
    Path(plan.directory, f"rank{rank}.json").write_text(json.dumps({"samples": samples, "state_bytes": size_of(state)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Plan.decode(sys.argv[1]))
