"""Every way to save that is compared, behind one protocol. Runs in the rank.

Each is run as its documentation says, in the configuration that was found best for it here; the choices are
listed in ``benchmarks/README.md``.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.stall.state import local, local_tensors, size_of
from lightning_resilience.checkpoint.engine import CheckpointEngine, EngineOptions
from lightning_resilience.checkpoint.exchange import GroupExchange
from lightning_resilience.checkpoint.snapshots.engine import Snapshots
from lightning_resilience.checkpoint.snapshots.points import State
from lightning_resilience.checkpoint.snapshots.run import Run

_WRITE_BYTES = 8 << 20
_NICENESS = 10  # that of our writer


class Method(Protocol):
    """One way to save the state it was made with. All calls come from the training thread, on all ranks."""

    def save(self, path: Path, step: int) -> None:
        """Return as soon as training may go on and change the state. ``path`` does not exist."""
        ...

    def durable_at(self) -> float | None:
        """Monotonic time at which the last save became durable, None until then; called between steps."""
        ...

    def close(self) -> None:
        """Give everything back. No save is open."""
        ...


class Memcpy:
    """No save: what the one copy costs that every asynchronous save needs."""

    def __init__(self, state: Any, *, warm: bool) -> None:
        self._sources = list(local_tensors(state))
        self._size = size_of(state)
        self._buffer = self._copy() if warm else None
        self._done_at: float | None = None

    def save(self, path: Path, step: int) -> None:
        """Copy; a fresh buffer's pages come from the kernel one by one, and go back to it afterwards."""
        self._copy(self._buffer)
        self._done_at = time.monotonic()

    def durable_at(self) -> float | None:
        """Nothing is written."""
        return self._done_at

    def close(self) -> None:
        """Nothing to do."""

    def _copy(self, buffer: torch.Tensor | None = None) -> torch.Tensor:
        buffer = torch.empty(self._size, dtype=torch.uint8) if buffer is None else buffer
        target = buffer.data_ptr()
        for source in self._sources:
            ctypes.memmove(target, source.data_ptr(), source.nbytes)
            target += source.nbytes
        return buffer


class RawWrite:
    """The same bytes from a warm buffer to a file, by a thread that does nothing else."""

    def __init__(self, state: Any, *, niceness: int = 0) -> None:
        self._buffer: memoryview = torch.ones(size_of(state), dtype=torch.uint8).numpy().data
        self._thread = ThreadPoolExecutor(1, initializer=_lower_priority, initargs=(niceness,))
        self._done: Future[float] | None = None

    def save(self, path: Path, step: int) -> None:
        """Only hand over."""
        self._done = self._thread.submit(self._write, path)

    def durable_at(self) -> float | None:
        """After the fsync."""
        return _result(self._done)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _write(self, path: Path) -> float:
        path.mkdir(exist_ok=True)
        with open(path / f"{dist.get_rank()}.bin", "wb", buffering=0) as file:
            for start in range(0, len(self._buffer), _WRITE_BYTES):
                file.write(self._buffer[start : start + _WRITE_BYTES])
            os.fsync(file.fileno())
        return time.monotonic()


class DcpSave:
    """``torch.distributed.checkpoint.save``."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._group = dist.new_group(backend="gloo")
        self._done_at: float | None = None

    def save(self, path: Path, step: int) -> None:
        """Everything happens here."""
        save(
            self._state,
            storage_writer=FileSystemWriter(path),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            process_group=self._group,
        )
        self._done_at = time.monotonic()

    def durable_at(self) -> float | None:
        """When the call returned: it flushes its files."""
        return self._done_at

    def close(self) -> None:
        """Nothing to do."""


class DcpAsyncSave:
    """``torch.distributed.checkpoint.async_save`` with its stager kept, so that buffers stay warm."""

    def __init__(self, state: Any, kind: AsyncCheckpointerType) -> None:
        self._state = state
        self._kind = kind
        self._group = dist.new_group(backend="gloo")
        shared = kind is AsyncCheckpointerType.PROCESS  # without it the state is pickled through a pipe
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=shared,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._done: Future[float] | None = None

    def save(self, path: Path, step: int) -> None:
        """Stages here and writes elsewhere."""
        upload = async_save(
            self._state,
            storage_writer=FileSystemWriter(path),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        self._done = _time_of(cast("Future[Any]", upload))

    def durable_at(self) -> float | None:
        """When the upload's future completed: files are flushed by then."""
        return _result(self._done)

    def close(self) -> None:
        """Free the staging buffers."""
        self._stager.close()


