"""Run under torchrun: every scenario of the strategy on real ranks, one after another in one job.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.integration.strategy_scenarios OUT NAME ...

Rank 0 writes {scenario: {check: value}} as JSON; a scenario that raises leaves {"error": traceback}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, DistributedSampler

from lightning_resilience.errors import ResilienceError, ShardingError
from lightning_resilience.strategy import ResilientFSDPStrategy
from tests.integration.strategy_models import (
    VOCAB,
    Block,
    Gan,
    TinyLM,
    Unscaled,
    loader,
    noise,
    shards,
    tokens,
    train_alone,
    train_gan_alone,
)

SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {}
STEPS = 4


def scenario(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    SCENARIOS[function.__name__] = function
    return function


# --- helpers -----------------------------------------------------------------------------------------------


def trainer(strategy: L.pytorch.strategies.Strategy | None = None, **kwargs: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(strategy=strategy or ResilientFSDPStrategy(), **{**defaults, **kwargs})


def seeded(make: Callable[[], Any], seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return make()


def full(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in module.named_parameters()
    }


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    return max((left[name].float() - right[name].float()).abs().max().item() for name in left)


def moved(model: nn.Module, make: Callable[[], nn.Module]) -> float:
    """How far training has moved the weights, so that equal weights are not both untrained."""
    return distance(full(model), full(seeded(make)))


def gap(left: list[float], right: list[float]) -> float:
    assert len(left) == len(right) > 0, (len(left), len(right))
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def same_on_all_ranks(values: dict[str, Tensor]) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: value.sum().item() for name, value in values.items()})
    return all(one == everyone[0] for one in everyone)


def fit_and_compare(
    strategy: ResilientFSDPStrategy,
    make: Callable[[], TinyLM] = TinyLM,
    alike: Callable[[], TinyLM] = TinyLM,
    **kwargs: Any,
) -> tuple[TinyLM, dict[str, Any]]:
    """Train on two ranks and alone, from the same seed and data."""
    data = tokens(STEPS)
    alone = seeded(alike)
    clip = kwargs.pop("clip", None)
    losses = train_alone(alone, shards(data), clip=clip, accumulate=kwargs.get("accumulate_grad_batches", 1))
    model = seeded(make)
    trainer(strategy, **kwargs).fit(model, loader(data))
    result: dict[str, Any] = {
        "weights_off": distance(full(model), full(alone)),
        "moved": moved(alone, alike),
        "all_sharded": all_sharded(model),
    }
    if dist.get_rank() == 0:
        result["losses_off"] = gap(model.losses, losses)
    return model, result


def mesh_of(module: L.LightningModule, name: str) -> DeviceMesh:
    assert module.device_mesh is not None
    return module.device_mesh[name]


def all_sharded(model: nn.Module) -> bool:
    return all(isinstance(p, DTensor) for p in model.parameters() if p.dim() > 0)


def local(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}


def units(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


# --- plain modules -----------------------------------------------------------------------------------------


@scenario
def plain() -> dict[str, Any]:
    model, result = fit_and_compare(ResilientFSDPStrategy())
    return {**result, "units": units(model), "tied": model.head.weight is model.embedding.weight}


@scenario
def only_the_root() -> dict[str, Any]:
    model, result = fit_and_compare(ResilientFSDPStrategy(auto_wrap_policy=None))
    return {**result, "units": units(model)}


@scenario
def a_set_of_classes() -> dict[str, Any]:
    model, result = fit_and_compare(ResilientFSDPStrategy(auto_wrap_policy={nn.Linear}))
    return {**result, "units": units(model)}


@scenario
def shard_grad_op() -> dict[str, Any]:
    return fit_and_compare(ResilientFSDPStrategy(sharding_strategy="SHARD_GRAD_OP"))[1]


@scenario
def no_shard() -> dict[str, Any]:
    model, result = fit_and_compare(ResilientFSDPStrategy(sharding_strategy="NO_SHARD"))
    return {**result, "local_rows": local(model)["blocks.0.wide.weight"].shape[0]}


@scenario
def activation_checkpointing() -> dict[str, Any]:
    calls = []
    strategy = ResilientFSDPStrategy(activation_checkpointing_policy={Block})
    forward = Block.forward

    def counted(self: Block, x: Tensor) -> Tensor:
        calls.append(1)
        return forward(self, x)

    with mock.patch.object(Block, "forward", counted):
        _, result = fit_and_compare(strategy)
    alone = STEPS * 2 * 2  # steps × ranks' batches × blocks
    return {**result, "forwards_per_step": (len(calls) - alone) / STEPS}


class Compiled(TinyLM):
    def configure_model(self) -> None:
        for block in self.blocks:
            block.compile(backend="aot_eager")
        self.frozen.compile(backend="aot_eager")


class CompiledWrapper(TinyLM):
    def configure_model(self) -> None:
        compiled: list[Any] = [torch.compile(block, backend="aot_eager") for block in self.blocks]
        self.blocks = nn.ModuleList(compiled)


@scenario
def compiled() -> dict[str, Any]:
    model, result = fit_and_compare(ResilientFSDPStrategy(), Compiled)
    return {**result, "units": units(model)}


@scenario
def compiled_by_wrapping() -> dict[str, Any]:
    data = tokens(STEPS)
    alone = seeded(TinyLM)
    train_alone(alone, shards(data))
    model = seeded(CompiledWrapper)
    trainer(ResilientFSDPStrategy(auto_wrap_policy={Block})).fit(model, loader(data))
    weights = {name.replace("_orig_mod.", ""): value for name, value in full(model).items()}
    return {"weights_off": distance(weights, full(alone)), "units": units(model), "moved": moved(alone, TinyLM)}


@contextmanager
def counted(*names: str) -> Iterator[list[int]]:
    """Calls of the first of these collectives that exists: torch 2.13 has renamed the ones that 2.11 uses."""
    name = next(name for name in names if hasattr(dist, name))
    collective, calls = getattr(dist, name), []

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return collective(*args, **kwargs)

    with mock.patch.object(dist, name, count):
        yield calls


@scenario
def gathers() -> dict[str, Any]:
    """How often a step gathers parameters: the root, and two blocks."""
    result = {}
    for name in ("FULL_SHARD", "SHARD_GRAD_OP"):
        model = seeded(TinyLM)
        with counted("all_gather_single", "all_gather_into_tensor") as calls:
            trainer(ResilientFSDPStrategy(sharding_strategy=name)).fit(model, loader(tokens(STEPS)))
        result[name] = len(calls) / STEPS
    return result


@scenario
def gradient_accumulation() -> dict[str, Any]:
    with counted("reduce_scatter_single", "reduce_scatter_tensor") as calls:
        model, result = fit_and_compare(ResilientFSDPStrategy(), accumulate_grad_batches=2)
    return {**result, "reduce_scatters_per_update_and_unit": len(calls) / (STEPS // 2) / len(units(model))}


@scenario
def clip_by_norm() -> dict[str, Any]:
    limit = 0.05
    return fit_and_compare(
        ResilientFSDPStrategy(), gradient_clip_val=limit, clip=lambda parameters: clip_grad_norm_(parameters, limit)
    )[1]


@scenario
def clip_by_value() -> dict[str, Any]:
    limit = 0.001
    return fit_and_compare(
        ResilientFSDPStrategy(),
        gradient_clip_val=limit,
        gradient_clip_algorithm="value",
        clip=lambda parameters: clip_grad_value_(parameters, limit),
    )[1]


class SelfSharded(Unscaled):
    def configure_model(self) -> None:
        if isinstance(self, FSDPModule):
            return
        mesh = mesh_of(self, "data_parallel")
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


class StockSharded(SelfSharded):
    """Stock Lightning does not gather the root for `training_step`: give it a forward that holds the whole step."""

    def forward(self, batch: Tensor) -> Tensor:
        if batch.dim() == 2 and not getattr(self, "inside", False):
            self.inside = True
            try:
                loss: Tensor = self.loss(batch)
                return loss
            finally:
                self.inside = False
        return super().forward(batch)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self(batch[0])
        self.losses.append(loss.item())
        return loss


@scenario
def equals_stock_strategy() -> dict[str, Any]:
    data = tokens(STEPS)
    stock = seeded(StockSharded)
    trainer(ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), gradient_clip_val=0.1).fit(
        stock, loader(data)
    )
    for module in stock.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    model = seeded(Unscaled)
    trainer(ResilientFSDPStrategy(), gradient_clip_val=0.1).fit(model, loader(data))
    weights, theirs = full(model), full(stock)
    return {
        "losses_equal": model.losses == stock.losses,
        "weights_equal": all(torch.equal(weights[name], theirs[name]) for name in theirs),
        "moved": moved(model, Unscaled),
    }


@scenario
def replicas_start_equal() -> dict[str, Any]:
    """Ranks that were not seeded alike end with the model of rank 0."""
    results: dict[str, Any] = {}
    for name in ("FULL_SHARD", "NO_SHARD"):
        strategy = ResilientFSDPStrategy(sharding_strategy=name)
        model = seeded(TinyLM, seed=3 + dist.get_rank())
        trainer(strategy, max_steps=0).fit(model, loader(tokens(1)))
        results[f"{name}_off"] = distance(full(model), full(seeded(TinyLM)))
        results[f"{name}_same"] = same_on_all_ranks(local(model))
    return results


class OddBuffers(TinyLM):
    """Buffers whose data types, layouts or memory gloo cannot send as they are."""

    def __init__(self) -> None:
        super().__init__()
        value = float(torch.initial_seed())
        self.register_buffer("float8", torch.full((3,), value).to(torch.float8_e5m2))
        self.register_buffer("unsigned", torch.full((2,), value).to(torch.uint16))
        self.register_buffer("turn", torch.full((2,), value, dtype=torch.complex64))
        self.register_buffer("transposed", torch.full((2, 3), value).t())
        self.register_buffer("repeated", torch.full((1,), value).expand(3))
        diagonal = torch.ones(6).cumsum(0).le(value).float().diag()
        self.register_buffer("sparse", diagonal.to_sparse())
        self.register_buffer("compressed", diagonal.to_sparse_csr())
        self.register_buffer("flag", torch.tensor(value > 3))


@scenario
def odd_buffers_start_equal() -> dict[str, Any]:
    model = seeded(OddBuffers, seed=3 + dist.get_rank())
    trainer(max_steps=0).fit(model, loader(tokens(1)))
    names = ("float8", "unsigned", "turn", "transposed", "repeated", "sparse", "compressed", "flag")
    mine = {name: model.get_buffer(name).to_dense().to(torch.complex64).real.sum().item() for name in names}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {f"rank{rank}": values for rank, values in enumerate(everyone)}


class Averages(EMAWeightAveraging):
    """As a user derives from it."""


@scenario
def refused() -> dict[str, Any]:
    """What cannot work, and what is said about it."""
    callbacks = {"swa": StochasticWeightAveraging(1e-2, swa_epoch_start=1), "ema": Averages()}
    cases: dict[str, Callable[[], Any]] = {
        name: partial(trainer(callbacks=[callback]).fit, TinyLM(), loader(tokens(1)))
        for name, callback in callbacks.items()
    }
    model = TinyLM()
    model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters())  # type: ignore[method-assign]
    cases["optimizer"] = partial(trainer(ResilientFSDPStrategy(restart=None)).fit, model, loader(tokens(1)))
    told = {}
    for name, case in cases.items():
        try:
            case()
        except ResilienceError as error:
            told[name] = str(error)
    return told


@scenario
def hybrid_shard() -> dict[str, Any]:
    """Needs four ranks: two replicas of two shards."""
    model = seeded(TinyLM, seed=3 if dist.get_rank() == 0 else 100 + dist.get_rank())
    data = tokens(STEPS)
    alone = seeded(TinyLM)
    losses = train_alone(alone, shards(data, ranks=4))
    strategy = ResilientFSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
    trainer(strategy, devices=4).fit(model, loader(data))
    result: dict[str, Any] = {
        "weights_off": distance(full(model), full(alone)),
        "moved": moved(alone, TinyLM),
        "local_rows": local(model)["blocks.0.wide.weight"].shape[0],
        "placements": str(model.embedding.weight.placements),
        "environment": type(strategy.cluster_environment).__name__,
        "sampler": strategy.distributed_sampler_kwargs,
    }
    if dist.get_rank() == 0:
        result["losses_off"] = gap(model.losses, losses)
    return result


@scenario
def without_sync_replicas_differ() -> dict[str, Any]:
    model = seeded(TinyLM, seed=3 + dist.get_rank())
    strategy = ResilientFSDPStrategy(sharding_strategy="NO_SHARD", sync_module_states=False)
    trainer(strategy, max_steps=0).fit(model, loader(tokens(1)))
    return {"same": same_on_all_ranks(local(model))}


# --- the life of a model -----------------------------------------------------------------------------------


@scenario
def every_loop() -> dict[str, Any]:
    """Validate first, fit with validation, test, predict, then fit again with another trainer."""
    data = tokens(STEPS)
    alone = seeded(TinyLM)
    train_alone(alone, shards(data))
    model = seeded(TinyLM)
    first = trainer(val_check_interval=2, num_sanity_val_steps=1)
    first.validate(model, loader(data), verbose=False)
    sharded_after_validate = all_sharded(model)
    model(shards(data)[0][0])  # outside the trainer; leaves the root gathered
    first.fit(model, loader(data), loader(data))
    off = distance(full(model), full(alone))
    (tested,) = first.test(model, loader(data), verbose=False)
    expected = torch.stack([alone.loss(batch) for step in shards(data) for batch in step]).mean().item()
    predictions: Any = first.predict(model, loader(data))
    theirs = alone(shards(data)[0][dist.get_rank()]).argmax(-1)
    second = trainer(max_epochs=2)
    second.fit(model, loader(data))
    return {
        "sharded_after_validate": sharded_after_validate,
        "weights_off": off,
        "test_loss_off": abs(tested["test_loss"] - expected),
        "predictions_equal": torch.equal(predictions[0], theirs),
        "second_fit_moved": distance(full(model), full(alone)),
        "loss_after_second_fit": model.losses[-1] < model.losses[0],
        "sharded_in_the_end": all_sharded(model),
    }


@scenario
def inference_mode_first() -> dict[str, Any]:
    """NCCL jobs evaluate in inference mode; gather buffers made there could not be trained with."""
    model = seeded(TinyLM)
    seen: list[bool] = []
    model.validation_step = lambda batch, batch_idx: seen.append(torch.is_inference_mode_enabled())
    with (
        mock.patch("torch.distributed.get_backend", return_value="nccl"),
        mock.patch.object(ResilientFSDPStrategy, "barrier"),
    ):
        trainer().validate(model, loader(tokens(1)), verbose=False)
    return {"inference_mode": seen}


@scenario
def model_summary() -> dict[str, Any]:
    model = seeded(TinyLM)
    expected = ModelSummary(seeded(TinyLM)).total_parameters
    trainer(max_steps=0).fit(model, loader(tokens(1)))
    return {"total": ModelSummary(model).total_parameters, "expected": expected}


class Meta(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        for name in ("embedding", "blocks", "frozen", "head", "temperature"):
            delattr(self, name)

    def configure_model(self) -> None:
        if hasattr(self, "embedding"):
            return
        with torch.device("meta"):
            self.embedding = nn.Embedding(VOCAB, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.head = nn.Linear(8, VOCAB, bias=False)
            self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.tensor(1.0 + self.global_rank))


@scenario
def meta_device() -> dict[str, Any]:
    """Nothing stays on the meta device, weights stay tied, replicas get the same values without a seed."""
    results: dict[str, Any] = {}
    for name in ("FULL_SHARD", "NO_SHARD"):
        torch.manual_seed(100 + dist.get_rank())
        strategy = ResilientFSDPStrategy(sharding_strategy=name, sync_module_states=False)
        model = Meta()
        trainer(strategy).fit(model, loader(tokens(STEPS)))
        values = full(model)
        results[name] = {
            "tied": model.head.weight is model.embedding.weight,
            "finite": all(bool(value.isfinite().all()) for value in values.values()),
            "spread": values["blocks.0.wide.weight"].std().item(),
            "frozen": not model.frozen.weight.requires_grad,
            "same": same_on_all_ranks(values),
            "local_same": same_on_all_ranks(local(model)),
        }
    return results


@scenario
def raising_step() -> dict[str, Any]:
    """An error, in the step or before it, leaves `forward` as it was."""
    model = seeded(TinyLM)
    errors = []

    def fail(*_: Any) -> None:
        raise RuntimeError("planned")

    with mock.patch.object(TinyLM, "loss", fail):
        try:
            trainer(ResilientFSDPStrategy(restart=None)).fit(model, loader(tokens(1)))
        except RuntimeError as error:
            errors.append(str(error))
    handle = model.register_forward_pre_hook(fail, prepend=True)
    model = model_after_reset(model)
    try:
        trainer(ResilientFSDPStrategy(restart=None)).fit(model, loader(tokens(1)))
    except RuntimeError as error:
        errors.append(str(error))
    handle.remove()
    return {
        "errors": errors,
        "own_forward": "forward" in model.__dict__,
        "hooks": [len(model._forward_pre_hooks), len(model._forward_hooks)],
    }


def model_after_reset(model: TinyLM) -> TinyLM:
    assert isinstance(model, FSDPModule)
    reset = getattr(model, "reset_iter_state", None)  # not in torch 2.11
    if reset is not None:
        reset()
    return model


class Unfreezes(TinyLM):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks[0].requires_grad_(batch_idx >= 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@scenario
def unfreezing() -> dict[str, Any]:
    data = tokens(STEPS)
    alone = seeded(Unfreezes)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for index, batches in enumerate(shards(data)):
        alone.on_train_batch_start(None, index)
        optimizer.zero_grad()
        torch.stack([alone.loss(batch) for batch in batches]).mean().backward()  # type: ignore[no-untyped-call]  # torch
        optimizer.step()
    model = seeded(Unfreezes)
    trainer().fit(model, loader(data))
    return {
        "weights_off": distance(full(model), full(alone)),
        "moved": distance(full(alone.blocks[0]), full(seeded(TinyLM).blocks[0])),
    }


# --- precision ---------------------------------------------------------------------------------------------


class Records(TinyLM):
    """Notes the data types a step computes with."""

    seen: dict[str, str]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        logits = self(batch[0])
        self.seen = {
            "root": str(self.embedding.weight.dtype),
            "logits": str(logits.dtype),
            "targets": str(batch[1].dtype),
            "autocast": str(torch.is_autocast_enabled("cpu")),
        }
        loss = self.loss(batch[0])
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["parameter"] = str(self.embedding.weight.dtype)
        assert self.embedding.weight.grad is not None
        self.seen["gradient"] = str(self.embedding.weight.grad.dtype)


def precision(name: str) -> dict[str, Any]:
    data = tokens(STEPS)
    alone = seeded(TinyLM)
    losses = train_alone(alone, shards(data))
    model = seeded(Records)
    pairs = torch.utils.data.TensorDataset(data.tensors[0], torch.ones(len(data)))
    trainer(ResilientFSDPStrategy(), precision=name).fit(model, loader(pairs))
    result: dict[str, Any] = dict(model.seen)
    if dist.get_rank() == 0:
        result["losses_off"] = gap(model.losses, losses)
    return result


@scenario
def bf16_mixed() -> dict[str, Any]:
    return precision("bf16-mixed")


@scenario
def bf16_true() -> dict[str, Any]:
    return precision("bf16-true")


# --- manual optimization -----------------------------------------------------------------------------------


def gan(strategy: ResilientFSDPStrategy) -> dict[str, Any]:
    data = noise(STEPS)
    alone = seeded(Gan)
    losses = train_gan_alone(alone, shards(data))
    model = seeded(Gan)
    trainer(strategy).fit(model, loader(data))
    result: dict[str, Any] = {
        "weights_off": distance(full(model), full(alone)),
        "moved": moved(alone, Gan),
        "units": units(model),
        "all_sharded": all_sharded(model),
    }
    if dist.get_rank() == 0:
        result["losses_off"] = gap(model.losses, losses)
    return result


@scenario
def gan_in_the_root() -> dict[str, Any]:
    return gan(ResilientFSDPStrategy(auto_wrap_policy=None))


@scenario
def gan_in_units() -> dict[str, Any]:
    return gan(ResilientFSDPStrategy(auto_wrap_policy={nn.Sequential}))


@scenario
def gan_kept_gathered() -> dict[str, Any]:
    return gan(ResilientFSDPStrategy(sharding_strategy="SHARD_GRAD_OP"))


class PlainBackward(Gan):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        self.generator_loss(batch[0]).backward()  # type: ignore[no-untyped-call]  # torch
        optimizers[0].step()


@scenario
def backward_past_the_strategy() -> dict[str, Any]:
    try:
        trainer(ResilientFSDPStrategy(auto_wrap_policy=None, restart=None)).fit(seeded(PlainBackward), loader(noise(1)))
    except ShardingError as error:
        return {"error_text": str(error)}
    return {"error_text": None}


class GradientPenalty(TinyLM):
    """Differentiates inside the step, then goes on to use the weights."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.penalized(batch[0])
        self.losses.append(loss.item())
        return loss

    def penalized(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch).detach().requires_grad_()
        y = self.blocks[0](x)
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        penalized: Tensor = self.loss(batch) + slope.square().mean() * self.head.weight.mean()
        return penalized


