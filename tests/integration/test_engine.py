"""The engine with a real writer process, one rank: every promise that needs no Trainer."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_resilience.checkpoint.engine import CheckpointEngine, EngineOptions
from lightning_resilience.checkpoint.manifest import read_manifest
from lightning_resilience.checkpoint.reader import ShardReader
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.checkpoint.writer import WriterClient
from lightning_resilience.errors import SaveError, WriterError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what we want of stock dcp.load


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def engine(shm: Path) -> Iterator[CheckpointEngine]:
    engine = CheckpointEngine(EngineOptions(shm_dir=str(shm), deadline_s=60.0, on_busy="wait"))
    yield engine
    engine.close()
    assert os.listdir(shm) == []


def a_state(value: float = 1.0) -> dict[str, Any]:
    weight = torch.full((300, 200), value)
    return {
        "state_dict": {"weight": weight, "bias": torch.full((7,), value, dtype=torch.bfloat16), "flag": True},
        "optimizer_0": {
            "state": {"weight": {"exp_avg": weight.clone() * 2, "step": torch.tensor(value)}},
            "param_groups": [{"lr": value / 10, "betas": (0.9, 0.99), "params": ["weight", "bias"]}],
        },
    }


def loaded(path: Path) -> dict[str, Any]:
    """What stock torch reads."""
    state = a_state(0.0)
    load(state, checkpoint_id=path, no_dist=True)
    return state


def assert_same(first: Any, second: Any) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
        assert first.dtype == second.dtype
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert_same(value, second[key])
    elif isinstance(first, list):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first == second


def kill_writer(engine: CheckpointEngine) -> None:
    with contextlib.suppress(ProcessLookupError):  # dead already, its successor is on the way
        os.kill(engine.writer_pid, signal.SIGKILL)


def test_stock_torch_reads_a_saved_directory(engine: CheckpointEngine, tmp_path: Path) -> None:
    path = tmp_path / "step=1.ckpt"
    engine.save_sharded(str(path), 1, a_state(), {"meta.pt": b"meta"})
    assert engine.wait()
    assert_same(loaded(path), a_state())
    assert (path / "meta.pt").read_bytes() == b"meta"
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp", "manifest.json", "meta.pt"]


def test_what_changes_right_after_the_call_is_not_in_the_checkpoint(engine: CheckpointEngine, tmp_path: Path) -> None:
    state = a_state()
    for step in range(1, 6):
        engine.save_sharded(str(tmp_path / f"{step}.ckpt"), step, state, {})
        for tensor in (state["state_dict"]["weight"], *state["optimizer_0"]["state"]["weight"].values()):
            tensor.add_(1.0)
        state["state_dict"]["bias"].add_(1.0)
        state["optimizer_0"]["param_groups"][0]["lr"] += 0.1
    engine.wait()
    for step in range(1, 6):
        found = loaded(tmp_path / f"{step}.ckpt")
        assert_same(found["state_dict"]["weight"], torch.full((300, 200), float(step)))
        assert_same(found["state_dict"]["bias"], torch.full((7,), float(step), dtype=torch.bfloat16))
        assert_same(found["optimizer_0"]["state"]["weight"]["exp_avg"], torch.full((300, 200), step + 1.0))
        assert found["optimizer_0"]["state"]["weight"]["step"] == step
        assert found["optimizer_0"]["param_groups"][0]["lr"] == pytest.approx(step / 10)


def test_a_state_that_changes_its_shape_is_planned_anew(engine: CheckpointEngine, tmp_path: Path) -> None:
    for step, rows in enumerate((3, 500, 3, 20_000), start=1):
        state = {"state_dict": {"weight": torch.full((rows, 10), float(step))}}
        engine.save_sharded(str(tmp_path / f"{step}.ckpt"), step, state, {})
        found = {"state_dict": {"weight": torch.zeros(rows, 10)}}
        engine.wait()
        load(found, checkpoint_id=tmp_path / f"{step}.ckpt", no_dist=True)
        assert_same(found, state)


def test_odd_tensors_survive(engine: CheckpointEngine, tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": base.t(),
        "strided": base[:, ::2],
        "view": base[1:2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "complex": torch.ones(2, dtype=torch.complex64) * 1j,
        "tied": base,
        "tied_again": base,
        "parameter": torch.nn.Parameter(base.clone()),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "unsigned": torch.tensor([1, 65535], dtype=torch.uint16),
    }
    engine.save_sharded(str(tmp_path / "a.ckpt"), 1, {"state_dict": state}, {})
    engine.wait()
    found = {"state_dict": {name: torch.zeros_like(tensor, requires_grad=False) for name, tensor in state.items()}}
    load(found, checkpoint_id=tmp_path / "a.ckpt", no_dist=True)
    for name, tensor in state.items():
        assert_same(found["state_dict"][name], tensor.detach())


def test_sparse_tensors_are_kept_in_both_formats(engine: CheckpointEngine, tmp_path: Path) -> None:
    sparse = torch.eye(4).to_sparse()
    engine.save_sharded(str(tmp_path / "a.ckpt"), 1, {"state_dict": {"s": sparse, "w": torch.ones(2)}}, {})
    engine.save_file(str(tmp_path / "b.ckpt"), 1, {"state_dict": {"s": sparse}})
    sparse.values().zero_()
    engine.wait()
    found: dict[str, Any] = {"state_dict": {"s": torch.zeros(4, 4).to_sparse(), "w": torch.zeros(2)}}
    load(found, checkpoint_id=tmp_path / "a.ckpt", no_dist=True)
    for state in (found, torch.load(tmp_path / "b.ckpt", weights_only=True)):
        assert_same(state["state_dict"]["s"].to_dense(), torch.eye(4))


def test_one_file_is_what_torch_load_reads(engine: CheckpointEngine, tmp_path: Path) -> None:
    content = {**a_state(), "note": "x", "numbers": [1, 2.5, None]}
    path = tmp_path / "full.ckpt"
    engine.save_file(str(path), 1, content)
    content["state_dict"]["weight"].zero_()
    engine.wait()
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert_same(found["state_dict"], a_state()["state_dict"])
        assert found["numbers"] == [1, 2.5, None]


def test_a_file_bigger_than_its_tensors_tell_gets_a_bigger_arena(engine: CheckpointEngine, tmp_path: Path) -> None:
    engine.save_file(str(tmp_path / "a.ckpt"), 1, {"blob": b"x" * (30 << 20)})
    engine.wait()
    assert len(torch.load(tmp_path / "a.ckpt", weights_only=True)["blob"]) == 30 << 20


def test_the_same_path_twice_holds_the_second_state(engine: CheckpointEngine, tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        engine.save_sharded(str(tmp_path / "last.ckpt"), int(value), a_state(value), {})
    engine.wait()
    assert_same(loaded(tmp_path / "last.ckpt"), a_state(3.0))
    assert [name for name in os.listdir(tmp_path) if name != "shm"] == ["last.ckpt"]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_checkpoint_replaces_a_file_and_a_file_replaces_a_checkpoint(
    engine: CheckpointEngine, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "a.ckpt"
    if kind == "file":
        path.write_text("old")
        engine.save_sharded(str(path), 1, a_state(), {})
    else:
        path.mkdir()
        engine.save_file(str(path), 1, {"a": 1})
    engine.wait()
    assert path.is_dir() == (kind == "file")
    assert not engine.history[-1].error


def test_a_removal_waits_for_the_newer_commit(engine: CheckpointEngine, tmp_path: Path) -> None:
    for step in range(1, 4):
        engine.save_sharded(str(tmp_path / f"{step}.ckpt"), step, a_state(), {})
        if step > 1:
            engine.remove(str(tmp_path / f"{step - 1}.ckpt"))
    engine.wait()
    assert sorted(name for name in os.listdir(tmp_path) if name != "shm") == ["3.ckpt"]


def test_a_failed_save_keeps_the_old_checkpoint_and_is_loud(
    shm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = CheckpointEngine(EngineOptions(shm_dir=str(shm)))
    good, blocker = tmp_path / "good.ckpt", tmp_path / "a-file"
    blocker.write_text("")
    engine.save_sharded(str(good), 1, a_state(), {})
    engine.save_sharded(str(blocker / "bad.ckpt"), 2, a_state(), {})
    engine.remove(str(good))
    engine.wait()
    assert good.is_dir()
    assert "bad.ckpt (step 2) was NOT saved: Not a directory" in caplog.text
    assert "choose another checkpoint directory" in caplog.text
    with pytest.raises(SaveError, match=r"the last checkpoint, .*bad\.ckpt, was not saved"):
        engine.close()
    assert os.listdir(shm) == []


def test_after_a_failure_the_next_commit_carries_out_what_was_put_off(engine: CheckpointEngine, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    engine.save_sharded(str(tmp_path / "1.ckpt"), 1, a_state(), {})
    engine.save_sharded(str(tmp_path / "a-file" / "2.ckpt"), 2, a_state(), {})
    engine.remove(str(tmp_path / "1.ckpt"))
    engine.wait()
    assert (tmp_path / "1.ckpt").exists()
    engine.save_sharded(str(tmp_path / "3.ckpt"), 3, a_state(), {})
    engine.wait()
    assert not (tmp_path / "1.ckpt").exists()
    assert (tmp_path / "3.ckpt").exists()


def test_a_killed_writer_is_replaced_and_nothing_is_lost(
    engine: CheckpointEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 6):
        engine.save_sharded(str(tmp_path / f"{step}.ckpt"), step, a_state(float(step)), {})
        if step in (1, 3, 4):
            kill_writer(engine)
    assert engine.wait(timeout_s=30)
    for step in range(1, 6):
        assert_same(loaded(tmp_path / f"{step}.ckpt"), a_state(float(step)))
    assert [report.error for report in engine.history] == [None] * 5
    assert "writer process" in caplog.text


def test_a_writer_that_dies_again_and_again_is_given_up_with_a_clear_error(
    shm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"], pass_fds=(fd,))

    engine = CheckpointEngine(EngineOptions(shm_dir=str(shm)), writer=lambda emit: WriterClient(start, emit))
    with contextlib.suppress(WriterError):  # it may be given up before or after this is asked for
        engine.save_sharded(str(tmp_path / "1.ckpt"), 1, a_state(), {})
    assert engine.wait(timeout_s=30)
    assert "was NOT saved: the checkpoint writer process died 6 times (exit 3)" in caplog.text
    with pytest.raises(WriterError, match="died 6 times"):
        engine.save_sharded(str(tmp_path / "2.ckpt"), 2, a_state(), {})
    with pytest.raises(SaveError, match="the last checkpoint"):
        engine.close()
    assert os.listdir(shm) == []


def test_what_was_staged_is_committed_though_the_rank_is_killed_at_once(shm: Path, tmp_path: Path) -> None:
    code = f"""
