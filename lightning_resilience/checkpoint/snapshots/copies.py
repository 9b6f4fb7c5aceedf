"""How a state gets into its slot: at once, or on a GPU beside the next forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lightning_resilience._torch import cuda_in_use, foreach_copy
from lightning_resilience.checkpoint.staging import copy_all

Pair = tuple[torch.Tensor, torch.Tensor]
"""Destination and source."""


class Lane(Protocol):
    """A stream beside the one that trains, on one device. All methods are called by the training thread.

    Order: ``run``, then ``hold_back`` any number of times, then ``wait``; and again.
    """

    def run(self, copy: Callable[[], None]) -> None:
        """Queue a copy behind what training has queued so far; returns at once."""
        ...

    def hold_back(self) -> None:
        """What training queues from now on waits for the copy; the host does not."""
        ...

    def is_done(self) -> bool:
        """Whether the bytes are there."""
        ...

    def wait(self) -> None:
        """Wait until they are."""
        ...


class CudaLane:
    """A CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def run(self, copy: Callable[[], None]) -> None:
        """See :class:`Lane`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
        self._done.record(self._stream)

    def hold_back(self) -> None:
        """See :class:`Lane`."""
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def is_done(self) -> bool:
        """See :class:`Lane`."""
        try:
            return bool(self._done.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # the device has failed for good: it never will be
            return False

    def wait(self) -> None:
        """See :class:`Lane`."""
        self._done.synchronize()


class Copies:
    """The copy of one state. Owned by the snapshot engine of one rank.

    Args:
        lane: Makes the lane of a device.
        can_overlap: Whether tensors on this device can be copied beside training.
    """

    def __init__(
        self,
        lane: Callable[[torch.device], Lane] = CudaLane,
        can_overlap: Callable[[torch.device], bool] = lambda device: device.type == "cuda" and cuda_in_use(),
    ) -> None:
        self._make_lane = lane
        self._can_overlap = can_overlap
        self._lanes: dict[torch.device, Lane] = {}
        self._running: list[Lane] = []
        self._sources: list[torch.Tensor] = []

    def start(self, steady: Sequence[Pair], changing: Sequence[Pair]) -> None:
        """Begin to copy.

        Args:
            steady: What no one changes before the next optimizer update: may be copied later.
            changing: What forward may change: copied when this returns, on a GPU to a place beside it, in the order
                of its stream, so that nobody waits.
        """
        later = [pair for pair in steady if self._can_overlap(pair[1].device)]
        later += [(target, source.clone()) for target, source in changing if self._can_overlap(source.device)]
        now = [pair for pair in (*steady, *changing) if not self._can_overlap(pair[1].device)]
        for device in {source.device for _, source in later}:
            self._queue(device, [pair for pair in later if pair[1].device == device])
        copy_all([target for target, _ in now], [source for _, source in now])

    def hold_back(self) -> None:
        """To be called before an optimizer update is queued: it waits for the copies."""
        for lane in self._running:
            lane.hold_back()

    def anew(self) -> Copies:
        """Another one of the same kind."""
        return Copies(self._make_lane, self._can_overlap)

    def are_done(self) -> bool:
        """Whether everything is there."""
        return all(lane.is_done() for lane in self._running)

    def finish(self) -> None:
        """Wait until everything is there."""
        for lane in self._running:
            lane.wait()
        self._running, self._sources = [], []

    def _queue(self, device: torch.device, pairs: Sequence[Pair]) -> None:
        lane = self._lanes.get(device) or self._make_lane(device)
        self._lanes[device] = lane
        targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
        self._sources.extend(sources)  # memory that is freed meanwhile could be given to another tensor
        self._running.append(lane)
        lane.run(lambda: foreach_copy(targets, sources, non_blocking=True))