@scenario
def gradient_inside_the_step() -> dict[str, Any]:
    data = tokens(STEPS)
    alone = seeded(GradientPenalty)
    optimizer = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], lr=alone.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for batches in shards(data):
        optimizer.zero_grad()
        torch.stack([alone.penalized(batch) for batch in batches]).mean().backward()  # type: ignore[no-untyped-call]  # torch
        optimizer.step()
        scheduler.step()
    model = seeded(GradientPenalty)
    trainer().fit(model, loader(data))
    return {"weights_off": distance(full(model), full(alone)), "moved": moved(alone, TinyLM)}


# --- models that shard themselves --------------------------------------------------------------------------


@scenario
def self_sharded() -> dict[str, Any]:
    model, result = fit_and_compare(ResilientFSDPStrategy(), SelfSharded, Unscaled)
    trainer().fit(model, loader(tokens(1)))
    return {**result, "units": units(model)}


class HalfSharded(Unscaled):
    def configure_model(self) -> None:
        for block in self.blocks:
            fully_shard(block, mesh=mesh_of(self, "data_parallel"))


@scenario
def half_sharded() -> dict[str, Any]:
    try:
        trainer().fit(seeded(HalfSharded), loader(tokens(1)))
    except ShardingError as error:
        return {"error_text": str(error)}
    return {"error_text": None}


