"""Every private name of torch and Lightning that sharding relies on. A failure here names what has moved."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Iterator

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_resilience import _lightning, _torch


@pytest.fixture
def module() -> Iterator[FSDPModule]:
    """A linear layer, sharded over a world of one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


def run(module: FSDPModule) -> torch.Tensor:
    assert isinstance(module, nn.Linear)
    out: torch.Tensor = module(torch.ones(1, 2))
    return out


# --- torch -------------------------------------------------------------------------------------------------


def test_parameter_groups(module: FSDPModule) -> None:
    (group,) = _torch.parameter_groups(module)
    assert len(group.fsdp_params) == 2
    assert group.reduce_grads is True


def test_a_module_without_parameters_has_no_group(module: FSDPModule) -> None:
    empty = fully_shard(nn.ReLU(), mesh=init_device_mesh("cpu", (1,)))
    assert _torch.parameter_groups(empty) == []


def test_sharded_parameters(module: FSDPModule) -> None:
    assert isinstance(module, nn.Linear)
    expected = set(module.parameters())
    run(module)
    assert set(module.parameters()) != expected  # the root stays gathered after forward
    assert _torch.sharded_parameters(module) == expected


def test_gathered_pairs(module: FSDPModule) -> None:
    assert isinstance(module, nn.Linear)
    assert _torch.gathered_pairs(module) == []
    sharded = list(module.parameters())
    run(module)
    assert [pair[0] for pair in _torch.gathered_pairs(module)] == sharded
    assert [pair[1] for pair in _torch.gathered_pairs(module)] == list(module.parameters())


def test_gathering_takes_requires_grad_of_the_sharded_parameter(module: FSDPModule) -> None:
    """`FSDPParam.to_unsharded` does it; freezing and unfreezing between steps rely on it."""
    assert isinstance(module, nn.Linear)
    sharded = module.bias
    run(module)
    _torch.put_back_shards(module)
    sharded.requires_grad_(False)
    run(module)
    assert not module.bias.requires_grad


def test_put_back_shards(module: FSDPModule) -> None:
    assert isinstance(module, nn.Linear)
    sharded = module.weight
    assert not _torch.is_gathered(module)
    run(module)
    assert _torch.is_gathered(module)
    _torch.put_back_shards(module)
    assert not _torch.is_gathered(module)
    assert module.weight is sharded


def test_unreduced_gradients(module: FSDPModule) -> None:
    run(module)
    (_, gathered), *_ = _torch.gathered_pairs(module)
    assert not _torch.has_unreduced_gradients(module)
    gathered.grad = torch.ones_like(gathered)
    assert _torch.has_unreduced_gradients(module)
    module.set_requires_gradient_sync(False)
    assert not _torch.has_unreduced_gradients(module)


def test_forward_hooks_suspended(module: FSDPModule) -> None:
    assert isinstance(module, nn.Linear)
    mine = module.register_forward_pre_hook(lambda *_: None)
    before = list(module._forward_pre_hooks), list(module._forward_hooks)
    with _torch.forward_hooks_suspended(module):
        assert list(module._forward_pre_hooks) == [mine.id]
        assert list(module._forward_hooks) == []
    assert (list(module._forward_pre_hooks), list(module._forward_hooks)) == before
    run(module)
    assert _torch.is_gathered(module)


def test_pre_backward_hook(module: FSDPModule) -> None:
    assert isinstance(module, nn.Linear)
    weight = module.weight
    with _torch.forward_hooks_suspended(module):
        module.unshard()
        module(torch.ones(1, 2)).sum().backward()
    assert weight.grad is None  # FSDP2 did not hear of this backward
    run(module)  # marks the root
    with _torch.forward_hooks_suspended(module):
        loss = module(torch.ones(1, 2)).sum()
        loss.register_hook(_torch.pre_backward_hook(module))
        loss.backward()
    assert weight.grad is not None


def test_split_mesh(module: FSDPModule) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    split = _torch.split_mesh(mesh, 0, (1, 1), ("replicate", "shard"))
    assert split.mesh_dim_names == ("replicate", "shard", "tensor_parallel")
    assert mesh["data_parallel"].size() == 1


def test_map_tensors() -> None:
    doubled = _torch.map_tensors(lambda tensor: 2 * tensor, {"a": [torch.ones(1)], "b": "text"})
    assert doubled == {"a": [torch.full((1,), 2.0)], "b": "text"}


# --- Lightning ---------------------------------------------------------------------------------------------


def test_the_mesh_of_a_module() -> None:
    module = L.LightningModule()
    mesh = object()
    _lightning.publish_mesh(module, mesh)  # type: ignore[arg-type]  # any object shows where it goes
    assert module.device_mesh is mesh


def test_the_device_of_a_module() -> None:
    module = L.LightningModule()
    _lightning.publish_device(module, torch.device("meta"))
    assert module.device == torch.device("meta")


def test_materialize() -> None:
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    _lightning.materialize(layer, torch.device("cpu"))
    assert not layer.weight.is_meta


def test_move_optimizers() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.state[parameter]["momentum_buffer"] = torch.zeros(1)
    _lightning.move_optimizers([optimizer], torch.device("meta"))
    assert optimizer.state[parameter]["momentum_buffer"].is_meta


def test_evaluate_without_inference_mode() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    assert all(loop.inference_mode for loop in loops)
    _lightning.evaluate_without_inference_mode(trainer)
    assert not any(loop.inference_mode for loop in loops)
    assert not trainer.fit_loop.epoch_loop.val_loop.inference_mode


@pytest.mark.parametrize("name", ["_setup_distributed", "_get_process_group_backend", "_configure_launcher"])
def test_hooks_of_the_base_strategy(name: str) -> None:
    assert callable(getattr(ModelParallelStrategy, name))


def test_attributes_of_the_base_strategy() -> None:
    strategy = ModelParallelStrategy()
    names = ("_device_mesh", "_precision_plugin", "_accelerator", "_checkpoint_io", "_process_group_backend")
    assert [name for name in (*names, "_timeout", "_save_distributed_checkpoint") if not hasattr(strategy, name)] == []


def test_steps_are_called_through_the_strategy() -> None:
    """We override these; under another name Lightning would call the module's step past us."""
    for name in ("training_step", "validation_step", "test_step", "predict_step", "pre_backward", "post_backward"):
        assert callable(getattr(ModelParallelStrategy, name))
    assert "block_backward_sync" in inspect.getsource(L.pytorch.loops.utilities._block_parallel_sync_behavior)
