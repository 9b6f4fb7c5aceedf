"""Each trap of torch 2.13 that the engine is built around: first that ours avoids it, then that torch falls in.

What torch does by itself is run here, so that a version that mends a trap shows: its half is skipped then. Traps that
need ranks are run by `torch_traps.py`, all in one job.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor, nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from lightning_resilience.checkpoint.engine import CheckpointEngine, EngineOptions
from lightning_resilience.checkpoint.reader import ShardReader
from lightning_resilience.checkpoint.state import optimizer_state
from lightning_resilience.checkpoint.storage import place_for
from tests.integration.ranks import Stem
from tests.unit.test_lightning_traps import lightning_falls_in

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",  # what is wanted of stock save and load here
    "ignore:Detected an existing checkpoint",
)


SIZE = 10_000


def torch_falls_in(trap: bool, what: str) -> None:
    """The end of a test: torch by itself goes wrong; a version other than 2.13 may have mended it."""
    if not trap and not torch.__version__.startswith("2.13."):
        pytest.skip(f"torch {torch.__version__} has mended it: {what}")
    assert trap, what


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CheckpointEngine]:
    (tmp_path / "shm").mkdir()
    engine = CheckpointEngine(EngineOptions(shm_dir=str(tmp_path / "shm"), deadline_s=60.0, on_busy="wait"))
    yield engine
    engine.close()


def ours(path: Path, **shapes: int) -> dict[str, Tensor]:
    """What an engine's checkpoint holds."""
    tensors = {f"state_dict.{name}": torch.full((size,), torch.nan) for name, size in shapes.items()}
    ShardReader(place_for(path)).read_into(tensors)
    return {name.removeprefix("state_dict."): tensor for name, tensor in tensors.items()}


def torchs(path: Path, **shapes: int) -> dict[str, Tensor]:
    """What torch loads, without another rank."""
    state: dict[str, Any] = {name: torch.full((size,), torch.nan) for name, size in shapes.items()}
    load(state, checkpoint_id=path, no_dist=True)
    return state


def test_a_stager_with_two_saves_in_flight_mixes_steps(engine: CheckpointEngine, tmp_path: Path) -> None:
    class Slow(FileSystemWriter):
        go = threading.Event()

        def write_data(self, *arguments: Any) -> Any:
            self.go.wait(30)
            return super().write_data(*arguments)

    state = {"w": torch.ones(3)}
    os.kill(engine.writer_pid, signal.SIGSTOP)  # both saves are in flight
    for step in (1, 2):
        state["w"].fill_(step)
        engine.save_sharded(str(tmp_path / f"ours-{step}"), step, {"state_dict": state}, {})
    os.kill(engine.writer_pid, signal.SIGCONT)
    assert engine.wait()
    assert ours(tmp_path / "ours-1", w=3)["w"].eq(1).all()

    stager, saves = DefaultStager(StagingOptions(False, False, False, False)), []
    for step in (1, 2):
        state["w"].fill_(step)
        writer = Slow(tmp_path / f"torch-{step}")
        saves.append(async_save(state, storage_writer=writer, async_stager=stager, no_dist=True))
    Slow.go.set()
    for under_way in saves:
        under_way.result()  # type: ignore[union-attr]  # synchronous staging: one future
    torch_falls_in(bool(torchs(tmp_path / "torch-1", w=3)["w"].eq(2).all()), "step 1 holds the data of step 2")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # torch's thread that fails