import os, torch
from lightning_resilience.checkpoint.engine import CheckpointEngine, EngineOptions
engine = CheckpointEngine(EngineOptions(shm_dir={str(shm)!r}))
state = {{"state_dict": {{"weight": torch.full((1000, 1000), 5.0)}}}}
engine.save_sharded({str(tmp_path / "1.ckpt")!r}, 1, state, {{"meta.pt": b"x"}})
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while not ((tmp_path / "1.ckpt").exists() and os.listdir(shm) == []) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert os.listdir(shm) == []
    found = {"state_dict": {"weight": torch.empty(1000, 1000)}}
    load(found, checkpoint_id=tmp_path / "1.ckpt", no_dist=True)
    assert found["state_dict"]["weight"].eq(5).all()


def test_back_to_back_saves_on_slow_storage_each_hold_their_step(engine: CheckpointEngine, tmp_path: Path) -> None:
    """More saves than slots while the writer is stopped: training waits instead of overwriting."""
    state = {"state_dict": {"weight": torch.zeros(1000, 1000)}}
    engine.save_sharded(str(tmp_path / "0.ckpt"), 0, state, {})
    engine.wait()
    os.kill(engine.writer_pid, signal.SIGSTOP)
    for step in (1, 2):
        state["state_dict"]["weight"].fill_(step)
        engine.save_sharded(str(tmp_path / f"{step}.ckpt"), step, state, {})
    os.kill(engine.writer_pid, signal.SIGCONT)
    for step in (3, 4):
        state["state_dict"]["weight"].fill_(step)
        engine.save_sharded(str(tmp_path / f"{step}.ckpt"), step, state, {})
    engine.wait()
    for step in range(5):
        found = {"state_dict": {"weight": torch.empty(1000, 1000)}}
        load(found, checkpoint_id=tmp_path / f"{step}.ckpt", no_dist=True)
        assert found["state_dict"]["weight"].eq(step).all()


