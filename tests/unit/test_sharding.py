"""The sharding engine without processes: policies, meshes, initialization, the root's forward, clipping."""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor

from lightning_resilience.errors import ConfigurationError, ShardingError
from lightning_resilience.sharding.clipping import clip_by_norm, clip_by_value
from lightning_resilience.sharding.initialize import materialize, move_all_but_parameters
from lightning_resilience.sharding.mesh import MeshPlan, build_meshes, plan_mesh
from lightning_resilience.sharding.options import ShardingOptions
from lightning_resilience.sharding.replicated import unshardable_parameters
from lightning_resilience.sharding.root_forward import RootForward
from lightning_resilience.sharding.shard import is_sharded, reshard_all, shard_model, sharded_with
from lightning_resilience.sharding.supported import Update, check_supported
from lightning_resilience.sharding.wrapping import check_policy, select_modules, without_split_ties


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.inner(x)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norms = nn.ModuleList([nn.LayerNorm(4)])
        self.head = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norms[0](x))
        return out


def names(policy: Any, root: nn.Module) -> list[str]:
    chosen = select_modules("auto_wrap_policy", check_policy("auto_wrap_policy", policy), root)
    return [name for name, module in root.named_modules() if module in chosen]


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


# --- wrap policies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        "auto",
        {Block},
        [f"{__name__}.Block"],
        lambda module: isinstance(module, Block),
        ModuleWrapPolicy({Block}),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)),
    ],
)
def test_every_kind_of_policy_finds_the_blocks(policy: Any) -> None:
    assert names(policy, Model()) == BLOCKS


def test_no_policy_chooses_nothing() -> None:
    assert names(None, Model()) == []


def test_a_size_policy_asks_for_what_is_left_after_the_children() -> None:
    """A block has 40 weights and its two layers 20 each: either the layers are units or the block is."""
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=36)
    assert names(policy, Model()) == ["blocks.0.inner", "blocks.1.inner", "blocks.2.inner"]


def test_auto_ignores_lone_and_weightless_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU(), nn.Sequential(nn.LayerNorm(2)))
    assert names("auto", model) == []


def test_auto_looks_inside_blocks_that_cannot_be_units() -> None:
    model = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])
    assert names("auto", model) == ["0.0", "0.1", "1.0", "1.1"]


@pytest.mark.parametrize("policy", ["auto", {Block}, lambda module: isinstance(module, Block)])
def test_a_compiled_block_stands_for_the_block_inside(policy: Any) -> None:
    model = nn.Sequential(Block(), Block())
    compiled: list[Any] = [torch.compile(block, backend="eager") for block in model]
    assert names(policy, nn.Sequential(*compiled)) == ["0", "1"]


def test_the_root_is_never_chosen() -> None:
    assert names({Model}, nn.Sequential(Model())) == ["0"]
    with pytest.raises(ShardingError, match="has no such module"):
        names({Model}, Model())


def test_classes_that_match_nothing_are_an_error() -> None:
    with pytest.raises(ShardingError, match="auto_wrap_policy names Conv2d, but Model has no such module"):
        names({nn.Conv2d}, Model())


