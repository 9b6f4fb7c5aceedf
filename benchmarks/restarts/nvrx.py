"""A rank of the job under NVIDIA's ``inprocess.Wrapper``: a torch loop, since the Wrapper restarts functions.

It is spared everything it would need besides: no Lightning, no data loader, and after a restart the model starts
from its first values instead of loading a state.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Optional

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # what torch.distributed re-exports
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.restarts.plan import Plan
from benchmarks.restarts.training import Notebook, batch_for, build_model, width_of

_GLOO_TIMEOUT_S = 10.0  # a hung collective ends by this where nobody aborts gloo
_INTERVAL = timedelta(milliseconds=10)


class AbortGloo(inprocess.abort.AbortTorchDistributed):  # type: ignore[misc]  # untyped
    """Ends collectives that wait for a rank which will not come: the package itself aborts only NCCL."""

    def __init__(self) -> None:
        self.sockets: set[int] = set()

    def __call__(self, state: Any) -> Any:
        for fd in self.sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                if _port(connection.getsockname()) not in _store_ports():  # rank 0 serves the stores
                    connection.getpeername()  # fails for one that listens
                    connection.shutdown(socket.SHUT_RDWR)
        self.sockets.clear()
        return super().__call__(state)


def _port(address: Any) -> int:
    return address[1] if isinstance(address, tuple) else 0


def _store_ports() -> tuple[int, int]:
    """Of the package's store and of ours."""
    port = int(os.environ["MASTER_PORT"])
    return port, port + 1


def run(plan: Plan) -> None:
    """Train until the last step, through all faults."""
    abort = AbortGloo()
    notebook = Notebook(plan, int(os.environ["RANK"]))
    position = [0]  # the step to do next: kept over restarts, so that none is redone
    tuned = plan.method == "nvrx-tuned"

    def train(call: Optional[inprocess.CallWrapper] = None) -> None:  # noqa: UP045  # it looks for this very type
        assert call is not None  # the wrapper puts itself there
        if call.iteration > 0:
            notebook.noticed()
        with _process_group(call.iteration, abort if tuned else None):
            _train(plan, notebook, position)

    _wrapper(plan, abort if tuned else None)(train)()


def _wrapper(plan: Plan, abort: AbortGloo | None) -> inprocess.Wrapper:
    deadline = timedelta(seconds=plan.deadline_s)
    store = {"port": int(os.environ["MASTER_PORT"]), "timeout": timedelta(seconds=60)}
    limits = {"soft_timeout": deadline, "hard_timeout": 3 * deadline} if plan.kind == "hang" else {}
    if abort is None:
        return inprocess.Wrapper(store_kwargs=store, **limits)
    return inprocess.Wrapper(
        store_kwargs=store,
        abort=abort,
        last_call_wait=timedelta(0),
        monitor_thread_interval=_INTERVAL,
        monitor_process_interval=_INTERVAL,
        progress_watchdog_interval=_INTERVAL,
        heartbeat_interval=_INTERVAL,
        **limits,
    )


@contextlib.contextmanager
def _process_group(generation: int, abort: AbortGloo | None) -> Iterator[None]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _base_store(rank)
    before = _open_sockets()
    dist.init_process_group(
        "gloo",
        store=PrefixStore(str(generation), store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_GLOO_TIMEOUT_S),
    )
    dist.all_reduce(torch.ones(1))
    if abort is not None:
        abort.sockets = _open_sockets() - before
    yield
    dist.destroy_process_group()


_stores: dict[int, TCPStore] = {}


def _base_store(rank: int) -> TCPStore:
    """One store for all generations, beside the one of the package."""
    port = _store_ports()[1]
    if port not in _stores:
        _stores[port] = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    return _stores[port]


def _open_sockets() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def _train(plan: Plan, notebook: Notebook, position: list[int]) -> None:
    mesh = init_device_mesh("cpu", (plan.ranks,))
    model = build_model(plan.millions)
    width = width_of(model)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(position[0], plan.steps):
        notebook.begin_step(step)
        optimizer.zero_grad()
        model(batch_for(step, dist.get_rank(), width)).pow(2).mean().backward()
        optimizer.step()
        notebook.end_step(step)
        position[0] = step + 1