def test_a_process_with_thousands_of_descriptors_can_save(shm: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, limits[1]))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1200)]
    try:
        engine = CheckpointEngine(EngineOptions(shm_dir=str(shm)))
        engine.save_sharded(str(tmp_path / "1.ckpt"), 1, a_state(), {})
        assert engine.wait(timeout_s=30)
        engine.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert_same(loaded(tmp_path / "1.ckpt"), a_state())


def test_two_thousand_tensors_need_a_handful_of_descriptors(engine: CheckpointEngine, tmp_path: Path) -> None:
    state = {"state_dict": {f"w{index}": torch.full((3,), float(index)) for index in range(2000)}}
    before = len(os.listdir("/proc/self/fd"))
    engine.save_sharded(str(tmp_path / "1.ckpt"), 1, state, {})
    assert len(os.listdir("/proc/self/fd")) - before < 10
    engine.wait()
    found = {"state_dict": {name: torch.zeros(3) for name in state["state_dict"]}}
    load(found, checkpoint_id=tmp_path / "1.ckpt", no_dist=True)
    assert_same(found, state)


@pytest.mark.parametrize("shape", [(30, 20), (31, 20)])
def test_a_parameter_that_was_replaced_between_two_saves_is_the_new_one(
    engine: CheckpointEngine, tmp_path: Path, shape: tuple[int, int]
) -> None:
    """pytorch 183413, torchtitan 3476: a stager that is used again raised KeyError."""
    model, expected = nn.Linear(20, 30), []
    for step in (1, 2, 3):
        if step > 1:
            model.weight = nn.Parameter(torch.full(shape, float(step)))
        engine.save_sharded(str(tmp_path / f"{step}.ckpt"), step, {"state_dict": model.state_dict()}, {})
        expected.append({name: value.clone() for name, value in model.state_dict().items()})
        with torch.no_grad():
            model.weight.zero_()
    engine.wait()
    for step, state in enumerate(expected, start=1):
        found = {"state_dict": {name: torch.full_like(value, -1.0) for name, value in state.items()}}
        load(found, checkpoint_id=tmp_path / f"{step}.ckpt", no_dist=True)
        assert_same(found["state_dict"], state)