def test_a_container_without_forward_cannot_be_a_unit() -> None:
    with pytest.raises(ShardingError, match="chooses 'blocks', a ModuleList"):
        names({nn.ModuleList}, Model())


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("block", "is not a wrap policy"),
        (set(), r"policy=set\(\) names no class\. Use None"),
        (3, "is not a wrap policy"),
        (Block, "is not a wrap policy"),
        ({Block, 3}, "holds 3, which is not a class"),
        (["torch.nn.NoSuchLayer"], "'torch.nn.NoSuchLayer', which cannot be imported"),
        (["Linear"], "'Linear', which cannot be imported"),
        (["math.pi"], "which is not a class derived"),
    ],
)
def test_what_is_no_policy_is_refused_at_once(policy: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_policy("auto_wrap_policy", policy)


def test_units_do_not_split_shared_parameters() -> None:
    model = Model()
    first, second = (model.blocks[0].inner, model.blocks[1].inner)
    assert isinstance(first, nn.Sequential)
    assert isinstance(second, nn.Sequential)
    first[0].weight = second[0].weight  # between two blocks
    blocks = list(model.blocks)
    assert without_split_ties(blocks, model) == [blocks[2]]


def test_parameters_shared_inside_a_unit_do_not_matter() -> None:
    model = Model()
    inner = model.blocks[0].inner
    assert isinstance(inner, nn.Sequential)
    inner[0].weight = inner[2].weight
    assert len(without_split_ties(list(model.blocks), model)) == 3


# --- options and meshes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "world", "nodes", "plan"),
    [
        ({}, 4, 1, (None, 4, 1)),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, 4, 2, (None, 4, 1)),
        ({"tensor_parallel_size": 2}, 8, 1, (None, 4, 2)),
        ({"sharding_strategy": "NO_SHARD"}, 4, 1, (4, 1, 1)),
        ({"sharding_strategy": "HYBRID_SHARD"}, 8, 2, (2, 4, 1)),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (4, 2)}, 8, 1, (4, 2, 1)),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2), "tensor_parallel_size": 2}, 8, 1, (2, 2, 2)),
    ],
)
def test_the_ranks_are_divided(
    options: dict[str, Any], world: int, nodes: int, plan: tuple[int | None, int, int]
) -> None:
    replicas, shards, tensor_parallel = plan
    assert plan_mesh(ShardingOptions(**options), world_size=world, num_nodes=nodes) == MeshPlan(
        replicas=replicas, shards=shards, tensor_parallel=tensor_parallel
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide the 4 processes"),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (3, 2)}, r"\(3, 2\) needs 6 .* this job has 4"),
    ],
)
def test_sizes_that_do_not_fit_the_job_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_mesh(ShardingOptions(**options), world_size=4, num_nodes=1)


# --- a world of one ----------------------------------------------------------------------------------------


@pytest.fixture
def world_of_one() -> Iterator[None]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


CPU = torch.device("cpu")


def sharded(model: nn.Module, mixed: MixedPrecisionPolicy | None = None, **options: Any) -> nn.Module:
    chosen = ShardingOptions(**options)
    meshes = build_meshes(plan_mesh(chosen, world_size=1, num_nodes=1), "cpu")
    shard_model(model, chosen, meshes=meshes, device=CPU, mixed_precision=mixed or MixedPrecisionPolicy())
    return model


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_a_mesh_answers_to_lightnings_names(strategy: Any) -> None:
    plan = plan_mesh(ShardingOptions(sharding_strategy=strategy), world_size=1, num_nodes=1)
    meshes = build_meshes(plan, "cpu")
    assert meshes.job["data_parallel"].size() == 1
    assert meshes.job["tensor_parallel"].size() == 1
    assert meshes.sharding.ndim == (2 if strategy == "HYBRID_SHARD" else 1)


@pytest.mark.usefixtures("world_of_one")
def test_sharding_wraps_units_and_the_root() -> None:
    model = sharded(Model())
    assert [name for name, module in model.named_modules() if isinstance(module, FSDPModule)] == ["", *BLOCKS]
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert is_sharded(model)
    assert sharded_with(model) is not None
    assert not is_sharded(Model())


@pytest.mark.usefixtures("world_of_one")
def test_shared_parameters_stay_shared_and_train_as_one() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    sharded(model)
    assert model.head.weight is model.embedding.weight
    model(torch.arange(6)).sum().backward()
    assert model.embedding.weight.grad is not None
    assert len({id(parameter) for parameter in model.parameters()}) == len(list(Model().parameters())) - 1


