"""Every private name of torch and Lightning that restarts rely on. A failure here names what has moved."""

from __future__ import annotations

import inspect
import pickle
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch._C._distributed_c10d import HashStore, _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_resilience import _lightning, _torch, _torch_groups
from lightning_resilience.data.keeping import Copies, keep_dict
from lightning_resilience.sharding.blueprint import Blueprint


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """A process group of one."""
    _torch_groups.watch_groups()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def mesh(world: dist.ProcessGroup) -> DeviceMesh:
    return init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))


def remake() -> dict[dist.ProcessGroup, dist.ProcessGroup]:
    return _torch_groups.ClosedGroups().make_again(HashStore(), _torch_groups.live_names())


def test_groups_are_made_again_under_their_names(world: dist.ProcessGroup) -> None:
    mine = dist.new_group([0], backend="gloo", group_desc="mine")
    names = [group.group_name for group in _torch_groups.live_groups()]
    new = remake()
    assert list(new) == [world, mine]
    assert [group.group_name for group in _torch_groups.live_groups()] == names
    assert dist.group.WORLD is new[world]
    assert new[mine].group_desc == "mine"
    assert _resolve_process_group(mine.group_name) is new[mine]
    assert dist.get_process_group_ranks(new[mine]) == [0]
    dist.all_reduce(torch.ones(1), group=new[mine])
    assert dist.new_group([0]).group_name not in names


def test_what_is_put_back_later_holds_the_groups_of_today(world: dist.ProcessGroup) -> None:
    """A commit is older than the groups that a restart makes, and with two faults in a row by two restarts."""
    mine = dist.new_group([0], backend="gloo")
    table = {"mine": mine, "several": [mine, world], "by_name": {"pair": (mine, 1)}}
    put_back = keep_dict(table, Copies())
    remake()
    again = remake()
    new_world, new = again.values()
    put_back()
    assert table == {"mine": new, "several": [new, new_world], "by_name": {"pair": (new, 1)}}
    remake()
    assert _torch_groups.group_of_today(new) is not new


def test_groups_older_than_the_watch_are_made_again(world: dist.ProcessGroup) -> None:
    mine = dist.new_group([0], backend="gloo", timeout=timedelta(seconds=77), group_desc="mine")
    assert _torch_groups.groups_that_cannot_be_cut() == []
    _torch_groups._records.clear()
    assert _torch_groups.groups_that_cannot_be_cut() == [world.group_name, mine.group_name]
    new = remake()
    assert [group.group_name for group in new.values()] == [world.group_name, mine.group_name]
    assert dist.group.WORLD is new[world]
    (backend,) = {id(b): b for b in _torch_groups.device_backends(new[mine])}.values()
    assert getattr(backend, "options")._timeout == timedelta(seconds=77)  # noqa: B009
    assert new[mine].group_desc == "mine"
    dist.all_reduce(torch.ones(1), group=new[mine])


def test_what_is_known_of_closed_groups_is_forgotten(world: dist.ProcessGroup) -> None:
    for _ in range(3):
        dist.destroy_process_group(dist.new_group([0], backend="gloo"))
    dist.new_group([0], backend="gloo")
    assert len(_torch_groups._records) == 2


def test_groups_that_are_not_wanted_are_closed(world: dist.ProcessGroup) -> None:
    dist.new_group([0], backend="gloo")
    assert list(_torch_groups.ClosedGroups().make_again(HashStore(), [])) == [world]
    assert len(_torch_groups.live_groups()) == 1


def test_a_blueprint_undoes_sharding(mesh: DeviceMesh) -> None:
    first = nn.Linear(2, 2)
    model = nn.Sequential(first, nn.Linear(2, 1))
    weight, values = first.weight, first.weight.detach().clone()
    blueprint = Blueprint(model, with_memory=True)
    for _ in range(2):
        model.append(nn.Linear(1, 1))
        weight.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]  # torch
        fully_shard(model, mesh=mesh)
        assert first.weight is not weight
        blueprint.put_back()
        assert type(model) is nn.Sequential
        assert list(model) == [first, model[1]]
        assert first.weight is weight
        assert torch.equal(weight, values)
        assert _torch.gradient_hooks(weight) is None
        assert not _torch.is_composed(model)


def test_a_blueprint_of_a_sharded_model_keeps_it_sharded(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=mesh)
    assert isinstance(model, nn.Sequential)
    sharded = model[0].weight
    blueprint = Blueprint(model, with_memory=False)
    model[0] = nn.Linear(2, 2)
    blueprint.put_back()
    assert model[0].weight is sharded
    assert isinstance(model, FSDPModule)
    model(torch.ones(1, 2)).sum().backward()


def test_a_mesh_finds_its_new_group(world: dist.ProcessGroup, mesh: DeviceMesh) -> None:
    new = remake()
    _torch_groups.show_new_groups(new, [mesh], None)
    assert mesh.get_group() is new[world]
    assert list(getattr(mesh, "_pg_registry", {"": new[world]}).values()) == [new[world]]