def test_memory_descriptors_and_shared_memory_stay_flat(engine: CheckpointEngine, shm: Path, tmp_path: Path) -> None:
    """Of this process and of its writer. One tensor of 400 kB that is kept per save would be 20 MB."""
    state = {"state_dict": {f"layer{index}": torch.ones(1000, 100) for index in range(10)}}
    path = str(tmp_path / "a.ckpt")

    def measure() -> tuple[list[int], list[int], list[int]]:
        engine.save_sharded(path, 1, state, {})
        engine.wait()
        processes = [Path("/proc/self"), Path(f"/proc/{engine.writer_pid}")]
        resident = [int((process / "statm").read_text().split()[1]) * 4096 for process in processes]
        descriptors = [len(os.listdir(process / "fd")) for process in processes]
        return resident, descriptors, [file.stat().st_size for file in sorted(shm.iterdir())]

    for _ in range(5):
        before = measure()
    for _ in range(50):
        after = measure()
    assert all(now - then < 8 << 20 for now, then in zip(after[0], before[0], strict=True))
    assert all(now - then < 25 for now, then in zip(after[1], before[1], strict=True))  # the writer may just close one
    assert after[2] == before[2]


def test_a_report_tells_how_a_save_went(
    engine: CheckpointEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_resilience")
    engine.save_sharded(str(tmp_path / "1.ckpt"), 7, a_state(), {})
    engine.wait()
    (report,) = engine.history
    assert report.step == 7
    assert report.bytes > 300 * 200 * 4 * 2
    assert report.durable_s is not None
    assert 0 < report.stall_s < report.durable_s
    assert report.error is None
    assert "staged in" in caplog.text
    manifest = read_manifest(place_for(tmp_path / "1.ckpt"))
    assert manifest is not None
    assert manifest.step == 7


def test_preparing_leaves_nothing_to_plan_and_changes_no_checkpoint(engine: CheckpointEngine, tmp_path: Path) -> None:
    engine.prepare(a_state())
    known, arenas = len(engine._plans), os.listdir(engine._options.shm_dir)
    assert all(slot.layout is not None for slot in engine._slots)
    engine.save_sharded(str(tmp_path / "1.ckpt"), 1, a_state(5.0), {"meta.pt": b"x"})
    assert (len(engine._plans), os.listdir(engine._options.shm_dir)) == (known, arenas)
    engine.wait()
    assert_same(loaded(tmp_path / "1.ckpt"), a_state(5.0))


def test_a_name_that_was_saved_anew_is_not_deleted_by_a_removal_that_was_put_off(
    engine: CheckpointEngine, tmp_path: Path
) -> None:
    (tmp_path / "a-file").write_text("")
    path = tmp_path / "a.ckpt"
    engine.save_sharded(str(path), 1, a_state(), {})
    engine.save_sharded(str(tmp_path / "a-file" / "b.ckpt"), 2, a_state(), {})
    engine.remove(str(path))
    engine.save_sharded(str(path), 3, a_state(3.0), {})
    engine.wait()
    assert_same(loaded(path), a_state(3.0))


def test_a_numpy_learning_rate_is_plain_data(engine: CheckpointEngine, tmp_path: Path) -> None:
    state = a_state()
    state["optimizer_0"]["param_groups"][0]["lr"] = np.float64(0.25)
    engine.save_sharded(str(tmp_path / "a.ckpt"), 1, state, {})
    engine.wait()
    assert ShardReader(place_for(tmp_path / "a.ckpt")).value("optimizer_0.param_groups.0.lr", trust=False) == 0.25