@pytest.mark.usefixtures("world_of_one")
def test_scalars_are_left_whole_and_get_gradients() -> None:
    class Scaled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.temperature

    model = Scaled()
    assert unshardable_parameters(model) == {model.temperature}
    sharded(model)
    model(torch.arange(6)).sum().backward()
    assert not isinstance(model.temperature, DTensor)
    assert model.temperature.grad is not None


class Mixed(Model):
    """Data types, shapes and layouts that FSDP2 by itself refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.norms.to(torch.bfloat16)
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.column = nn.Parameter(torch.randn(4, 6).t())
        self.repeated = nn.Parameter(torch.ones(1).expand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        x = self.norms[0](x.bfloat16()).float() * self.turn.real + self.nothing.sum()
        out: torch.Tensor = self.head(x) + x @ self.column.t() * self.repeated
        return out


@pytest.mark.usefixtures("world_of_one")
def test_odd_parameters_train_as_without_sharding() -> None:
    torch.manual_seed(0)
    model = Mixed()
    torch.manual_seed(0)
    alone = Mixed()
    with pytest.warns(UserWarning, match="norms.0.weight, norms.0.bias of Mixed .* another data type"):
        sharded(model)
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert whole == ["turn", "nothing", "norms.0.weight", "norms.0.bias"]
    for one in (model, alone):
        one(torch.arange(6)).pow(2).sum().backward()
    for (name, parameter), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert gradient is not None, name
        torch.testing.assert_close(gradient, expected.grad)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nn.LazyLinear(3), "odd.weight, odd.bias of Sequential have no shape yet.*Run one batch"),
        (lambda: nn.Embedding(3, 3, sparse=True), "embeddings odd of Sequential were made with sparse=True"),
        (lambda: nn.EmbeddingBag(3, 3, sparse=True), "embeddings odd of Sequential were made with sparse=True"),
        (lambda: Bare(torch.eye(3).to_sparse()), "odd.weight of Sequential are sparse or quantized"),
    ],
)
def test_what_cannot_be_sharded_is_named_beforehand(layer: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.add_module("odd", layer())
    with pytest.raises(ShardingError, match=message):
        check_supported(model)


class Bare(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def test_frozen_sparse_embeddings_are_fine() -> None:
    check_supported(nn.Embedding(3, 3, sparse=True).requires_grad_(False))


def _fail() -> Any:
    raise RuntimeError("got mixed torch.Tensor and DTensor\nmore")


def test_an_optimizer_that_fails_on_shards_is_named_and_a_closure_that_fails_is_not() -> None:
    optimizer = torch.optim.Rprop([nn.Parameter(torch.ones(1))])
    with (
        pytest.raises(ShardingError, match=r"Rprop cannot update sharded parameters.*DTensor\)\. Use"),
        Update(optimizer, lambda: None).errors_explained(),
    ):
        _fail()
    update = Update(optimizer, _fail)
    with pytest.raises(RuntimeError, match="mixed"), update.errors_explained():
        update()
    with pytest.raises(RuntimeError, match="out of memory"), Update(optimizer, _fail).errors_explained():
        raise RuntimeError("out of memory")


@pytest.mark.usefixtures("world_of_one")
def test_scalars_travel_only_when_gradients_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x) * self.scale
            return out

    model = sharded(Scale())
    assert isinstance(model, FSDPModule)
    calls: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: calls.append(1))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 1)).sum().backward()
    assert calls == []
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 1)).sum().backward()
    assert calls == [1]


@pytest.mark.usefixtures("world_of_one")
def test_mixed_precision_keeps_targets_and_casts_layers() -> None:
    seen: dict[str, torch.dtype] = {}

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            seen.update(x=x.dtype, y=y.dtype, target=target.dtype)
            return nn.functional.mse_loss(y.float(), target)

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(Regression(), mixed)
    model(torch.randn(3, 2), torch.randn(3, 2)).backward()
    assert seen == {"x": torch.float32, "y": torch.bfloat16, "target": torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.usefixtures("world_of_one")
def test_reshard_all_puts_the_shards_back_even_inside_a_forward() -> None:
    model = sharded(Model(), sharding_strategy="SHARD_GRAD_OP")
    inside: list[set[type]] = []

    def step() -> None:
        inside.append({type(parameter) for parameter in model.parameters()})
        model(torch.arange(6))
        inside.append({type(parameter) for parameter in model.parameters()})
        reshard_all(model)
        inside.append({type(parameter) for parameter in model.parameters()})

    RootForward().run(model, step)
    assert inside == [{nn.Parameter, DTensor}, {nn.Parameter}, {DTensor}]


# --- steps of the root -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world_of_one")
def test_a_step_runs_with_the_root_gathered_and_forward_untouched() -> None:
    model = sharded(Model())
    weight = model.get_parameter("head.weight")
    result = RootForward().run(model, lambda: (type(model.get_parameter("head.weight")), model(torch.arange(6))))
    assert result[0] is nn.Parameter
    assert isinstance(weight, DTensor)
    assert "forward" not in model.__dict__
    result[1].sum().backward()
    assert weight.grad is not None


@pytest.mark.usefixtures("world_of_one")
def test_the_root_is_called_with_an_argument() -> None:
    """`FSDPState._root_pre_forward` of torch 2.11 indexes into the arguments it has moved to a CUDA device."""
    model = sharded(Model())
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(len(args)))
    RootForward().run(model, lambda: None)
    assert seen == [1]


@pytest.mark.usefixtures("world_of_one")
def test_forward_and_hooks_are_put_back_after_an_error() -> None:
    model = sharded(Model())
    before = (list(model._forward_pre_hooks), list(model._forward_hooks))

    def fail() -> None:
        raise RuntimeError("planned")

    with pytest.raises(RuntimeError, match="planned"):
        RootForward().run(model, fail)
    assert "forward" not in model.__dict__
    assert (list(model._forward_pre_hooks), list(model._forward_hooks)) == before


@pytest.mark.usefixtures("world_of_one")
def test_an_error_before_the_step_also_puts_forward_back() -> None:
    model = sharded(Model())
    own = model.forward
    model.forward = own  # a replacement by the user is kept

    def fail(*_: Any) -> None:
        raise RuntimeError("planned")

    handle = model.register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(RuntimeError, match="planned"):
        RootForward().run(model, lambda: None)
    handle.remove()
    assert model.__dict__["forward"] is own


@pytest.mark.usefixtures("world_of_one")
def test_an_update_inside_a_step_is_seen_by_the_rest_of_it() -> None:
    model = sharded(nn.Linear(2, 1, bias=False), auto_wrap_policy=None)
    steps = RootForward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        before = model.get_parameter("weight").detach().clone()
        loss = model(torch.ones(1, 2)).sum()
        steps.before_backward(loss)
        loss.backward()
        steps.after_backward()
        steps.before_optimizer_step()
        optimizer.step()
        steps.after_optimizer_step(model)
        return before, model.get_parameter("weight").detach().clone()

    before, after = steps.run(model, step)
    assert torch.equal(after, before - 1.0)


@pytest.mark.usefixtures("world_of_one")
def test_parameters_turned_off_inside_a_step_get_no_gradient_once() -> None:
    model = sharded(nn.Linear(2, 1), auto_wrap_policy=None)
    weight, bias = model.get_parameter("weight"), model.get_parameter("bias")
    steps = RootForward()

    def backward() -> None:
        loss = model(torch.ones(1, 2)).sum()
        steps.before_backward(loss)
        loss.backward()
        steps.after_backward()

    def step() -> tuple[bool, bool]:
        weight.requires_grad_(False)
        backward()
        first = weight.grad is not None
        weight.requires_grad_(True)
        backward()
        return first, weight.grad is not None

    assert steps.run(model, step) == (False, True)
    assert bias.grad is not None


@pytest.mark.usefixtures("world_of_one")
def test_a_backward_that_went_past_us_is_found_at_the_update() -> None:
    model = sharded(nn.Linear(2, 1), auto_wrap_policy=None)
    steps = RootForward()

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        steps.before_optimizer_step()

    with pytest.raises(ShardingError, match=r"self.manual_backward\(loss\)"):
        steps.run(model, step)


# --- initialization ----------------------------------------------------------------------------------------


def test_meta_tensors_get_values_and_stay_shared() -> None:
    with torch.device("meta"):
        model = Model()
        model.head.weight = model.embedding.weight
        model.blocks[0].requires_grad_(False)
    vars(model.embedding.weight)["tag"] = "kept"
    assert materialize(model, CPU)
    assert model.head.weight is model.embedding.weight
    assert vars(model.embedding.weight)["tag"] == "kept"
    assert not next(model.blocks[0].parameters()).requires_grad
    assert model.embedding.weight.std() > 0.1
    assert torch.equal(next(model.norms.parameters()), torch.ones(4))


def test_nothing_is_reset_without_meta_tensors() -> None:
    model = Model()
    before = model.head.weight.clone()
    assert not materialize(model, CPU)
    assert torch.equal(model.head.weight, before)


@pytest.mark.usefixtures("world_of_one")
def test_modules_that_cannot_initialize_themselves_are_named() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    with pytest.warns(UserWarning, match=r"have no reset_parameters\(\) .*Own"):
        materialize(nn.Sequential(Own()), CPU)


def test_offloading_moves_everything_but_parameters() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("buffer", torch.zeros(1))
            self.layer = nn.BatchNorm1d(2)
            self.weightless = nn.BatchNorm1d(2, affine=False)

    model = Mixed()
    meta = torch.device("meta")  # any other device shows what moves
    move_all_but_parameters(model, meta)
    assert {name for name, buffer in model.named_buffers() if buffer.device != meta} == set()
    assert {parameter.device for parameter in model.parameters()} == {CPU}


# --- clipping ----------------------------------------------------------------------------------------------


def with_gradients(*values: list[float]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(len(value))) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return parameters


def test_clipping_by_norm() -> None:
    parameters = with_gradients([3.0], [0.0, 4.0])
    assert clip_by_norm(parameters, 1.0) == pytest.approx(5.0)
    assert torch.cat([p.grad for p in parameters if p.grad is not None]).norm() == pytest.approx(1.0)


def test_small_gradients_are_left_alone() -> None:
    (parameter,) = with_gradients([0.5])
    clip_by_norm([parameter], 1.0)
    assert parameter.grad is not None
    assert parameter.grad.item() == 0.5


def test_clipping_nothing() -> None:
    assert clip_by_norm([nn.Parameter(torch.zeros(1))], 1.0) == 0.0


def test_clipping_by_value() -> None:
    (parameter,) = with_gradients([3.0, -0.1])
    clip_by_value([parameter], 0.5)
    assert torch.equal(parameter.grad, torch.tensor([0.5, -0.1]))  # type: ignore[arg-type]  # it has one


@pytest.mark.usefixtures("world_of_one")
def test_the_norm_spans_meshes_and_plain_tensors() -> None:
    plans = [MeshPlan(replicas=replicas, shards=1, tensor_parallel=1) for replicas in (None, 1)]
    meshes = [build_meshes(plan, "cpu").sharding for plan in plans]
    parameters = with_gradients([2.0])
    for mesh, value in zip(meshes, (3.0, 6.0), strict=True):
        placements = [torch.distributed.tensor.Shard(0)] * mesh.ndim
        parameter = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, placements))
        parameter.grad = DTensor.from_local(torch.tensor([value]), mesh, placements)
        parameters.append(parameter)
    assert clip_by_norm(parameters, 1.0) == pytest.approx(7.0)
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    assert [round(7 * g.item()) for g in grads if g is not None] == [2, 3, 6]
