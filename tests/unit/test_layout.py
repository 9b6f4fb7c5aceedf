"""The layout: names as torch has them, every byte in exactly one file, metadata that torch understands."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_resilience.checkpoint.envelope import archive, envelope
from lightning_resilience.checkpoint.layout import (
    Chunk,
    GlobalLayout,
    Leaf,
    ShardLayout,
    flatten,
    plan_shard,
    signature,
)
from lightning_resilience.errors import SaveError


@pytest.fixture
def one_rank_mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def a_state() -> dict[str, Any]:
    return {
        "state_dict": {"layer.weight": torch.ones(4, 3), "layer.bias": torch.ones(4)},
        "optimizer_0": {
            "state": {"layer.weight": {"exp_avg": torch.ones(4, 3), "step": torch.tensor(2.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["layer.weight", "layer.bias"]}],
        },
        "lists": [[1, 2], [torch.ones(1)]],
    }


def test_names_and_paths_are_those_of_torch() -> None:
    ours = {leaf.name: leaf.path for leaf in flatten(a_state())}
    _, theirs = flatten_state_dict(a_state())
    assert ours == theirs


def test_an_entry_of_a_module_and_an_option_of_a_group_are_kept_in_one_piece() -> None:
    extra, option = {"a": 1, "b": [torch.ones(1)]}, {"layer": 3, "tags": [1, [2]]}
    leaves = flatten(
        {"state_dict": {"layer._extra_state": extra}, "optimizer_0": {"state": {}, "param_groups": [{"meta": option}]}}
    )
    assert {leaf.name: leaf.value for leaf in leaves} == {
        "state_dict.layer._extra_state": extra,
        "optimizer_0.state": {},
        "optimizer_0.param_groups.0.meta": option,
    }


def test_what_is_not_sharded_lies_side_by_side(one_rank_mesh: DeviceMesh) -> None:
    shard = distribute_tensor(torch.ones(4, 3), one_rank_mesh, [Shard(0)])
    state = {name: {"exp_avg": shard.clone(), "step": torch.tensor(1.0)} for name in "abc"}
    names = [chunk.name for chunk in plan_shard(flatten({"state": state}), rank=0).chunks]
    assert names == [f"state.{name}.{key}" for key in ("step", "exp_avg") for name in "abc"]


def test_equal_shapes_and_names_are_in_the_metadata_once() -> None:
    def encoded(count: int) -> int:
        chunks = [
            ShardLayout(
                rank,
                tuple(
                    Chunk(f"a_long_name.{i}", ("a",), "torch.float32", (400, 30), (4 * rank, 0), (4, 30), 0, 9)
                    for i in range(count)
                ),
                9,
                1,
            )
            for rank in range(100)
        ]
        return len(GlobalLayout(chunks).encode(()))

    assert (encoded(101) - encoded(1)) / 100 / 100 < 130  # bytes for each piece; 157 without


def test_an_empty_dictionary_is_a_value_of_its_own() -> None:
    assert flatten({"state_dict": {"extra": {}}}) == [Leaf("state_dict.extra", ("state_dict", "extra"), {})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (64, 64)])
def test_an_envelope_with_data_is_what_torch_loads(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    cover = envelope(dtype, shape)
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert len(data) == cover.nbytes
    loaded = torch.load(io.BytesIO(cover.prefix + data + cover.suffix), weights_only=True)
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8)) if shape else loaded == tensor
    assert len(cover.prefix) % 64 == 0


def test_the_signature_changes_with_whatever_changes_the_layout() -> None:
    base = [Leaf("a", ("a",), torch.ones(2, 3))]
    others = [
        [Leaf("b", ("b",), torch.ones(2, 3))],
        [Leaf("a", ("a",), torch.ones(3, 2))],
        [Leaf("a", ("a",), torch.ones(2, 3, dtype=torch.float64))],
        [Leaf("a", ("a",), 1.0)],
        [*base, Leaf("b", ("b",), torch.ones(1))],
    ]
    assert signature(base) == signature([Leaf("a", ("a",), torch.zeros(2, 3))])
    assert signature(base) not in map(signature, others)


def test_chunks_do_not_overlap_and_start_aligned() -> None:
    layout = plan_shard(flatten(a_state()), rank=0)
    end = 0
    for chunk in layout.chunks:
        assert chunk.start >= end
        assert chunk.start % 64 == 0
        end = chunk.start + chunk.length
    assert layout.size >= end
    assert {chunk.name for chunk in layout.chunks} == {
        "state_dict.layer.weight",
        "state_dict.layer.bias",
        "optimizer_0.state.layer.weight.exp_avg",
        "optimizer_0.state.layer.weight.step",
        "lists.1.0",
    }


def test_plain_tensors_are_written_by_rank_0_only() -> None:
    assert plan_shard(flatten(a_state()), rank=1).chunks == ()


def test_a_layout_survives_being_told_to_rank_0() -> None:
    layout = plan_shard(flatten(a_state()), rank=0)
    assert ShardLayout.decode(layout.encode()) == layout


def test_the_metadata_holds_every_value_and_tensor() -> None:
    whole = GlobalLayout([plan_shard(flatten(a_state()), rank=0)])
    metadata = pickle.loads(whole.encode((("optimizer_0.param_groups.0.lr", ("optimizer_0",), 64, 9),)))
    assert set(metadata.state_dict_metadata) == {
        *(chunk.name for chunk in plan_shard(flatten(a_state()), rank=0).chunks),
        "optimizer_0.param_groups.0.lr",
    }
    assert metadata.state_dict_metadata["state_dict.layer.weight"].size == torch.Size([4, 3])
    assert len(metadata.storage_data) == len(metadata.state_dict_metadata)


def half(rank: int, rows: int, plain: int = 0) -> ShardLayout:
    chunk = Chunk("w", ("w",), "torch.float32", (4, 2), (rank * 2, 0), (rows, 2), 0, 100)
    return ShardLayout(rank, (chunk,), 128, plain)


def test_ranks_that_do_not_cover_a_tensor_cannot_save_it() -> None:
    GlobalLayout([half(0, 2), half(1, 2)])
    with pytest.raises(SaveError, match=r"6 of the 8 elements of 'w'"):
        GlobalLayout([half(0, 2), half(1, 1)])


def test_ranks_that_hold_different_plain_tensors_cannot_save() -> None:
    with pytest.raises(SaveError, match=r"ranks \[1\] hold other unsharded tensors"):
        GlobalLayout([half(0, 2, plain=1), half(1, 2, plain=2)])


def test_archives_are_read_without_unpickling_code() -> None:
    assert torch.load(io.BytesIO(archive({"a": [1, (2.0, "x")]})), weights_only=True) == {"a": [1, (2.0, "x")]}