def test_an_error_in_a_thread_of_the_file_system_writer_is_lost(engine: CheckpointEngine, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    engine.save_sharded(str(tmp_path / "a-file" / "ours"), 1, {"state_dict": {"a": torch.ones(3)}}, {})
    engine.wait()
    assert engine.history[-1].outcome == "failed"
    engine.save_sharded(str(tmp_path / "ours"), 1, {"state_dict": {"a": torch.ones(3)}}, {})  # the last one is good

    failed = threading.Event()

    class FullForOthers(FileSystem):
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:
            if threading.current_thread() is not threading.main_thread():
                failed.set()
                raise OSError(28, "No space left on device")
            failed.wait(30)
            return super().create_stream(path, mode)

    writer = FileSystemWriter(tmp_path / "torch", thread_count=2)
    writer.fs = FullForOthers()
    failed.clear()
    writer.fs.mkdir(tmp_path / "torch")
    save({"a": torch.ones(3), "b": torch.ones(4)}, storage_writer=writer, no_dist=True)
    succeeded = (tmp_path / "torch" / ".metadata").exists()
    with pytest.raises(BaseException, match="KeyError"):
        torchs(tmp_path / "torch", a=3, b=4)
    torch_falls_in(failed.is_set() and succeeded, "a save succeeds though a thread could not write")


class Bucket(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Remembers with which options it was reached."""

    protocol = "trap"
    keys: list[str | None] = []  # noqa: RUF012  # shared on purpose

    def __init__(self, *arguments: Any, key: str | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.keys.append(key)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("trap://", "memory://")))


def test_fsspec_writer_syncs_the_machine_and_loses_storage_options(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    monkeypatch.setattr(os, "sync", lambda: synced.append(True))
    monkeypatch.setattr(Bucket, "keys", [])
    fsspec.register_implementation("trap", Bucket, clobber=True)
    place = place_for("trap://run/ours", {"key": "of ours"}) / "a"
    place.put(b"1")
    assert (place.read(), Bucket.keys, synced) == (b"1", ["of ours"], [])

    writer = FsspecWriter("trap://run/torch-1", key="of torch")
    save({"a": torch.ones(3)}, checkpoint_id="trap://run/torch-2", storage_writer=writer, no_dist=True)
    torch_falls_in(bool(synced), "os.sync() for every file without a descriptor")
    torch_falls_in(None in Bucket.keys, "a file system without the options")


def test_a_crash_while_saving_over_a_checkpoint_leaves_old_metadata_on_new_data(
    engine: CheckpointEngine, tmp_path: Path
) -> None:
    class Dies(FileSystem):
        """Before its second file."""

        files = 0

        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:
            self.files += "w" in mode
            if self.files > 1:
                raise KeyboardInterrupt
            return super().create_stream(path, mode)

    def state(value: float) -> dict[str, Any]:
        return {"a": torch.full((SIZE,), value), "b": torch.full((SIZE,), value)}

    for step, limit in ((1, resource.RLIM_INFINITY), (2, 4096), (3, resource.RLIM_INFINITY)):
        resource.prlimit(engine.writer_pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))  # breaks off there
        engine.save_sharded(str(tmp_path / "ours"), step, {"state_dict": state(float(step))}, {})
        engine.wait()
        assert engine.history[-1].outcome == ("failed" if step == 2 else "saved")
        held = 1 if step == 2 else step
        assert all(tensor.eq(held).all() for tensor in ours(tmp_path / "ours", a=SIZE, b=SIZE).values())

    save(state(1.0), storage_writer=FileSystemWriter(tmp_path / "torch", single_file_per_rank=False), no_dist=True)
    writer = FileSystemWriter(tmp_path / "torch", single_file_per_rank=False)
    writer.fs = Dies()
    with pytest.raises(BaseException, match="KeyboardInterrupt"):
        save(state(2.0), storage_writer=writer, no_dist=True)
    found = torchs(tmp_path / "torch", a=SIZE, b=SIZE)
    torch_falls_in({float(found["a"][0]), float(found["b"][0])} == {1.0, 2.0}, "two steps are mixed without a word")


@pytest.fixture
def no_cached_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have left in the class, and what this one leaves."""
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached")]:
        monkeypatch.setattr(SavePlanner, name, {})


@pytest.mark.usefixtures("no_cached_plans")
def test_a_cached_plan_is_wrong_after_a_dtype_has_changed(engine: CheckpointEngine, tmp_path: Path) -> None:
    def dtype(path: Path, name: str) -> torch.dtype:
        tensor = FileSystemReader(path).read_metadata().state_dict_metadata[name]
        assert isinstance(tensor, TensorStorageMetadata)
        return tensor.properties.dtype

    for turn, kind in enumerate((torch.float32, torch.float64)):
        engine.save_sharded(str(tmp_path / f"ours-{turn}"), 1, {"state_dict": {"w": torch.ones(3, dtype=kind)}}, {})
        engine.wait()
        assert dtype(tmp_path / f"ours-{turn}", "state_dict.w") == kind
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save({"w": torch.ones(3, dtype=kind)}, checkpoint_id=tmp_path / f"{turn}", planner=planner, no_dist=True)
    torch_falls_in(dtype(tmp_path / "1", "w") == torch.float32, "float64 in the file, float32 in its metadata")


def test_shared_tensors_take_a_descriptor_each(engine: CheckpointEngine, tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    state = {str(index): torch.ones(3) for index in range(200)}
    before = descriptors()
    engine.save_sharded(str(tmp_path / "ours"), 1, {"state_dict": state}, {})
    assert descriptors() - before < 10
    engine.wait()

    before = descriptors()
    stager = DefaultStager(StagingOptions(False, True, False, False))
    staged = stager.stage(state)
    taken = descriptors() - before
    stager.close()
    assert staged
    torch_falls_in(taken >= len(state), "a descriptor for each tensor")


def test_get_state_dict_before_the_first_step_is_a_step() -> None:
    def trained(look: str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if look == "ours":
            assert optimizer_state(model, optimizer)["param_groups"]
        elif look == "torch":
            get_state_dict(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
        return model.weight.detach()

    assert torch.equal(trained("ours"), trained("nobody"))
    torch_falls_in(not torch.equal(trained("torch"), trained("nobody")), "another training because of a look")


# --- groups of ranks -------------------------------------------------------------------------------------------


class Ranks:
    """What `torch_traps.py` found."""

    def __init__(self, folder: Path, stem: Stem) -> None:
        self.folder = folder
        stem.load("tests.integration.torch_traps")
        with stem.start("tests.integration.torch_traps:main", str(folder), ranks=2, folder=folder) as job:
            for rank in (0, 1):
                job.wait_for(folder / f"{rank}.json", timeout=90)
            self.found = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
            job.wait_for(folder / "began", timeout=20)
            time.sleep(2.0)
            self.alive = len(job.alive_ranks())
        self.ended = (folder / "ended").exists()


@pytest.fixture(scope="module")
def ranks(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("traps"), stem)


def test_a_child_is_stale_after_the_group_is_made_anew(ranks: Ranks) -> None:
    for name in ("0/engine", "engine", "1/engine-again"):
        assert ours(ranks.folder / name, w=8)["w"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [found["engine"] for found in ranks.found] == [[None] * 3] * 2

    assert [found["stale"]["errors"] for found in ranks.found] == [[""], [""]]
    there = FileSystemReader(ranks.folder / "stale").read_metadata().state_dict_metadata
    torch_falls_in(list(there) == ["of rank 1"], "both ranks saved, and what rank 0 saved is gone")


def test_overlapping_saves_cross_their_responses(ranks: Ranks, engine: CheckpointEngine, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    for path in ("a-file/bad", "good"):
        engine.save_sharded(str(tmp_path / path), 1, {"state_dict": {"a": torch.ones(3)}}, {})
    engine.wait()
    assert [report.outcome for report in engine.history] == ["failed", "saved"]

    crossed = ranks.found[0]["crossed"]
    assert crossed["good is there"]
    torch_falls_in("Not a directory" in crossed["good"] and not crossed["bad"], "each save gets the other's answer")


def test_a_dead_child_is_never_respawned(ranks: Ranks, engine: CheckpointEngine, tmp_path: Path) -> None:
    os.kill(engine.writer_pid, signal.SIGKILL)
    engine.save_sharded(str(tmp_path / "ours"), 1, {"state_dict": {"a": torch.ones(3)}}, {})
    assert engine.wait()
    assert engine.history[-1].outcome == "saved"

    torch_falls_in(all(ranks.found[0]["dead"].values()), "no save succeeds any more")


def test_without_collectives_fewer_ranks_load_wrong_tensors(ranks: Ranks) -> None:
    assert ours(ranks.folder / "engine", w=8)["w"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]

    found = torchs(ranks.folder / "no-collectives", w=8)["w"]
    torch_falls_in(found[:4].tolist() == [1, 2, 3, 4] and bool(found[4:].isnan().all()), "half a tensor, not a word")


def test_a_cached_plan_is_wrong_after_a_shrink(ranks: Ranks) -> None:
    """Ours has no cache beyond an engine, which lives as long as its group: `engine` and `engine-again` are whole."""
    there = FileSystemReader(ranks.folder / "cached-1").read_metadata().state_dict_metadata
    torch_falls_in("of rank 1" in there, "tensors of a rank that has left are in the metadata, and in no file")


# --- how Lightning meets it ------------------------------------------------------------------------------------


def test_stock_sharded_strategies_do_not_call_the_plugin(ranks: Ranks) -> None:
    """Ours do: `test_plugin_in_trainer.py`. `FSDPStrategy` has the same code."""
    for found in ranks.found:
        assert found["stock"]["saved"]
        lightning_falls_in("is not supported" in found["stock"]["storage_options"], "storage_options are refused")
        lightning_falls_in(found["stock"]["calls"] == [], "neither save_checkpoint nor teardown is called")


def test_saving_on_an_exception_of_one_rank_never_ends(ranks: Ranks) -> None:
    """With ours it ends: `test_exceptional.py`. Two seconds are a hundred times what the save takes otherwise."""
    lightning_falls_in(ranks.alive == 2 and not ranks.ended, "one rank saves, and waits for the other")
