"""Staging from a GPU: right bytes, pinned memory, no device memory of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_resilience.checkpoint.engine import CheckpointEngine, EngineOptions

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def engine() -> Iterator[CheckpointEngine]:
    engine = CheckpointEngine(EngineOptions())
    yield engine
    engine.close()


def a_state(value: float, megabytes: int = 64) -> dict[str, dict[str, torch.Tensor]]:
    rows = megabytes * 256 // 8
    tensors = {f"weight{index}": torch.full((rows, 1024), value, device="cuda") for index in range(8)}
    return {"state_dict": {**tensors, "step": torch.tensor(value)}}


def test_what_changes_right_after_the_call_is_not_in_the_checkpoint(engine: CheckpointEngine, tmp_path: Path) -> None:
    state = a_state(0.0)
    tensors = state["state_dict"]
    for step in range(4):
        engine.save_sharded(str(tmp_path / f"{step}.ckpt"), step, state, {})
        for tensor in state["state_dict"].values():
            tensor.add_(1.0)
    engine.wait()
    for step in range(4):
        found = {"state_dict": {name: torch.empty_like(value, device="cpu") for name, value in tensors.items()}}
        load(found, checkpoint_id=tmp_path / f"{step}.ckpt", no_dist=True)
        assert all(tensor.eq(step).all() for tensor in found["state_dict"].values())


def test_staging_takes_no_device_memory(engine: CheckpointEngine, tmp_path: Path) -> None:
    state = a_state(1.0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    engine.save_sharded(str(tmp_path / "a.ckpt"), 1, state, {})
    assert torch.cuda.max_memory_allocated() == before
    engine.wait()


def test_the_copy_is_as_fast_as_one_into_pinned_memory(engine: CheckpointEngine, tmp_path: Path) -> None:
    state = a_state(1.0, megabytes=512)
    pinned = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in state["state_dict"].values()]
    plain, ours = [], []
    for step in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for target, source in zip(pinned, state["state_dict"].values(), strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        plain.append(time.perf_counter() - began)
        engine.save_sharded(str(tmp_path / "a.ckpt"), step, state, {})
        engine.wait()
        ours.append(engine.history[-1].stall_s)
    assert statistics.median(ours[1:]) < 1.5 * statistics.median(plain[1:])