def test_fsdp_trains_on_with_new_groups(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Linear(2, 2), mesh=mesh)
    assert isinstance(model, nn.Linear)
    model(torch.ones(1, 2))  # interrupted here
    assert _torch.is_gathered(model)
    _torch.forget_interrupted_batch(model)
    assert not _torch.is_gathered(model)
    new = remake()
    _torch_groups.show_new_groups(new, _torch_groups.fsdp_meshes(model), model)
    (group,) = _torch.parameter_groups(model)
    assert group.mesh_info.shard_process_group in new.values()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_what_is_forgotten_of_a_batch(mesh: DeviceMesh) -> None:
    """A field that torch renames would keep its value from the interrupted batch."""
    model = fully_shard(nn.Linear(2, 2), mesh=mesh)
    assert isinstance(model, FSDPModule)
    state, (group,) = model._get_fsdp_state(), _torch.parameter_groups(model)
    assert not [name for name in _torch._IDLE_GROUP if not hasattr(group, name)]
    assert not [name for name in _torch._IDLE_STATE if not hasattr(state, name)]
    assert not [name for name in _torch._IDLE_CONTEXT if not hasattr(state._state_ctx, name)]
    known = {"all_gather_state", "post_forward_order"} | {
        n for n in vars(state._comm_ctx) if "reduce_scatter_state" in n
    }
    assert known <= set(_torch._IDLE_COMMUNICATION)


def test_what_a_group_is_made_of(world: dist.ProcessGroup) -> None:
    assert all(item.is_open() for item in _torch_groups.group_sockets())
    assert _torch_groups.groups_that_cannot_be_cut() == []
    assert {type(backend).__name__ for backend in _torch_groups.device_backends(world)} == {"ProcessGroupGloo"}


# --- Lightning -----------------------------------------------------------------------------------------------


def test_the_end_of_a_batch_is_as_lightning_does_it() -> None:
    """`ResumableEpochLoop._finish_batch` repeats the end of `advance`."""
    source = inspect.getsource(_TrainingEpochLoop.advance)
    end = source[source.index("self.batch_progress.increment_processed()") :]
    calls = [
        'update_lr_schedulers("step", update_plateau_schedulers=False)',
        "if self._num_ready_batches_reached():",
        'update_lr_schedulers("epoch", update_plateau_schedulers=False)',
        '_call_callback_hooks(trainer, "on_train_batch_end", batch_output, batch, batch_idx)',
        '_call_lightning_module_hook(trainer, "on_train_batch_end", batch_output, batch, batch_idx)',
        "trainer._logger_connector.on_batch_end()",
        "self.batch_progress.increment_completed()",
        "trainer._logger_connector.update_train_step_metrics()",
    ]
    places = [end.index(call) for call in calls]
    assert places == sorted(places)


def test_lightning_broadcasts_for_sigterm_where_we_take_it_out() -> None:
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._sigterm_notifier_fn" in inspect.getsource(_SignalConnector.register_signal_handlers)
    assert "self.trainer.received_sigterm" in inspect.getsource(_TrainingEpochLoop.on_advance_end)
    assert SIGTERMException(143).code == 143


def test_sigterm_is_noticed_and_passed_on_once() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    passed_on: list[int] = []

    class Launcher(_Launcher):
        is_interactive_compatible = True

        def launch(self, *_: Any, **__: Any) -> None: ...

        def kill(self, signum: Any) -> None:
            passed_on.append(signum)

    trainer.strategy._launcher = Launcher()
    _lightning.notice_sigterm(trainer)
    connector = trainer._signal_connector
    for _ in range(2):
        connector._sigterm_notifier_fn(15, None)  # type: ignore[arg-type]  # no frame
    assert connector.received_sigterm
    assert passed_on == [15]


def test_the_closure_of_an_update() -> None:
    assert "_wrap_closure" in inspect.getsource(Precision.optimizer_step)


def test_what_loops_remember() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    loops = _lightning.all_loops(trainer.fit_loop)
    assert trainer.fit_loop.epoch_loop.val_loop in loops
    assert trainer.fit_loop.epoch_loop.manual_optimization in loops
    trackers = _lightning.progress_trackers(trainer.fit_loop)
    assert trainer.fit_loop.epoch_loop.batch_progress.total in trackers
    assert trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total in trackers
    assert {"_callback_metrics", "_logged_metrics", "_first_loop_iter"} <= _lightning.connector_attributes(
        trainer
    ).keys()
    assert _lightning.training_results(trainer) is not _lightning.evaluation_results(trainer)


def test_groups_count_their_collectives(world: dist.ProcessGroup) -> None:
    name = f"{world.group_name} (default_pg)"
    before = _torch_groups.collectives_begun()[name]
    dist.all_reduce(torch.ones(1))
    assert _torch_groups.collectives_begun() == {name: before + 1}


def test_the_flight_recorder_is_asked_only_when_switched_on(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE", raising=False)
    assert _torch_groups.flight_record() is None
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")
    assert _torch_groups.flight_record() is None
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    record = _torch_groups.flight_record()
    assert record is not None
    assert {"entries", "version", "pg_config"} <= pickle.loads(record).keys()
