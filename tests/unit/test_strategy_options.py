"""What the strategy accepts, refuses, and how `Trainer` and LightningCLI reach it. No processes."""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch import nn

import lightning_resilience
from lightning_resilience import RestartPolicy
from lightning_resilience.errors import ConfigurationError
from lightning_resilience.precision import ShardedHalfPrecision, ShardedMixedPrecision, ShardedPrecision
from lightning_resilience.restart.health import FreeSpace
from lightning_resilience.sharding.options import ShardingOptions
from lightning_resilience.strategy import ResilientFSDPStrategy


def trainer(strategy: Any, **kwargs: Any) -> L.Trainer:
    return L.Trainer(
        strategy=strategy,
        **{"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False, **kwargs},
    )


# --- arguments ---------------------------------------------------------------------------------------------


def test_defaults() -> None:
    strategy = ResilientFSDPStrategy()
    assert strategy.options == ShardingOptions()
    assert strategy.options.auto_wrap_policy == "auto"
    assert strategy.options.sync_module_states
    assert strategy._save_distributed_checkpoint
    assert strategy._timeout == timedelta(minutes=30)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharding_strategy": "ZERO3"}, "'ZERO3' is unknown. Choose one of FULL_SHARD, SHARD_GRAD_OP"),
        ({"device_mesh": (2, 2)}, r"device_mesh=\(2, 2\) needs sharding_strategy='HYBRID_SHARD'"),
        ({"device_mesh": (2, 2, 2), "sharding_strategy": "HYBRID_SHARD"}, "must be a pair"),
        ({"device_mesh": 4, "sharding_strategy": "HYBRID_SHARD"}, "must be a pair"),
        ({"device_mesh": (0, 2), "sharding_strategy": "HYBRID_SHARD"}, "takes positive whole numbers, not 0"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size takes positive whole numbers, not 0"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size takes positive whole numbers, not True"),
        ({"cpu_offload": "yes"}, "cpu_offload='yes' must be True or False"),
        ({"sync_module_states": None}, "sync_module_states=None must be True or False"),
        ({"state_dict_type": "local"}, "state_dict_type='local' must be"),
        ({"timeout": 0}, "timeout=0 must be longer than nothing"),
        ({"timeout": timedelta(seconds=-1)}, "must be longer than nothing"),
        ({"timeout": "soon"}, "timeout='soon' must be a number of seconds or a timedelta"),
        ({"auto_wrap_policy": "all"}, "auto_wrap_policy='all' is not a wrap policy"),
        ({"activation_checkpointing_policy": [3]}, "activation_checkpointing_policy holds 3"),
        ({"precision_plugin": MixedPrecision("16-mixed", "cpu")}, "precision='16-mixed' does not work"),
    ],
)
def test_arguments_are_checked_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ResilientFSDPStrategy(**arguments)


def test_arguments_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        ResilientFSDPStrategy("FULL_SHARD")  # type: ignore[call-arg, arg-type]  # that is the point


@pytest.mark.parametrize("timeout", [90, 90.0, timedelta(seconds=90)])
def test_a_timeout_is_seconds_or_a_timedelta(timeout: Any) -> None:
    assert ResilientFSDPStrategy(timeout=timeout)._timeout == timedelta(seconds=90)


def test_what_fsdp_strategy_takes_is_taken() -> None:
    """A switch from FSDPStrategy keeps these arguments as they are."""
    shared: dict[str, Any] = {
        "cluster_environment": LightningEnvironment(),
        "checkpoint_io": TorchCheckpointIO(),
        "precision_plugin": FSDPPrecision("bf16-mixed"),
        "parallel_devices": [torch.device("cpu")] * 2,
        "process_group_backend": "gloo",
        "timeout": timedelta(seconds=5),
        "cpu_offload": False,
        "auto_wrap_policy": {nn.Linear},
        "activation_checkpointing_policy": {nn.Linear},
        "sharding_strategy": "HYBRID_SHARD",
        "state_dict_type": "full",
        "device_mesh": (1, 2),
    }
    FSDPStrategy(**shared)
    strategy = ResilientFSDPStrategy(**shared)
    assert not strategy._save_distributed_checkpoint
    assert strategy.cluster_environment is shared["cluster_environment"]
    assert strategy.checkpoint_io is shared["checkpoint_io"]
    assert strategy.parallel_devices == shared["parallel_devices"]
    assert strategy.process_group_backend == "gloo"
    assert strategy.options.device_mesh == (1, 2)
    assert type(strategy.precision_plugin) is ShardedMixedPrecision


# --- precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["resilient_fsdp", None])
@pytest.mark.parametrize(
    ("precision", "plugin"),
    [
        ("32-true", ShardedPrecision),
        (None, ShardedPrecision),
        ("bf16-true", ShardedHalfPrecision),
        ("bf16-mixed", ShardedMixedPrecision),
    ],
)
def test_precisions_that_work(strategy: str | None, precision: Any, plugin: type[Precision]) -> None:
    made = trainer(strategy or ResilientFSDPStrategy(), precision=precision)
    assert type(made.precision_plugin) is plugin
    assert made.precision == (precision or "32-true")


@pytest.mark.parametrize(
    ("precision", "reason"),
    [
        ("16-mixed", "float16 needs a loss scale"),
        ("16-true", "float16 needs a loss scale"),
        ("64-true", "not been tried"),
        ("transformer-engine", "not been tried"),
    ],
)
@pytest.mark.parametrize("strategy", ["resilient_fsdp", None])
def test_precisions_that_do_not(strategy: str | None, precision: Any, reason: str) -> None:
    """Without us Lightning has a list that is not true, no reason, and makes 16-mixed bf16-mixed on a CPU."""
    with pytest.raises(ConfigurationError, match=f'{reason}.*Use "32-true", "bf16-true" or "bf16-mixed"'):
        trainer(strategy or ResilientFSDPStrategy(), precision=precision)


