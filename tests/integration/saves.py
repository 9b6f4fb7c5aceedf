"""Runs on each rank: a training without a trainer, that saves at every step until somebody kills it.

Every tensor of the state is filled with the number of the step and every other value is that number, so a
checkpoint that mixes two steps shows.

    saves FOLDER SHM SEED STEPS sharded|file
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

from lightning_resilience import newest_checkpoint
from lightning_resilience.checkpoint.engine import CheckpointEngine, EngineOptions
from lightning_resilience.checkpoint.envelope import archive
from lightning_resilience.checkpoint.exchange import GroupExchange
from lightning_resilience.checkpoint.layout import flatten
from lightning_resilience.checkpoint.reader import ShardReader
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.checkpoint.verify import choose

KEPT = 2
SHAPES = {"net.0.weight": (1001, 257), "net.0.bias": (1001,), "net.1.weight": (3, 1001)}


def make_state(mesh: DeviceMesh | None) -> dict[str, Any]:
    """Parameters, a buffer, and what an optimizer keeps; sharded over the mesh if there is one."""

    def tensor(shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape) if mesh is None else zeros(shape, device_mesh=mesh, placements=[Shard(0)])

    return {
        "state_dict": {**{name: tensor(shape) for name, shape in SHAPES.items()}, "calls": torch.zeros(1000)},
        "optimizer_0": {
            "state": {
                name: {"exp_avg": tensor(shape), "exp_avg_sq": tensor(shape), "step": torch.zeros(())}
                for name, shape in SHAPES.items()
            },
            "param_groups": [{"lr": 0.0, "params": list(SHAPES)}],
        },
    }


def fill(state: dict[str, Any], step: int) -> None:
    for leaf in flatten(state):
        if isinstance(leaf.value, Tensor):
            leaf.value.fill_(step)
    state["optimizer_0"]["param_groups"][0]["lr"] = float(step)


def resumed_step(path: str | None, state: dict[str, Any], exchange: GroupExchange) -> int:
    """Load what there is, as a strategy does, and check it; 0 when there is nothing."""
    found = exchange.all_gather((path or "").encode())[0].decode()
    if not found:
        return 0
    chosen = choose(place_for(found), exchange, fall_back=True)
    if chosen.is_dir():
        step = int(torch.load(str(chosen / "meta.pt"), weights_only=True)["global_step"])
        tensors = {leaf.name: leaf.value for leaf in flatten(state) if isinstance(leaf.value, Tensor)}
        ShardReader(chosen).read_into(tensors)
    else:
        content = torch.load(chosen.path, weights_only=True)
        step = content["global_step"]
        tensors = {leaf.name: leaf.value for leaf in flatten(content) if isinstance(leaf.value, Tensor)}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert local.eq(step).all(), f"{name} of {chosen} is not that of step {step}"
    return step


def main() -> None:
    folder, shm, seed, steps, kind = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    random.seed(seed)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    exchange = GroupExchange(dist.group.WORLD)  # type: ignore[arg-type]  # it was just made
    state = make_state(init_device_mesh("cpu", (dist.get_world_size(),)))
    patience_s = 120.0 if seed % 5 == 0 else 0.0  # writers killed a moment ago may be taken for living ones
    newest = newest_checkpoint(folder, wait_s=patience_s) if rank == 0 else None
    first = resumed_step(newest, state, exchange) + 1
    engine = CheckpointEngine(EngineOptions(shm_dir=shm, deadline_s=60.0, on_busy="wait"), exchange)
    if kind == "file":
        state = make_state(None)
    for step in range(first, first + steps):
        fill(state, step)
        path = Path(folder, "last.ckpt" if step % 3 == 0 else f"step={step}.ckpt")
        if kind == "sharded":
            files = {f"rank_{rank}.pt": archive({"step": step})}
            if rank == 0:
                files["meta.pt"] = archive({"global_step": step})
            engine.save_sharded(str(path), step, state, files)
        elif rank == 0:
            engine.save_file(str(path), step, {"global_step": step, **state})
        old = path.with_name(f"step={step - KEPT - 1}.ckpt")
        if rank == 0 and old.exists():
            engine.remove(str(old))
        if step == first + seed % 4:
            Path(folder, f"running-{seed}-{rank}").touch()
        exchange.all_gather(b"")
        time.sleep(random.uniform(0.0, 0.01))
    engine.close()
    dist.destroy_process_group()
