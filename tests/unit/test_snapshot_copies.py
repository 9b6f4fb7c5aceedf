"""Copies beside training, on a device whose queues are lists: what was queued happens when somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_resilience.checkpoint.snapshots.copies import Copies


class FakeLane:
    """Copies only when it is waited for, and writes down what it was asked."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._queued: list[Callable[[], None]] = []

    def run(self, copy: Callable[[], None]) -> None:
        self._log.append("run")
        self._queued.append(copy)

    def hold_back(self) -> None:
        self._log.append("hold back")
        self._work()

    def is_done(self) -> bool:
        return not self._queued

    def wait(self) -> None:
        self._log.append("wait")
        self._work()

    def _work(self) -> None:
        while self._queued:
            self._queued.pop(0)()


def start(copies: Copies) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    weight, weight_slot = torch.full((4,), 1.0), torch.zeros(4)
    buffer, buffer_slot = torch.full((2,), 1.0), torch.zeros(2)
    copies.start([(weight_slot, weight)], [(buffer_slot, buffer)])
    return weight, weight_slot, buffer, buffer_slot


def test_on_a_device_with_lanes_the_update_waits_and_forward_does_not() -> None:
    log: list[str] = []
    copies = Copies(lambda device: FakeLane(log), can_overlap=lambda device: True)
    weight, weight_slot, buffer, buffer_slot = start(copies)
    assert log == ["run"]
    assert not copies.are_done()
    buffer += 1  # forward changes a buffer ...
    assert weight_slot.eq(0).all()
    copies.hold_back()
    weight += 1  # ... and the update a parameter
    assert copies.are_done()
    copies.finish()
    assert weight_slot.eq(1).all()
    assert buffer_slot.eq(1).all()
    assert log == ["run", "hold back", "wait"]


def test_without_lanes_everything_is_there_at_once() -> None:
    def no_lane(device: torch.device) -> FakeLane:
        raise AssertionError("a lane was made")

    copies = Copies(no_lane)  # on a CPU
    weight, weight_slot, buffer, buffer_slot = start(copies)
    weight += 1
    buffer += 1
    assert copies.are_done()
    copies.hold_back()
    copies.finish()
    assert weight_slot.eq(1).all()
    assert buffer_slot.eq(1).all()


def test_a_lane_is_used_again_for_the_next_snapshot() -> None:
    lanes: list[FakeLane] = []

    def make(device: torch.device) -> FakeLane:
        lanes.append(FakeLane([]))
        return lanes[-1]

    copies = Copies(make, can_overlap=lambda device: True)
    for _ in range(3):
        start(copies)
        copies.finish()
        copies.hold_back()  # nothing is left to wait for
    assert len(lanes) == 1