class Nvrx:
    """NVIDIA's ``TorchAsyncCheckpoint`` with its persistent worker, a file a rank.

    It copies only CUDA tensors; tensors on the CPU reach the worker as shared memory and training goes on changing
    them under its hands. So that the file holds one state, it is given a copy in shared memory that is kept warm.
    """

    def __init__(self, state: Any, *, torn: bool = False) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        self._checkpoint = TorchAsyncCheckpoint(persistent_queue=True)
        self._sources = [] if torn else list(local_tensors(state))
        self._state = torch.utils._pytree.tree_map(_shared_copy, state)
        self._copies = list(local_tensors(self._state))
        self._flusher = ThreadPoolExecutor(1)
        self._flushed: Future[float] | None = None
        self._file = Path()

    def save(self, path: Path, step: int) -> None:
        """Copy and hand over."""
        path.mkdir(exist_ok=True)
        self._file, self._flushed = path / f"{dist.get_rank()}.pt", None
        if self._sources:
            torch._foreach_copy_(self._copies, self._sources)
        with mock.patch("torch.cuda.synchronize"):  # called without asking whether there is a CUDA device
            self._checkpoint.async_save(self._state, self._file)

    def durable_at(self) -> float | None:
        """It does not flush, so that is done here once it has written."""
        if self._flushed is None:
            self._checkpoint.finalize_async_save(blocking=False, no_dist=True)
            if self._checkpoint._async_calls_queue.get_num_unfinalized_calls() == 0:
                self._flushed = self._flusher.submit(_flush, self._file)
        return _result(self._flushed)

    def close(self) -> None:
        """End the worker and the thread."""
        self._checkpoint.finalize_async_save(blocking=True, no_dist=True, terminate=True)
        self._flusher.shutdown()


class Ours:
    """The checkpoint engine, set up as the strategy does: memory when ``fit`` starts, the plan after the first step."""

    def __init__(self, state: Any, options: EngineOptions | None = None) -> None:
        self._state = state
        self._engine = CheckpointEngine(options or EngineOptions(), GroupExchange(dist.new_group(backend="gloo")))
        self._engine.reserve(size_of(state))
        self._engine.prepare(state)
        self._files = {"meta.pt": bytes(10_000)} if dist.get_rank() == 0 else {}
        self._began = 0.0

    def save(self, path: Path, step: int) -> None:
        """Stages here; the writer process does the rest."""
        self._began = time.monotonic()
        self._engine.save_sharded(str(path), step, self._state, self._files)

    def durable_at(self) -> float | None:
        """When it was committed (rank 0), or this rank's part was on the device."""
        report = self._engine.history[-1]
        if report.error:
            raise RuntimeError(report.error)
        return None if report.durable_s is None else self._began + report.durable_s

    def outcomes(self) -> list[str]:
        """What became of every save, oldest first."""
        return [report.outcome for report in self._engine.history]

    def close(self) -> None:
        """Free the arena, end the writer."""
        self._engine.close()


class Snapshot:
    """The same state kept in shared memory and not written; the memory is there before the first."""

    def __init__(self, state: Any) -> None:
        rank = dist.get_rank()
        self._state = State(state, set(), {"meta.pt": bytes(10_000), "rank.pt": bytes(10_000)})
        self._snapshots = Snapshots("/dev/shm", 1, GroupExchange(dist.new_group(backend="gloo")))
        self._snapshots.open(Run(f"benchmark{os.getpid()}", rank, 0))
        self._snapshots.prepare(self._state)
        self._done_at: float | None = None

    def save(self, path: Path, step: int) -> None:
        """Everything happens here."""
        self._snapshots.take(step, lambda: self._state)
        path.mkdir(exist_ok=True)  # the others leave something to delete
        self._done_at = time.monotonic()

    def durable_at(self) -> float | None:
        """It is as safe as the machine."""
        return self._done_at

    def close(self) -> None:
        """Give the memory back."""
        self._snapshots.close(keep=False)


MAKERS: dict[str, Callable[[Any], Method]] = {
    "memcpy": lambda state: Memcpy(state, warm=True),
    "memcpy-fresh": lambda state: Memcpy(state, warm=False),
    "raw": RawWrite,
    "raw-nice": lambda state: RawWrite(state, niceness=_NICENESS),
    "dcp-save": DcpSave,
    "dcp-thread": lambda state: DcpAsyncSave(state, AsyncCheckpointerType.THREAD),
    "dcp-process": lambda state: DcpAsyncSave(state, AsyncCheckpointerType.PROCESS),
    "nvrx": Nvrx,
    "nvrx-torn": lambda state: Nvrx(state, torn=True),
    "ours": Ours,
    "snapshot": Snapshot,
}
"""Made on all ranks in the same order, before training starts."""


def _shared_copy(value: Any) -> Any:
    return local(value).clone().share_memory_() if isinstance(value, torch.Tensor) else value


def _time_of(upload: Future[Any]) -> Future[float]:
    """The moment at which ``upload`` completes, or its error."""
    moment: Future[float] = Future()

    def note(done: Future[Any]) -> None:
        if error := done.exception():
            moment.set_exception(error)
        else:
            moment.set_result(time.monotonic())

    upload.add_done_callback(note)
    return moment


def _result(moment: Future[float] | None) -> float | None:
    return moment.result() if moment is not None and moment.done() else None


def _flush(file: Path) -> float:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.monotonic()


def _lower_priority(niceness: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
