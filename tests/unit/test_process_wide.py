"""One set of groups, meshes and connections a process, for as long as its default process group lives."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import cast

import pytest
import torch.distributed as dist

from lightning_resilience import process_wide as module
from lightning_resilience._torch_groups import ClosedGroups, watch_groups
from lightning_resilience.process_wide import note_generation, process_wide, process_wide_after, process_wide_moved
from lightning_resilience.restart.control import Control
from lightning_resilience.sharding.mesh import plan_mesh
from lightning_resilience.sharding.options import ShardingOptions


def begin_world() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one."""
    monkeypatch.setattr(module, "_current", None)
    watch_groups()
    begin_world()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_everything_is_made_once() -> None:
    plan = plan_mesh(ShardingOptions(), world_size=1, num_nodes=1)
    shared, minute = process_wide(), timedelta(minutes=1)
    exchange, meshes = shared.exchange(minute), shared.meshes(plan, "cpu")
    assert process_wide() is shared
    assert (shared.exchange(minute), shared.meshes(plan, "cpu")) == (exchange, meshes)
    assert shared.all_exchanges == [exchange]
    assert shared.exchange(timedelta(minutes=2)) is not exchange


def test_groups_that_were_made_again_are_the_same_set() -> None:
    shared = process_wide()
    exchange = shared.exchange(None)
    closed = ClosedGroups()
    groups = closed.make_again(dist.HashStore(), closed.members)  # type: ignore[attr-defined]  # not in __all__
    assert process_wide_after(groups) is shared is process_wide()
    assert exchange.group in groups.values()


def test_the_control_store_goes_on_with_fewer_ranks_and_nothing_else_does() -> None:
    shared, control = process_wide(), cast("Control", object())
    shared.control, shared.generation = control, 3
    exchange = shared.exchange(None)
    for _ in range(2):  # a move may have to be made again
        dist.destroy_process_group()
        begin_world()
        moved = process_wide_moved()
        assert moved is process_wide() is not shared
        assert (moved.control, moved.generation) == (control, 3)
        assert moved.exchange(None) is not exchange


def test_another_job_in_the_same_process_has_nothing_of_the_one_before() -> None:
    process_wide().control = cast("Control", object())
    dist.destroy_process_group()
    note_generation(7)  # at the end of a `fit` whose groups are gone
    begin_world()
    assert (process_wide().control, process_wide().generation) == (None, 0)
