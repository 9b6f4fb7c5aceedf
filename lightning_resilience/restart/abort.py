"""End the collectives in which this rank is blocked.

NCCL aborts communicators itself. gloo has no such call that works (``ProcessGroupGloo.abort`` does not wake a waiting
thread, torch 2.13), but a collective fails at once when there is nothing to read from its connections any more. Only
those that were made for groups are concerned: listening sockets, the control store, and whatever else the process
talks to stay.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from lightning_resilience import _torch_groups
from lightning_resilience.restart.connections import Connections

log = logging.getLogger(__name__)

_connections = Connections()


class Abortable(Protocol):
    """A backend that can end its collectives by itself: ``ProcessGroupNCCL``. Called on a thread of its own."""

    def abort(self) -> None:
        """End all collectives; may block while others of the same device are not aborted too."""
        ...


def abort_groups(timeout_s: float) -> None:
    """End all collectives of this process. Called by the monitor thread; may be called again.

    Args:
        timeout_s: How long backends may take.
    """
    backends = [b for group in _torch_groups.live_groups() for b in _torch_groups.device_backends(group)]
    abort_backends([backend for backend in backends if _is_nccl(backend)], timeout_s)
    _connections.cut(_torch_groups.group_sockets())


def let_go_of_connections() -> None:
    """All ranks have left the collectives that were ended."""
    _connections.let_go()


def abort_backends(backends: Sequence[Abortable], timeout_s: float) -> None:
    """Abort all at the same time, as one may wait for another."""
    threads = [threading.Thread(target=_abort, args=(item,), name="abort", daemon=True) for item in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)


def is_failed_collective(error: BaseException) -> bool:
    """Whether an exception only says that another rank is not there: torch raises it where it communicates."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and "torch/distributed/" in frames[-1].filename
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and inside)


def _abort(backend: Abortable) -> None:
    try:
        backend.abort()
    except RuntimeError as error:  # the edge of a thread: the restart finds out by its deadline if it matters
        log.warning("a communicator could not be aborted: %s", error)


def _is_nccl(backend: object) -> bool:
    return type(backend).__name__ == "ProcessGroupNCCL"