class TensorParallel(TinyLM):
    def configure_model(self) -> None:
        mesh = mesh_of(self, "tensor_parallel")
        for block in self.blocks:
            parallelize_module(block, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})


@scenario
def tensor_parallel() -> dict[str, Any]:
    """Two ranks compute each block together, on the same batches; gradients live on two kinds of mesh."""
    data = tokens(STEPS)
    alone = seeded(TinyLM)
    both = [[torch.cat(batches)] for batches in shards(data)]
    losses = train_alone(alone, both, clip=lambda parameters: clip_grad_norm_(parameters, 0.1))
    model = seeded(TensorParallel)
    rows = torch.utils.data.TensorDataset(torch.cat([batch for step in both for batch in step]))
    strategy = ResilientFSDPStrategy(tensor_parallel_size=2)
    sampler: DistributedSampler[Any] = DistributedSampler(rows, num_replicas=1, rank=0, shuffle=False)
    trainer(strategy, gradient_clip_val=0.1).fit(model, DataLoader(rows, len(both[0][0]), sampler=sampler))
    return {
        "losses_off": gap(model.losses, losses),
        "weights_off": distance(full(model), full(alone)),
        "moved": moved(alone, TinyLM),
        "local_rows": local(model)["blocks.0.wide.weight"].shape[0],
    }


def main() -> None:
    out, *names = sys.argv[1:]
    if not dist.is_initialized():
        trainer(devices=int(os.environ["WORLD_SIZE"])).validate(TinyLM(), loader(tokens(1)), verbose=False)
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = SCENARIOS[name]()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results, indent=1))


def under_slurm() -> None:
    """With the environment that `srun` gives the processes of one node."""
    ranks = os.environ["WORLD_SIZE"]
    del os.environ["TORCHELASTIC_RUN_ID"]
    os.environ |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "test", "SLURM_NODELIST": "localhost", "SLURM_NODEID": "0"}
    os.environ |= {"SLURM_NTASKS": ranks, "SLURM_NTASKS_PER_NODE": ranks}
    os.environ |= {"SLURM_PROCID": os.environ["RANK"], "SLURM_LOCALID": os.environ["LOCAL_RANK"]}
    main()


if __name__ == "__main__":
    main()