def test_precisions_of_other_strategies_are_lightnings_matter() -> None:
    assert trainer("auto", devices=1, precision="64-true").precision == "64-true"
    with pytest.raises(ValueError, match="`ModelParallelStrategy` does not support"):
        trainer(ModelParallelStrategy(), precision="64-true")


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (MixedPrecision("16-mixed", "cpu"), "float16 needs a loss scale"),
        (HalfPrecision("16-true"), "float16 needs a loss scale"),
        (DoublePrecision(), "The plugin DoublePrecision does not work .* not been tried"),
    ],
)
def test_a_refused_precision_says_why_and_what_works(plugin: Precision, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f'{message}.*Use "32-true", "bf16-true" or "bf16-mixed"'):
        ResilientFSDPStrategy().precision_plugin = plugin


def test_mixed_precision_is_fsdps() -> None:
    policy = ShardedMixedPrecision().policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    with ShardedMixedPrecision().forward_context():
        assert not torch.is_autocast_enabled("cpu")


# --- devices -----------------------------------------------------------------------------------------------


def test_offloaded_gradients_need_a_cpu_backend_too() -> None:
    cuda = torch.device("cuda", 0)
    environment = LightningEnvironment()
    for arguments, backend in [
        ({}, "nccl"),
        ({"cpu_offload": True}, "cpu:gloo,cuda:nccl"),
        ({"cpu_offload": True, "process_group_backend": "mine"}, "mine"),
    ]:
        strategy = ResilientFSDPStrategy(
            parallel_devices=[cuda],
            cluster_environment=environment,
            **arguments,  # type: ignore[arg-type]
        )
        assert strategy._get_process_group_backend() == backend


def test_on_a_cpu_there_is_nothing_to_offload() -> None:
    strategy = ResilientFSDPStrategy(cpu_offload=True)
    trainer(strategy)
    assert strategy._get_process_group_backend() == "gloo"


# --- names, help and YAML ----------------------------------------------------------------------------------


def test_importing_the_class_registers_the_name() -> None:
    assert lightning_resilience.ResilientFSDPStrategy is ResilientFSDPStrategy
    assert StrategyRegistry["resilient_fsdp"]["strategy"] is ResilientFSDPStrategy
    assert type(trainer("resilient_fsdp").strategy) is ResilientFSDPStrategy


CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  strategy:
    class_path: lightning_resilience.ResilientFSDPStrategy
    init_args:
      auto_wrap_policy: [torch.nn.Linear, torch.nn.TransformerEncoderLayer]
      activation_checkpointing_policy: auto
      sharding_strategy: HYBRID_SHARD
      device_mesh: [1, 2]
      timeout: "0:01:00"
      state_dict_type: full
"""


def from_command_line(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> ResilientFSDPStrategy:
    monkeypatch.setattr("sys.argv", ["train.py", *arguments])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls what jsonargparse renamed
    cli = LightningCLI(L.LightningModule, run=False, save_config_callback=None, seed_everything_default=False)
    assert isinstance(cli.trainer.strategy, ResilientFSDPStrategy)
    return cli.trainer.strategy


def test_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    strategy = from_command_line(monkeypatch, "--config", str(config))
    assert strategy.options == ShardingOptions(
        auto_wrap_policy={nn.Linear, nn.TransformerEncoderLayer},
        activation_checkpointing_policy="auto",
        sharding_strategy="HYBRID_SHARD",
        device_mesh=(1, 2),
    )
    assert strategy._timeout == timedelta(minutes=1)
    assert not strategy._save_distributed_checkpoint


RESTARTS = """
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  strategy:
    class_path: lightning_resilience.ResilientFSDPStrategy
    init_args:
      restart:
        class_path: lightning_resilience.RestartPolicy
        init_args:
          max_restarts: 7
          never_retry: [OSError, torch.OutOfMemoryError]
      health_checks:
        - class_path: lightning_resilience.restart.health.FreeSpace
          init_args:
            directories: [/tmp]
            least_bytes: 5
      hang_timeout: 30
"""


def test_restarts_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(RESTARTS)
    strategy = from_command_line(monkeypatch, "--config", str(config))
    assert strategy.restart == RestartPolicy(max_restarts=7, never_retry=["OSError", "torch.OutOfMemoryError"])
    assert [type(check) for check in strategy._health_checks or ()] == [FreeSpace]
    off = from_command_line(monkeypatch, "--config", str(config), "--trainer.strategy.init_args.restart=null")
    assert off.restart is None


def test_a_policy_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    name, option = "lightning_resilience.ResilientFSDPStrategy", "--trainer.strategy.restart"
    arguments = [f"--trainer.strategy={name}", f"{option}.max_restarts=3", f"{option}.window=60"]
    strategy = from_command_line(monkeypatch, *arguments, "--trainer.accelerator=cpu", "--trainer.logger=false")
    assert strategy.restart == RestartPolicy(max_restarts=3, window=60)


def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "lightning_resilience.ResilientFSDPStrategy"
    arguments = [f"--trainer.strategy={name}", "--trainer.strategy.timeout=90", "--trainer.accelerator=cpu"]
    strategy = from_command_line(monkeypatch, *arguments, "--trainer.devices=2", "--trainer.logger=false")
    assert strategy._timeout == timedelta(seconds=90)
    assert strategy.options == ShardingOptions()


def test_every_argument_is_documented() -> None:
    document = inspect.getdoc(ResilientFSDPStrategy) or ""
    for name in inspect.signature(ResilientFSDPStrategy).parameters:
        assert f"\n    {name}: " in document, name
