"""State by name and back, in one process: what a mismatch says, and that nothing runs behind the user's back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import _MockOptimizer
from torch import nn

from lightning_resilience.checkpoint.envelope import archive
from lightning_resilience.checkpoint.layout import GlobalLayout, flatten, plan_shard
from lightning_resilience.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from lightning_resilience.checkpoint.restore import OPTIMIZERS, Restored, Target, apply_optimizers
from lightning_resilience.checkpoint.restore import restore as read
from lightning_resilience.checkpoint.staging import Slot, leaves_by_kind, stage_shard
from lightning_resilience.checkpoint.state import (
    by_number,
    clean_name,
    expected_bytes,
    group_names,
    model_state,
    optimizer_state,
)
from lightning_resilience.checkpoint.storage import local as storage
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.errors import (
    ConfigurationError,
    LoadError,
    MismatchedCheckpointError,
    WeightsOnlyCheckpointError,
)


class Extra(nn.Linear):
    """A layer with state that is no tensor."""

    note = "fresh"

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": self.note, "numbers": [1, [2]]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["numbers"] == [1, [2]]
        self.note = state["note"]


def a_module(width: int = 4) -> Any:
    module = nn.Sequential(Extra(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    module[2].bias.requires_grad = False
    return module


def two_groups(module: Any) -> torch.optim.Optimizer:
    parameters: list[nn.Parameter] = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() == 1]
    option = {"layer": 3, "tags": [1, [2]]}
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1, "meta": option}, {"params": vectors}]
    return torch.optim.AdamW(groups, lr=0.01)


def trained(steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = a_module()
    module[0].note = "trained"
    optimizer = two_groups(module)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(8, 3)).pow(2).mean().backward()
        optimizer.step()
    return module, optimizer


def write_sharded(path: Path, module: nn.Module, *optimizers: torch.optim.Optimizer, room: int = 1 << 20) -> Path:
    """A directory as the engine makes it, without the engine."""
    path.mkdir()
    state = {"state_dict": model_state(module)}
    state |= {f"optimizer_{index}": optimizer_state(module, item) for index, item in enumerate(optimizers)}
    leaves = flatten(state)
    layout = plan_shard(leaves, 0)
    tensors, others = leaves_by_kind(leaves)
    values = [archive(leaf.value) for leaf in others]
    slot = Slot(0, torch.zeros(room, dtype=torch.uint8))
    image = stage_shard(slot, layout, tensors, values)
    storage.write_durably(path / image.name, slot.bytes[: image.size])
    start, places = layout.size, []
    for leaf, value in zip(others, values, strict=True):
        places.append((leaf.name, leaf.path, start, len(value)))
        start += len(value)
    (path / ".metadata").write_bytes(GlobalLayout([layout]).encode(tuple(places)))
    (path / "meta.pt").write_bytes(archive({"global_step": 2}))
    return path


def write_file(path: Path, module: nn.Module, *optimizers: torch.optim.Optimizer) -> Path:
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"state_dict": module.state_dict(), "optimizer_states": states, "global_step": 2}, path)
    return path


def write_numbered(path: Path, module: nn.Module, *optimizers: torch.optim.Optimizer) -> Path:
    """As stock ModelParallelStrategy numbers parameters: by their place in the module."""
    states = [by_number(optimizer_state(module, optimizer), module) for optimizer in optimizers]
    torch.save({"state_dict": module.state_dict(), "optimizer_states": states, "global_step": 2}, path)
    return path


def restore(path: Path, target: Target) -> Restored:
    """Everything, the optimizers too."""
    place = place_for(path)
    restored = read(place, target, fall_back=False)
    apply_optimizers(target, restored.content.get(OPTIMIZERS, []), place, whole=place.is_file())
    return restored


Write = Callable[..., Path]
each_format = pytest.mark.parametrize("write", [write_sharded, write_file, write_numbered])


def assert_equal_state(first: dict[str, Any], second: dict[str, Any]) -> None:
    one = {leaf.name: leaf.value for leaf in flatten(first)}
    other = {leaf.name: leaf.value for leaf in flatten(second)}
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


@each_format
def test_everything_comes_back(tmp_path: Path, write: Write) -> None:
    module, optimizer = trained()
    path = write(tmp_path / "a.ckpt", module, optimizer)
    other = a_module()
    other_optimizer = two_groups(other)
    content = restore(path, Target(other, [other_optimizer])).content
    del content[OPTIMIZERS]
    assert content == {"global_step": 2}
    assert_equal_state(model_state(other), model_state(module))
    assert_equal_state(optimizer_state(other, other_optimizer), optimizer_state(module, optimizer))
    assert other[0].note == "trained"


@each_format
def test_a_state_from_before_the_first_step_comes_back_empty(tmp_path: Path, write: Write) -> None:
    module, optimizer = trained(steps=0)
    path = write(tmp_path / "a.ckpt", module, optimizer)
    other = a_module()
    other_optimizer = two_groups(other)
    restore(path, Target(other, [other_optimizer]))
    assert not other_optimizer.state
    assert not optimizer.state  # asking for it ran no step either


@each_format
def test_weights_alone(tmp_path: Path, write: Write) -> None:
    module, optimizer = trained()
    other = a_module()
    restore(write(tmp_path / "a.ckpt", module, optimizer), Target(other))
    assert_equal_state(model_state(other), model_state(module))


@each_format
def test_another_model_is_refused_and_the_names_are_told(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "a.ckpt", trained()[0])
    bigger: Any = nn.Sequential(*a_module(), nn.Linear(2, 2))
    before = {name: value.clone() for name, value in bigger.state_dict().items() if isinstance(value, torch.Tensor)}
    with pytest.raises(MismatchedCheckpointError, match=r"another model\. Missing in it: 3\.bias, 3\.weight"):
        restore(path, Target(bigger))
    for name, value in before.items():
        assert torch.equal(bigger.state_dict()[name], value)  # untouched
    restore(path, Target(bigger, strict=False))
    assert torch.equal(bigger[2].weight, trained()[0][2].weight)


@each_format
def test_other_shapes_are_refused(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "a.ckpt", trained()[0])
    with pytest.raises(MismatchedCheckpointError, match=r"0\.weight \(4, 3\) instead of \(5, 3\)"):
        restore(path, Target(a_module(width=5)))


@each_format
def test_another_optimizer_layout_is_refused(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "a.ckpt", *trained())
    module = a_module()
    one_group = torch.optim.AdamW([parameter for parameter in module.parameters() if parameter.requires_grad])
    with pytest.raises(MismatchedCheckpointError, match="optimizer 0, does not fit"):
        restore(path, Target(module, [one_group]))
    with pytest.raises(MismatchedCheckpointError, match=r"optimizer 1, does not fit: .* has no state for it"):
        restore(path, Target(module, [two_groups(module), one_group]))


def test_a_file_that_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "a.ckpt")
    with pytest.raises(MismatchedCheckpointError, match="not a Lightning checkpoint"):
        restore(tmp_path / "a.ckpt", Target(a_module()))


@pytest.mark.parametrize(
    "name", ["_orig_mod.layer.weight", "layer._checkpoint_wrapped_module._orig_mod.weight", "layer.weight"]
)
def test_names_lose_what_wrappers_add(name: str) -> None:
    assert clean_name(name) == "layer.weight"


def test_tied_parameters_have_their_first_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    assert group_names(module, torch.optim.SGD(module.parameters(), lr=1.0)) == [["0.weight", "0.bias", "1.bias"]]


def test_an_optimizer_of_another_module_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="SGD holds a parameter that is not in the module"):
        group_names(nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda parameters: torch.optim.AdamW(parameters), 2),
        (lambda parameters: torch.optim.AdamW(parameters, amsgrad=True), 3),
        (lambda parameters: torch.optim.SGD(parameters, lr=1.0), 0),
        (lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9), 1),
    ],
)
def test_the_expected_size_before_the_first_step_is_that_after_it(make: Any, copies: int) -> None:
    module = nn.Linear(100, 100, bias=False)
    optimizer = make(module.parameters())
    expected = expected_bytes(module, [optimizer])
    assert 0 < expected - 100 * 100 * 4 * (1 + copies) < 12_000
    module(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    assert abs(expected_bytes(module, [optimizer]) - expected) < 5_000


class Sparse(nn.Linear):
    """Buffers that cannot be copied into: the number of their elements changes."""

    def __init__(self, count: int) -> None:
        super().__init__(2, 2)
        diagonal = torch.zeros(4).index_fill(0, torch.arange(count), float(count)).diag()
        self.register_buffer("rows", diagonal.to_sparse())
        self.register_buffer("packed", diagonal.to_sparse_csr())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Sparse invariant checks")
@each_format
def test_sparse_buffers_come_back(write: Write, tmp_path: Path) -> None:
    saved, fresh = Sparse(3), Sparse(1)
    restore(write(tmp_path / "a", saved), Target(fresh))
    assert torch.equal(fresh.weight, saved.weight)
    for name in ("rows", "packed"):
        assert fresh.get_buffer(name).layout == saved.get_buffer(name).layout
        assert torch.equal(fresh.get_buffer(name).to_dense(), saved.get_buffer(name).to_dense())


def test_sparse_buffers_are_no_reason_for_shared_memory_of_their_dense_size() -> None:
    module = nn.Module()
    place, value = torch.zeros(2, 1), torch.ones(1)
    huge = torch.sparse_coo_tensor(place, value, (10**6, 10**6), check_invariants=True)
    module.register_buffer("huge", huge)
    assert expected_bytes(module, []) < 10_000


def test_a_module_without_optimizers_is_resumed(tmp_path: Path) -> None:
    """Lightning then has an optimizer without groups."""
    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    restore(write_sharded(tmp_path / "a", saved, _MockOptimizer()), Target(fresh, [_MockOptimizer()]))
    assert torch.equal(fresh.weight, saved.weight)


@each_format
def test_another_kind_of_optimizer_is_refused_before_its_first_step(tmp_path: Path, write: Write) -> None:
    module = a_module()
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    sgd, adam = torch.optim.SGD(trainable, lr=0.1, momentum=0.9), torch.optim.AdamW(trainable)
    for saved, given in ((adam, sgd), (sgd, adam)):
        for optimizer in (saved, given):
            optimizer.zero_grad()
        module(torch.randn(8, 3)).sum().backward()
        saved.step()
        path = write(tmp_path / f"{type(saved).__name__}.ckpt", module, saved)
        with pytest.raises(MismatchedCheckpointError, match=f"another kind of optimizer than {type(given).__name__}"):
            restore(path, Target(module, [given]))


def test_options_that_another_version_has_more_are_no_other_kind(tmp_path: Path) -> None:
    module, optimizer = trained()
    for group in optimizer.param_groups:
        del group["decoupled_weight_decay"]
    path = write_sharded(tmp_path / "a.ckpt", module, optimizer)
    restore(path, Target(module, [two_groups(module)]))


@each_format
def test_weights_only_cannot_be_resumed_from_and_the_one_before_is_used(
    tmp_path: Path, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    module, optimizer = trained()
    weights = write(tmp_path / "b.ckpt", module)
    target = Target(module, [optimizer])
    with pytest.raises(WeightsOnlyCheckpointError, match="has weights only"):
        read(place_for(weights), target, fall_back=True)
    full = write(tmp_path / "a.ckpt", module, optimizer)
    for entry in (full, *full.iterdir()) if full.is_dir() else (full,):
        os.utime(entry, (1, 1))
    assert read(place_for(weights), target, fall_back=True).place.path == str(full)
    assert "weights only" in caplog.text
    assert read(place_for(weights), Target(module), fall_back=True).place.path == str(weights)


def test_a_checkpoint_that_lacks_what_a_damaged_one_has_touched_is_not_mixed_with_it(tmp_path: Path) -> None:
    small: Any = nn.Sequential(nn.Linear(3, 3))
    big: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    older, newer = write_sharded(tmp_path / "a.ckpt", small), write_sharded(tmp_path / "b.ckpt", big)
    for step, path in enumerate((older, newer)):
        files = {
            file.name: FileRecord(file.stat().st_size, storage.write_durably(file, memoryview(file.read_bytes())))
            for file in path.iterdir()
        }
        (path / MANIFEST).write_bytes(Manifest(step, 1, "try", step + 1, files).encode())
    data = bytearray((newer / "__0_0.distcp").read_bytes())
    data[100] ^= 1
    (newer / "__0_0.distcp").write_bytes(data)
    with pytest.raises(LoadError, match=r"half loaded.*1\.bias"):
        read(place_for(newer), Target(big, strict=False), fall_back=True)
    assert bool(big[1].weight.isnan().all())
    read(place_for(newer), Target(small, strict=False), fall_back=True)
    assert not bool(small[0].weight.isnan().any())
