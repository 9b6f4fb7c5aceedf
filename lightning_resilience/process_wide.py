"""What all strategies of a process share for as long as its default process group lives.

Process groups, meshes and the control store cannot be closed one by one, as other ranks may still use them; made anew
for every strategy they would pile up, and every restart would make all of them again.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from lightning_resilience._torch_groups import Groups
from lightning_resilience.checkpoint.exchange import GroupExchange
from lightning_resilience.restart.control import Control
from lightning_resilience.sharding.mesh import Meshes, MeshPlan, build_meshes


class ProcessWide:
    """All ranks make, use and change theirs in the same order.

    Attributes:
        control: The control store, once it is open.
        generation: The number of the next generation in it.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = world
        self.control: Control | None = None
        self.generation = 0
        self._exchanges: dict[timedelta | None, GroupExchange] = {}
        self._meshes: dict[tuple[MeshPlan, str], Meshes] = {}

    def exchange(self, timeout: timedelta | None) -> GroupExchange:
        """A gloo group of all ranks. A collective."""
        if timeout not in self._exchanges:
            self._exchanges[timeout] = GroupExchange(dist.new_group(backend="gloo", timeout=timeout))
        return self._exchanges[timeout]

    def meshes(self, plan: MeshPlan, device_type: str) -> Meshes:
        """The meshes for a plan. A collective."""
        key = plan, device_type
        if key not in self._meshes:
            self._meshes[key] = build_meshes(plan, device_type)
        return self._meshes[key]

    @property
    def all_exchanges(self) -> list[GroupExchange]:
        """Those made so far."""
        return list(self._exchanges.values())

    @property
    def all_meshes(self) -> list[Meshes]:
        """Those made so far."""
        return list(self._meshes.values())


_current: ProcessWide | None = None


def process_wide() -> ProcessWide:
    """Of the default process group that there is now."""
    global _current
    world = dist.group.WORLD
    assert world is not None
    if _current is None or _current.world is not world:
        _current = ProcessWide(world)
    return _current


def process_wide_after(groups: Groups) -> ProcessWide:
    """The same after process groups were made again: it goes on with the new ones."""
    assert _current is not None
    _current.world = groups[_current.world]
    for exchange in _current.all_exchanges:
        exchange.group = groups[exchange.group]
    return _current


def process_wide_moved() -> ProcessWide:
    """The same with fewer ranks and their new default group: the control store goes on, all else is made anew."""
    assert _current is not None
    earlier, moved = _current, process_wide()
    moved.control, moved.generation = earlier.control, earlier.generation
    return moved


def note_generation(number: int) -> None:
    """The next `fit` begins with this generation. Called whatever has become of the default process group."""
    assert _current is not None
    _current.generation = number
