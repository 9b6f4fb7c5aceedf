"""Every way to load that is compared. Each fills the memory it was made with; runs in the rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.stall.methods import Ours
from benchmarks.stall.state import local, local_tensors
from lightning_resilience.checkpoint.exchange import Exchange, GroupExchange
from lightning_resilience.checkpoint.files import files_at
from lightning_resilience.checkpoint.layout import file_name, flatten
from lightning_resilience.checkpoint.reader import ShardShelf
from lightning_resilience.checkpoint.storage import place_for

_STEP = 8 << 20
_THREADS = 2


class Loads:
    """The state of one rank, saved in every format, and the ways to get it back.

    Args:
        state: What is saved, and filled again.
        directory: Where; all ranks share it.
    """

    def __init__(self, state: Any, directory: Path) -> None:
        self._state = state
        self._exchange: Exchange = GroupExchange(dist.new_group(backend="gloo"))
        self._ours, self._dcp = directory / "ours.ckpt", directory / "dcp"
        self._file = directory / f"{dist.get_rank()}.pt"
        self._shard = self._ours / file_name(dist.get_rank())
        self._save()
        self._buffer = torch.ones(self._shard.stat().st_size, dtype=torch.uint8).numpy().data

    @property
    def methods(self) -> dict[str, Callable[[], None]]:
        """By short name."""
        return {
            "raw": lambda: self._raw(1),
            "raw-threads": lambda: self._raw(_THREADS),
            "ours": self._load_ours,
            "dcp-load": lambda: dcp_load(self._state, checkpoint_id=str(self._dcp)),
            "torch-load": self._torch_load,
        }

    def forget(self) -> None:
        """Drop this rank's files from the page cache; they are on the device already."""
        for folder in (self._ours, self._dcp, self._file.parent):
            for path in folder.iterdir():
                if path.is_file():
                    _drop(path)

    def check(self) -> None:
        """Whether what was loaded is what was saved: the state is overwritten first."""
        before = [tensor.clone() for tensor in local_tensors(self._state)]
        for tensor in local_tensors(self._state):
            tensor.zero_()
        self._load_ours()
        for tensor, original in zip(local_tensors(self._state), before, strict=True):
            if not torch.equal(tensor, original):
                raise SystemExit("what was loaded is not what was saved")

    def _save(self) -> None:
        method = Ours(self._state)
        method.save(self._ours, 1)
        method.close()
        dist.barrier()
        dcp_save(self._state, checkpoint_id=str(self._dcp))
        torch.save([local(tensor) for tensor in local_tensors(self._state)], self._file)
        _flush(self._file)
        dist.barrier()

    def _load_ours(self) -> None:
        shelf = ShardShelf(files_at(place_for(self._ours), trust=False))
        for leaf in flatten(self._state):
            if isinstance(leaf.value, torch.Tensor):
                shelf.want(leaf.name, leaf.value)
            else:
                shelf.want_value(leaf.name)
        shelf.fetch(self._exchange)

    def _torch_load(self) -> None:
        loaded = torch.load(self._file, weights_only=True)
        for target, source in zip(local_tensors(self._state), loaded, strict=True):
            target.copy_(source)

    def _raw(self, threads: int) -> None:
        """This rank's shard file, from end to end, into memory that was written before."""
        with open(self._shard, "rb", buffering=0) as file, ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda start: self._read(file.fileno(), start), range(0, len(self._buffer), _STEP)))

    def _read(self, fd: int, start: int) -> None:
        stop = min(start + _STEP, len(self._buffer))
        while start < stop:
            start += os.preadv(fd, [self._buffer[start:stop]], start)


def _drop(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
