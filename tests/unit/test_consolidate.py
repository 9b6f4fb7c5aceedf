"""One plain file out of a checkpoint: what torch, Lightning and safetensors read is what was in it, byte for byte."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_resilience.checkpoint.consolidate import appearing, write_checkpoint, write_safetensors
from lightning_resilience.checkpoint.contents import FileContents, leaves_of, nested
from lightning_resilience.checkpoint.manifest import read_seal
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.errors import (
    ConfigurationError,
    MismatchedCheckpointError,
    SaveError,
    UntrustedCheckpointError,
)


class Hyper:
    """An object that only trust unpickles."""


def content(**more: Any) -> dict[str, Any]:
    return {
        "epoch": 1,
        "global_step": 30,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": OrderedDict(
            {
                "model.w": torch.randn(3, 5),
                "model.b": torch.randn(7).bfloat16(),
                "model.half": torch.randn(2, 2).T,
                "seen": torch.tensor(3),
                "empty": torch.empty(0, 4),
            }
        ),
        "loops": {"fit_loop": {"batches": [1, 2]}},
        "callbacks": {"best": {"score": torch.tensor(0.5), "scores": [torch.tensor(1.0), {"a": torch.tensor([2])}]}},
        "optimizer_states": [
            {
                "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.randn(3, 5)}, 1: {"exp_avg": torch.randn(7)}},
                "param_groups": [
                    {"lr": 0.1, "betas": (0.9, 0.99), "params": [0]},
                    {"lr": 0.2, "params": [1, 2], "betas": ()},
                ],
            }
        ],
        "lr_schedulers": [{"last_epoch": 3}],
        **more,
    }


def saved(folder: Path, value: Any) -> Path:
    path = folder / "in.ckpt"
    torch.save(value, path)
    return path


def same(left: Any, right: Any) -> bool:
    leaves, others = dict(leaves_of(left)), dict(leaves_of(right))
    assert leaves.keys() == others.keys()
    return all(
        torch.equal(value, others[way]) and value.dtype == others[way].dtype
        if isinstance(value, torch.Tensor)
        else value == others[way]
        for way, value in leaves.items()
    )


def test_a_checkpoint_comes_out_as_it_went_in_and_sealed(tmp_path: Path) -> None:
    value = content()
    target = tmp_path / "new" / "out.ckpt"
    done: list[int] = []
    write_checkpoint(target, FileContents(saved(tmp_path, value), trust=False), step=30, advance=done.append)
    found = torch.load(target, weights_only=True)
    assert same(found, value)
    assert list(found["state_dict"]) == list(value["state_dict"])
    assert sum(done) > 200
    seal = read_seal(place_for(target))
    assert seal is not None
    assert seal.step == 30
    assert [path.name for path in target.parent.iterdir()] == ["out.ckpt"]


def test_a_copy_beside_its_source_is_never_the_newest(tmp_path: Path) -> None:
    """It lacks random numbers and the position in the data: a run that went on from it would not go on exactly."""
    source, copy, copy_of_copy = saved(tmp_path, content()), tmp_path / "copy.ckpt", tmp_path / "again.ckpt"
    write_checkpoint(copy, FileContents(source, trust=False), step=30, created_ns=1_000)
    write_checkpoint(copy_of_copy, FileContents(copy, trust=False), step=30, created_ns=999)
    seals = [read_seal(place_for(path)) for path in (copy, copy_of_copy)]
    assert [seal.created_ns for seal in seals if seal] == [999, 998]


def test_without_optimizers_and_with_one_part_of_the_names(tmp_path: Path) -> None:
    value = content()
    target = tmp_path / "out.ckpt"
    write_checkpoint(target, FileContents(saved(tmp_path, value), trust=False), "model.", weights_only=True)
    found = torch.load(target, weights_only=True)
    assert set(found) == {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops"}
    assert list(found["state_dict"]) == ["w", "b", "half"]
    assert torch.equal(found["state_dict"]["half"], value["state_dict"]["model.half"])


def test_safetensors_are_what_their_own_library_reads(tmp_path: Path) -> None:
    value = content()
    target = tmp_path / "model.safetensors"
    write_safetensors(target, FileContents(saved(tmp_path, value), trust=False))
    assert same(load_file(target), dict(value["state_dict"]))
    write_safetensors(target, FileContents(saved(tmp_path, value), trust=False), "model.", force=True)
    assert sorted(load_file(target)) == ["b", "half", "w"]


def test_a_prefix_that_nothing_has_is_an_error_that_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(MismatchedCheckpointError, match=r"'net\.'; these are there: empty\., model\., seen\."):
        write_safetensors(tmp_path / "a.safetensors", FileContents(saved(tmp_path, content()), trust=False), "net.")


def test_objects_need_trust(tmp_path: Path) -> None:
    path = saved(tmp_path, content(hyper_parameters={"x": Hyper()}))
    with pytest.raises(UntrustedCheckpointError):
        FileContents(path, trust=False)
    write_checkpoint(tmp_path / "out.ckpt", FileContents(path, trust=True), trust=True)
    found = torch.load(tmp_path / "out.ckpt", weights_only=False)
    assert isinstance(found["hyper_parameters"]["x"], Hyper)


def test_nothing_is_replaced_unasked_and_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    target = tmp_path / "out.bin"
    target.write_bytes(b"old")
    with pytest.raises(ConfigurationError, match="--force"), appearing(target, 10, force=False):
        pass
    with pytest.raises(OSError, match="File too large"), appearing(target, 1 << 62, force=True):
        pass
    with pytest.raises(ValueError, match="read"), appearing(target, 10, force=True) as file:
        file.write(b"new"[: int("read")])
    assert target.read_bytes() == b"old"
    with appearing(target, 100, force=True) as file:
        file.write(b"new")
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(ConfigurationError, match="is a directory"), appearing(tmp_path, 1, force=True):
        pass


def test_only_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Fifty tensors: at no time are two alive."""
    alive = high = 0

    class Counted(FileContents):
        def read(self, way: tuple[str | int, ...]) -> torch.Tensor:
            nonlocal alive, high
            tensor = super().read(way).clone()
            alive += 1
            high = max(high, alive)
            weakref.finalize(tensor, gone)
            return tensor

    def gone() -> None:
        nonlocal alive
        alive -= 1

    path = saved(tmp_path, {"state_dict": {f"w{number}": torch.randn(100) for number in range(50)}})
    write_safetensors(tmp_path / "a.safetensors", Counted(path, trust=False))
    assert (alive, high) == (0, 1)
    write_checkpoint(tmp_path / "a.ckpt", Counted(path, trust=False))
    assert (alive, high) == (0, 1)


def test_nesting_is_undone_and_done_again() -> None:
    value = content()
    assert same(nested(dict(leaves_of(value))), value)
    states = nested(dict(leaves_of({"optimizer_states": value["optimizer_states"]})))["optimizer_states"]
    assert list(states[0]["state"]) == [0, 1]
    assert isinstance(states[0]["param_groups"], list)


def test_tensors_that_are_not_plain_are_left_out_or_refused_never_emptied(tmp_path: Path) -> None:
    odd = {"plain": torch.ones(2), "complex": torch.tensor([1 + 2j]).conj(), "sparse": torch.eye(3).to_sparse()}
    contents = FileContents(saved(tmp_path, {"state_dict": odd}), trust=False)
    assert contents.others == [("state_dict", "sparse")]
    write_safetensors(tmp_path / "a.safetensors", contents)
    found = load_file(tmp_path / "a.safetensors")
    assert torch.equal(found["complex"], torch.tensor([1 - 2j]))
    assert sorted(found) == ["complex", "plain"]
    with pytest.raises(SaveError, match="sparse"):
        write_checkpoint(tmp_path / "a.ckpt", contents)
    assert not (tmp_path / "a.ckpt").exists()
