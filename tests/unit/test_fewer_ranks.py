"""Decisions about going on with fewer ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_resilience._lightning import PatientObserver
from lightning_resilience.data.dealing import Rest, deal, rest_of, samples_done
from lightning_resilience.errors import ConfigurationError, RankLost
from lightning_resilience.restart.control import Generation
from lightning_resilience.restart.engine import _faults
from lightning_resilience.restart.policy import DropRank, Fault, GiveUp, RespawnRank, RestartPolicy
from lightning_resilience.restart.reports import Meeting, Report, Standing
from lightning_resilience.restart.world import accumulation, why_not_without, world_without
from lightning_resilience.sharding.mesh import options_with_fewer, plan_mesh
from lightning_resilience.sharding.options import ShardingOptions


def test_ranks_are_numbered_without_gaps() -> None:
    world = world_without({2: "gone"}, rank=3, world_size=4)
    assert (world.ranks, world.rank, world.size, world.before) == ((0, 1, 3), 2, 3, 4)
    assert [world.number(rank) for rank in range(4)] == [0, 1, -1, 2]


def test_who_can_be_done_without() -> None:
    assert why_not_without({2: "gone"}, 4, least=3) == ""
    assert "min_world_size=3" in why_not_without({1: "gone", 2: "gone"}, 4, least=3)
    assert "serves the control store" in why_not_without({0: "gone"}, 4, least=1)


@pytest.mark.parametrize(
    ("batches", "before", "now", "expected"),
    [(1, 4, 2, (2, True)), (1, 4, 3, (1, False)), (3, 4, 2, (6, True)), (4, 4, 3, (5, False)), (1, 2, 1, (2, True))],
)
def test_accumulation(batches: int, before: int, now: int, expected: tuple[int, bool]) -> None:
    assert accumulation(batches, before, now) == expected


def lost(rank: int, at_s: float) -> Fault:
    return Fault(kind="lost", rank=rank, step=5, message="the process is gone", at_s=at_s)


def test_policy_drops_what_is_lost_if_it_may() -> None:
    fault = lost(2, at_s=1.0)
    assert isinstance(RestartPolicy().decide(fault, []), GiveUp)
    assert RestartPolicy(min_world_size=1).decide(fault, []) == DropRank(2, "the process is gone")
    assert isinstance(RestartPolicy(min_world_size=1).decide(fault, [], can_respawn=True), RespawnRank)


def test_two_losses_at_the_same_step_are_no_repetition() -> None:
    policy = RestartPolicy(min_world_size=1)
    earlier = [lost(2, at_s=1.0)]
    assert isinstance(policy.decide(lost(1, at_s=2.0), earlier), DropRank)


def test_a_rank_without_a_usable_device_is_dropped() -> None:
    message = "CUDA error: an illegal memory access was encountered"
    fault = Fault(
        kind="exception", rank=1, step=3, types=("builtins.RuntimeError", "builtins.Exception"), message=message
    )
    assert isinstance(RestartPolicy(min_world_size=1).decide(fault, []), DropRank)
    assert isinstance(RestartPolicy().decide(fault, []), GiveUp)


def unhealthy(rank: int) -> Report:
    return Report(rank=rank, standing=Standing(step=3, stage=0), unhealthy=("FreeSpace: full", "Sensor: broken"))


def test_a_rank_that_is_not_fit_is_dropped_and_another_later() -> None:
    own = lost(3, at_s=50.0)
    first, second = _faults(Meeting(reports=[unhealthy(2)], lost=[own]))
    assert first == own
    assert (second.kind, second.rank, second.at_s) == ("unhealthy", 2, 50.0)
    policy = RestartPolicy(min_world_size=1)
    action = policy.decide(second, [])
    assert isinstance(action, DropRank)
    assert "FreeSpace: full; Sensor: broken" in action.reason
    (again,) = _faults(Meeting(reports=[unhealthy(1)]))
    assert isinstance(policy.decide(again, [second]), DropRank)
    assert isinstance(RestartPolicy().decide(second, []), GiveUp)


def test_mesh_of_fewer_ranks() -> None:
    hybrid = ShardingOptions(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
    fewer = options_with_fewer(hybrid, before=4, now=2, num_nodes=1)
    assert fewer.device_mesh == (1, 2)
    with pytest.raises(ConfigurationError, match="multiple of 2 ranks, and 3 are left"):
        options_with_fewer(hybrid, before=4, now=3, num_nodes=1)
    by_node = ShardingOptions(sharding_strategy="HYBRID_SHARD")
    assert options_with_fewer(by_node, before=8, now=4, num_nodes=2).device_mesh == (1, 4)
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        options = ShardingOptions(sharding_strategy=strategy)
        assert options_with_fewer(options, before=4, now=3, num_nodes=1) == options
    assert plan_mesh(fewer, world_size=2, num_nodes=1).replicas == 1


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_rest_of_an_epoch_is_dealt_once(ranks: int, drop_last: bool) -> None:
    order = [7, 3, 9, 1, 0, 8, 2, 5, 6, 4]
    hands = [deal(order, 4, ranks, rank, drop_last=drop_last) for rank in range(ranks)]
    assert len({len(hand) for hand in hands}) == 1
    dealt = [hand[number] for number in range(len(hands[0])) for hand in hands]
    rest = order[4:]
    assert dealt[: len(rest)] == rest[: len(dealt)]
    assert len(dealt) - len(rest) in (range(ranks) if not drop_last else range(-ranks + 1, 1))


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_was_dealt_before_and_the_rest_are_the_epoch(shuffle: bool) -> None:
    data = TensorDataset(torch.arange(24))
    done = []
    for rank in range(4):
        sampler: DistributedSampler[Any] = DistributedSampler(data, 4, rank, shuffle=shuffle, seed=5)
        sampler.set_epoch(3)
        done += list(sampler)[:2]
    rest = []
    for rank in range(2):
        sampler = DistributedSampler(data, 2, rank, shuffle=shuffle, seed=5)
        sampler.set_epoch(3)
        hand = Rest(sampler, 8)
        assert len(hand) == len(list(hand)) == 8
        rest += list(hand)
    assert sorted(done + rest) == list(range(24))


def test_samplers_of_other_kinds_are_left_alone() -> None:
    class Own(DistributedSampler[int]):
        pass

    data = TensorDataset(torch.arange(24))
    assert rest_of(DataLoader(data, batch_size=2), 4) is None
    assert rest_of(DataLoader(data, batch_size=2, sampler=Own(data, 2, 0)), 4) is None
    batches = rest_of(DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 0, shuffle=False)), 4)
    assert next(iter(batches or ())) == [4, 6]


def test_samples_of_an_epoch_are_counted_over_several_dealings() -> None:
    assert samples_done(None, 1, batches=3, batch_size=2, ranks=4) == 24
    dealing = {"epoch": 1, "batches": 6, "samples": 24}
    assert samples_done(dealing, 1, batches=8, batch_size=2, ranks=3) == 36  # type: ignore[arg-type]  # a plain dict
    assert samples_done(dealing, 2, batches=1, batch_size=2, ranks=3) == 6  # type: ignore[arg-type]


def test_rank_0_says_who_is_there() -> None:
    """Whoever comes too late finds out that the others go on without it."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # not in __all__
    reports = [Report(rank=rank, standing=Standing(step=3, stage=0)) for rank in range(3)]
    first, second, late = (Generation(store, 0, rank, 3) for rank in range(3))
    with pytest.raises(dist.DistStoreError):  # it says what it has to, and waits for rank 0
        second.report(reports[1], timeout_s=0.01, without_late=True)
    meeting = first.report(reports[0], timeout_s=0.05, without_late=True)
    assert list(meeting.reports) == reports[:2]
    assert [(fault.kind, fault.rank, fault.step) for fault in meeting.lost] == [("lost", 2, 3)]
    assert second.report(reports[1], timeout_s=0.05, without_late=True) == meeting
    with pytest.raises(RankLost, match="rank 2 has not come within"):
        late.report(reports[2], timeout_s=0.05, without_late=True)


class Process:
    """A process that ends with a code."""

    pid = 7

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, signal: int) -> None:
        self.signals.append(signal)


def test_lightning_ends_the_others_only_when_they_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, signal: killed.append(pid))
    processes, least = [Process() for _ in range(3)], [2]
    observer = PatientObserver(processes, lambda failed: 4 - failed >= least[0])
    processes[0].returncode = -9
    assert not observer._run()
    processes[1].returncode = 1
    assert not observer._run()
    assert not killed
    least[0] = 4  # training is over: nobody is spared any more, but those that were stay so
    assert not observer._run()
    processes[2].returncode = 1
    assert observer._run()
    assert len(killed) == len(processes[2].signals) == 1
