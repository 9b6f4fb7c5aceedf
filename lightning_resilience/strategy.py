"""`Trainer(strategy=ResilientFSDPStrategy())`: Lightning's hooks, translated for the sharding engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_resilience import _lightning
from lightning_resilience.errors import ConfigurationError, ShardingError
from lightning_resilience.precision import ShardedPrecision, check_precision, sharded_precision
from lightning_resilience.process_wide import process_wide
from lightning_resilience.restart.health import HealthCheck
from lightning_resilience.restart.policy import RestartPolicy
from lightning_resilience.restart.timeouts import Section
from lightning_resilience.restart.world import World
from lightning_resilience.sharding.initialize import move_all_but_parameters, synchronize_replicas
from lightning_resilience.sharding.mesh import Meshes, options_with_fewer, plan_mesh
from lightning_resilience.sharding.options import ShardingOptions, ShardingStrategyName
from lightning_resilience.sharding.root_forward import RootForward
from lightning_resilience.sharding.shard import (
    check_gradients_reduced,
    is_sharded,
    reshard_all,
    shard_again,
    shard_model,
    sharded_with,
)
from lightning_resilience.sharding.supported import Update
from lightning_resilience.strategy_fewer import FewerRanksStrategy, follow

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


_DEFAULT_RESTARTS = RestartPolicy()


class ResilientFSDPStrategy(FewerRanksStrategy):
    """Train with parameters, gradients and optimizer state sharded over the ranks (FSDP2).

    A LightningModule needs no change. One that calls `fully_shard` or tensor-parallel functions itself, in
    `configure_model` on `self.device_mesh`, keeps what it does there.

    Args:
        accelerator: As in every Lightning strategy.
        parallel_devices: The devices of this node, one a process.
        cluster_environment: Who starts the processes.
        checkpoint_io: Who writes checkpoints, better given as `Trainer(plugins=...)`.
        precision_plugin: Better given as `Trainer(precision=...)`: "32-true", "bf16-true" or "bf16-mixed".
        process_group_backend: By default "nccl" on CUDA and "gloo" on a CPU.
        timeout: How long a collective operation may take, in seconds or as a timedelta.
        cpu_offload: Keep parameters, gradients and optimizer state in host memory while they are not in use.
        auto_wrap_policy: Which modules are gathered and freed as one: a set of layer classes, a list of their
            dotted names, a function from module to bool (or one of `torch.distributed.fsdp.wrap`), None for only
            the whole model, or "auto" for modules that repeat in a ModuleList or Sequential.
        activation_checkpointing_policy: Which modules recompute their activations in backward; the same kinds.
        sharding_strategy: "FULL_SHARD" frees gathered parameters after forward; "SHARD_GRAD_OP" keeps them until
            backward; "HYBRID_SHARD" shards within groups of ranks and replicates across them; "NO_SHARD"
            replicates everything.
        device_mesh: (replicas, shards) for "HYBRID_SHARD". By default a replica a node.
        state_dict_type: "sharded" writes a directory with a part from each rank, "full" one file from rank 0.
        tensor_parallel_size: How many ranks share the computation of a layer; `configure_model` splits it.
        sync_module_states: Start all ranks from the values of rank 0. Turn off only if they are equal already.
        restart: When `fit` restarts in the same process after a fault; None for never.
        health_checks: What is checked on each rank before it goes on after a fault: objects with `begin()` and
            `check()`, as in `lightning_resilience.restart.health`. None for the device, its memory, the GPU's own
            counters, network links and free space.
        hang_timeout: After how long without progress, in seconds or as a timedelta, a step counts as a hang. It must
            be longer than the first step takes. None to learn it: ten times the longest step, a minute at least.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
        cpu_offload: bool = False,
        auto_wrap_policy: set[type[Module]] | list[str] | Callable[..., bool] | Literal["auto"] | None = "auto",
        activation_checkpointing_policy: (
            set[type[Module]] | list[str] | Callable[..., bool] | Literal["auto"] | None
        ) = None,
        sharding_strategy: ShardingStrategyName = "FULL_SHARD",
        device_mesh: tuple[int, int] | None = None,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        tensor_parallel_size: int = 1,
        sync_module_states: bool = True,
        restart: RestartPolicy | None = _DEFAULT_RESTARTS,
        health_checks: Sequence[HealthCheck] | None = None,
        hang_timeout: timedelta | float | None = None,
    ) -> None:
        super().__init__(
            restart=restart,
            health_checks=health_checks,
            hang_timeout=hang_timeout,
            save_distributed_checkpoint=_is_sharded_type(state_dict_type),
            process_group_backend=process_group_backend,
            timeout=_duration(timeout),
        )
        self.options = ShardingOptions(
            sharding_strategy=sharding_strategy,
            device_mesh=device_mesh,
            tensor_parallel_size=tensor_parallel_size,
            cpu_offload=cpu_offload,
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing_policy=activation_checkpointing_policy,
            sync_module_states=sync_module_states,
        )
        self._accelerator = accelerator
        self._checkpoint_io = checkpoint_io
        self.parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment
        self.precision_plugin = precision_plugin
        self._steps = RootForward()
        self._meshes: Meshes | None = None

    check_precision = staticmethod(check_precision)

    # --- set-up --------------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> ShardedPrecision:
        plugin = self._precision_plugin
        assert plugin is None or isinstance(plugin, ShardedPrecision)
        return plugin or ShardedPrecision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else sharded_precision(precision_plugin)

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            _refuse_averaging(self.lightning_module.trainer)
        plan = plan_mesh(self.options, world_size=self.world_size, num_nodes=self.num_nodes)
        self._setup_distributed()
        self._meshes = process_wide().meshes(plan, self.root_device.type)
        self._device_mesh = self._meshes.job
        _lightning.publish_mesh(self.lightning_module, self._device_mesh)
        self.guard_setup()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        _lightning.evaluate_without_inference_mode(trainer)
        self.adopt_earlier_model()
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self._shard(self.lightning_module)
        self.model_to_device()
        self.reshard_all()
        self.barrier()
        self.model_is_built()
        if trainer.state.fn == TrainerFn.FITTING:
            check_gradients_reduced(self.lightning_module, self.device_mesh)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING and not self._offloads:
            _lightning.move_optimizers(self.optimizers, self.root_device)
        self.precision_plugin.before_update = self.before_update
        self.guard_training()

    def _shard(self, module: LightningModule) -> None:
        if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
            raise ShardingError(
                f"{type(module).__name__} holds modules wrapped by FullyShardedDataParallel, which is FSDP1. "
                f"Remove the wrapping, or call torch.distributed.fsdp.fully_shard instead."
            )
        if is_sharded(module):
            self._adopt(module)
            return
        assert self._meshes is not None
        shard_model(
            module,
            self.options,
            meshes=self._meshes,
            device=self.root_device,
            mixed_precision=self.precision_plugin.policy,
        )

    def _adopt(self, module: LightningModule) -> None:
        """Take over a model sharded in `configure_model`, or by an earlier run of it that may have failed midway."""
        reshard_all(module)
        _lightning.materialize(module, self.root_device)
        if self.options.sync_module_states:
            synchronize_replicas(module, self.device_mesh)
        earlier, now = sharded_with(module), (self.options, self.precision_plugin.policy)
        if earlier is None and self.options.chooses_modules:
            rank_zero_warn(
                f"{type(module).__name__} calls fully_shard itself, so the auto_wrap_policy and "
                f"activation_checkpointing_policy of the strategy are not used."
            )
        elif earlier is not None and earlier != now:
            rank_zero_warn(
                f"{type(module).__name__} was sharded in an earlier run with {earlier} and stays so, although now "
                f"{now} is asked for. Create the model anew to change it."
            )

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        if self._offloads:
            move_all_but_parameters(self.lightning_module, self.root_device)
            _lightning.publish_device(self.lightning_module, self.root_device)
        else:
            self.lightning_module.to(self.root_device)

    @property
    def _offloads(self) -> bool:
        return self.options.cpu_offload and self.root_device.type != "cpu"

    @override
    def _get_process_group_backend(self) -> str:
        """Offloaded gradients are clipped on the CPU, which NCCL cannot do."""
        if self._process_group_backend is None and self._offloads:
            return f"cpu:gloo,{self.root_device.type}:{super()._get_process_group_backend()}"
        return super()._get_process_group_backend()

    # --- steps ---------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.enter(Section.TRAIN_STEP)
        with self.precision_plugin.train_step_context():
            output = self._run_step("training_step", *args, **kwargs)
        self.note_output(output)
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.enter(Section.VALIDATION)
        with self.precision_plugin.val_step_context():
            return self._run_step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._run_step("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._run_step("predict_step", *args, **kwargs)

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        step = partial(getattr(module, name), *args, **kwargs)
        return self._steps.run(module, step) if isinstance(module, FSDPModule) else step()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self._steps.before_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._steps.after_backward()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        self._steps.before_optimizer_step()
        update = Update(optimizer, closure)
        with update.errors_explained():
            result = super().optimizer_step(optimizer, update, model, **kwargs)
        assert self.model is not None
        self._steps.after_optimizer_step(self.model)
        return result

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank without communication."""
        modules = self._fsdp_modules()
        for module in modules:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.set_requires_gradient_sync(True, recurse=False)

    @override
    def drop_interrupted_batch(self) -> None:
        self._steps.reset()
        super().drop_interrupted_batch()

    @override
    def why_not_with(self, world_size: int) -> str:
        if sharded_with(self._module) is None:
            return f"{type(self._module).__name__} calls fully_shard itself, so it cannot be sharded anew"
        if self.options.tensor_parallel_size > 1:
            return "with tensor_parallel_size more than 1 the model cannot be sharded anew"
        if not self._module.strict_loading:
            return "with strict_loading=False a checkpoint may not hold all parameters"
        try:
            options_with_fewer(self.options, before=self.world_size, now=world_size, num_nodes=self.num_nodes)
        except ConfigurationError as error:
            return str(error)
        return ""

    @override
    def _shard_again(self, world: World) -> None:
        module, now = self._module, world.size
        self.options = options_with_fewer(self.options, before=world.before, now=now, num_nodes=self.num_nodes)
        plan = plan_mesh(self.options, world_size=now, num_nodes=self.num_nodes)
        self._meshes = process_wide().meshes(plan, self.root_device.type)
        self._device_mesh = self._meshes.job
        _lightning.publish_mesh(module, self._device_mesh)
        reshard_all(module)
        replaced = shard_again(module, self.options, meshes=self._meshes, device=self.root_device)
        for optimizer in self.optimizers:
            follow(_lightning.unwrapped(optimizer), replaced)

    # --- state ---------------------------------------------------------------------------------------------

    def reshard_all(self) -> None:
        """Put back the sharded parameters everywhere, so that reading the model's state sees them. Local."""
        assert self.model is not None
        reshard_all(self.model)

    @override
    def on_validation_end(self) -> None:
        self.reshard_all()

    @override
    def on_test_end(self) -> None:
        self.reshard_all()

    @override
    def on_predict_end(self) -> None:
        self.reshard_all()

    def _fsdp_modules(self) -> list[FSDPModule]:
        assert self.model is not None
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]


def _refuse_averaging(trainer: Trainer) -> None:
    if callbacks := _lightning.averaging_callbacks(trainer):
        raise ConfigurationError(
            f"{callbacks[0]} averages weights in a whole copy of the model, which cannot take sharded parameters. Leave"
            f" the callback out, or train with DDP, which AsyncCheckpointIO works with too."
        )


def _is_sharded_type(state_dict_type: str) -> bool:
    if state_dict_type not in ("sharded", "full"):
        raise ConfigurationError(f'state_dict_type={state_dict_type!r} must be "sharded" or "full".')
    return state_dict_type == "sharded"


def _duration(timeout: timedelta | float | None) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        duration = timeout
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        duration = timedelta(seconds=timeout)
    else:
        raise ConfigurationError(f"timeout={timeout!r} must be a number of seconds or a timedelta.")
    if duration is not None and duration <= timedelta(0):
        raise ConfigurationError(f"timeout={timeout!r} must be longer than nothing.")
    return duration


_lightning.ask_about_precision()
StrategyRegistry.register(
    "resilient_fsdp",
    ResilientFSDPStrategy,
    description="FSDP2 that keeps training through faults (lightning_resilience)",
    override=True,  # a reload of this module is no error
)
