"""The private names that the checkpoint engine relies on are where they were, and do what they did."""

from __future__ import annotations

import inspect
import io
import pickle
from datetime import timedelta
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.tensor import DTensor

from lightning_resilience import _lightning, _torch


def test_a_dtensor_still_tells_its_chunks() -> None:
    assert list(inspect.signature(DTensor.__create_chunk_list__).parameters) == ["self"]
    assert _torch.local_chunk(torch.ones(3, 2)) == ((0, 0), (3, 2))


def test_storage_info_is_what_the_reader_takes_apart() -> None:
    info = _torch.storage_info("__0_0.distcp", 64, 100)
    assert (info.relative_path, info.offset, info.length) == ("__0_0.distcp", 64, 100)
    assert info.transform_descriptors is None


def test_foreach_copy_copies_each() -> None:
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)]
    _torch.foreach_copy(targets, [torch.ones(2), torch.full((3,), 2.0, dtype=torch.bfloat16)], non_blocking=False)
    assert targets[0].eq(1).all()
    assert targets[1].eq(2).all()
    _torch.foreach_copy([], [], non_blocking=False)


def test_metadata_refers_to_nothing_else_than_the_listed_classes() -> None:
    refused: list[tuple[str, str]] = []

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            if (module, name) not in _torch.METADATA_CLASSES and module != "torch":
                refused.append((module, name))
            return super().find_class(module, name)

    properties = TensorProperties(torch.bfloat16, memory_format=torch.channels_last)
    Recorder(io.BytesIO(pickle.dumps(Metadata({"a": properties})))).load()  # type: ignore[dict-item]  # only its pickle
    assert refused == []


def test_pinning_asks_the_cuda_runtime() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    runtime = mock.Mock()
    runtime.cudaHostRegister.return_value = 0
    with mock.patch("torch.cuda.cudart", return_value=runtime):
        assert _torch.pin(memory)
        _torch.unpin(memory)
    runtime.cudaHostRegister.assert_called_once_with(memory.data_ptr(), 4096, 0)
    runtime.cudaHostUnregister.assert_called_once_with(memory.data_ptr())


def test_tensors_are_found_in_nested_containers() -> None:
    assert len(_torch.tensors_in({"a": [torch.ones(1), 2], "b": (torch.ones(2), {"c": torch.ones(3)})})) == 3


def test_the_interval_of_a_model_checkpoint() -> None:
    callback = ModelCheckpoint(every_n_train_steps=7)
    assert _lightning.save_interval(callback) == 7
    _lightning.set_save_interval(callback, 20)
    assert _lightning.save_interval(callback) == 20
    assert _lightning.last_saved_step(callback) == 0
    assert "self._every_n_train_steps" in inspect.getsource(ModelCheckpoint.on_train_batch_end)
    assert "self._last_global_step_saved = trainer.global_step" in inspect.getsource(ModelCheckpoint._save_checkpoint)


def test_lightning_still_makes_a_checkpoint_without_saving_it() -> None:
    parameters = inspect.signature(_CheckpointConnector.dump_checkpoint).parameters
    assert list(parameters) == ["self", "weights_only"]
    assert "_ckpt_path" in vars(_CheckpointConnector(mock.Mock()))


def test_model_checkpoint_still_works_by_the_steps_that_a_keeper_does() -> None:
    parameters = {
        "_save_topk_checkpoint": ["self", "trainer", "monitor_candidates"],
        "_save_last_checkpoint": ["self", "trainer", "monitor_candidates"],
        "_save_checkpoint": ["self", "trainer", "filepath"],
        "_remove_checkpoint": ["self", "trainer", "filepath"],
        "_link_checkpoint": ["trainer", "filepath", "linkpath"],
        "_should_save_on_exception": ["self", "trainer"],
        "on_exception": ["self", "trainer", "pl_module", "exception"],
    }
    for name, expected in parameters.items():
        method = inspect.unwrap(getattr(ModelCheckpoint, name))
        assert list(inspect.signature(method).parameters) == expected, name
    callback = ModelCheckpoint()
    assert _lightning.saved(callback) == (0, "")
    _lightning.set_saved(callback, 3, "a.ckpt")
    assert _lightning.saved(callback) == (3, "a.ckpt")
    assert list(inspect.signature(inspect.unwrap(OnExceptionCheckpoint.on_exception)).parameters)[:2] == [
        "self",
        "trainer",
    ]


def test_the_default_store_can_be_reached_through_a_connection_of_its_own() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        store = _torch.own_store("ours", 1.0)
        store.set("key", "value")
        assert store.get("key") == b"value"
        with pytest.raises(RuntimeError):
            store.wait(["missing"], timedelta(milliseconds=1))
    finally:
        dist.destroy_process_group()


def test_lightning_still_resolves_the_directory_and_the_word_last_where_they_are_looked_after() -> None:
    parse = _CheckpointConnector._parse_ckpt_path
    assert getattr(parse, "finds_remotely", False) or list(inspect.signature(parse).parameters)[:3] == [
        "self",
        "state_fn",
        "ckpt_path",
    ]
    callback = ModelCheckpoint("s3://bucket/run")
    assert _lightning.checkpoint_directory(callback, Trainer(accelerator="cpu", logger=False)) == "s3://bucket/run"
    assert _lightning.LAST == "last"


def test_a_callback_makes_its_file_system_in_setup_and_gets_our_options_there_alone() -> None:
    asked: list[str] = []

    def options_of(trainer: Trainer, directory: str) -> dict[str, str]:
        asked.append(directory)
        return {"key": "someone"}

    with mock.patch.object(ModelCheckpoint, "setup", _unpatched(ModelCheckpoint.setup)):
        _lightning.lend_storage_options(options_of)
        trainer = Trainer(accelerator="cpu", logger=False)
        callback = ModelCheckpoint("memory://run")
        callback.setup(trainer, LightningModule(), "fit")
        _lightning.lend_storage_options(options_of)  # changes nothing
    assert asked == ["memory://run"]
    assert callback._fs.storage_options == {"key": "someone"}
    assert "memory" not in fsspec.config.conf


def _unpatched(setup: Any) -> Any:
    """Lightning's own, which another test may have wrapped."""
    while getattr(setup, "borrows", False):
        setup = inspect.getclosurevars(setup).nonlocals["original"]
    return setup
