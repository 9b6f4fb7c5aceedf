"""The control store: how ranks learn of faults, and how they meet.

A `TCPStore` of its own, so that ending the connections of process groups leaves it alone. Rank 0 serves it from a
thread in C++ that needs no GIL. Keys begin with the number of the generation, which counts restarts: nothing that an
earlier generation left behind can be mistaken for news.

A store client answers one call at a time: whoever waits on it blocks all others. So each thread has its own.
"""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta

import torch.distributed as dist

from lightning_resilience._torch_groups import (
    Descriptor,
    PrefixStore,
    Store,
    TCPStore,
    cut_socket,
    open_sockets,
    peer_port,
    protect_port,
)
from lightning_resilience.restart.policy import Fault
from lightning_resilience.restart.reports import Report, Standing, fault_from_json, fault_to_json

OVER = "over"
_FOREVER = timedelta(days=365)
_PORT_KEY = "lightning_resilience/control_port/{}"
_opened: list[TCPStore] = []
"""Process groups made after a restart find each other in them, and may outlive whoever asked for the restart."""


class Generation:
    """One thread's view of the control store between two restarts."""

    def __init__(self, store: Store, number: int, rank: int, world_size: int) -> None:
        self._store = PrefixStore(f"generation/{number}", store)
        self._rank = rank
        self._ranks = range(world_size)

    # --- faults

    def raise_alarm(self, fault: Fault) -> None:
        """Tell all ranks of a fault. The first fault of a generation is the one they hear of."""
        self._store.compare_set("alarm", "", fault_to_json(fault))

    def wait_for_alarm(self) -> Fault | None:
        """Until a rank has a fault; None when the generation ends without one."""
        self._store.wait(["alarm"], _FOREVER)
        text = self._store.get("alarm").decode()
        return None if text == OVER else fault_from_json(text)

    def call_late(self, *, late: bool) -> None:
        """Say that this rank makes no progress, or that it does again."""
        self._store.add("late", 1 if late else -1)

    def all_late(self) -> bool:
        """Whether no rank makes progress."""
        return bool(self._store.add("late", 0) == len(self._ranks))

    def finish(self) -> None:
        """This rank is done. When all are, the generation is over."""
        if self._store.add("finished", 1) == len(self._ranks):
            self._store.compare_set("alarm", "", OVER)

    # --- meetings; each returns what all ranks say, or raises `dist.DistStoreError` when one does not come in time

    def stand(self, standing: Standing, timeout_s: float) -> list[Standing]:
        """Tell how far this rank is, before anything is interrupted."""
        answers = self._exchange("stand", f"{standing.step} {standing.stage}", timeout_s)
        return [Standing(step=int(step), stage=int(stage)) for step, stage in map(str.split, answers)]

    def settle(self, timeout_s: float) -> None:
        """Tell that this rank is as far as the others."""
        self._exchange("settled", "", timeout_s)

    def report(self, report: Report, timeout_s: float) -> list[Report]:
        """Meet after everything has stopped."""
        return [Report.from_json(text) for text in self._exchange("report", report.to_json(), timeout_s)]

    def report_present(self, report: Report, timeout_s: float) -> list[Report]:
        """The same, of those that come in time: who that is says rank 0, so that all know the same.

        This rank is not among them if it came too late.
        """
        keys = [f"report/{rank}" for rank in self._ranks]
        self._store.set(keys[self._rank], report.to_json())
        if self._rank == 0:
            with contextlib.suppress(dist.DistStoreError):
                self._store.wait(keys, timedelta(seconds=timeout_s))
            self._store.set("present", json.dumps([key for key in keys if self._store.check([key])]))
        self._store.wait(["present"], timedelta(seconds=2 * timeout_s))
        present = json.loads(self._store.get("present"))
        return [Report.from_json(value) for value in self._store.multi_get(present)]

    def _exchange(self, topic: str, text: str, timeout_s: float) -> list[str]:
        keys = [f"{topic}/{rank}" for rank in self._ranks]
        self._store.set(keys[self._rank], text)
        self._store.wait(keys, timedelta(seconds=timeout_s))
        return [value.decode() for value in self._store.multi_get(keys)]


class Control:
    """A connection to the control store, of one thread.

    Args:
        store: The connection.
        rank: This rank.
        world_size: How many ranks there are.
    """

    def __init__(self, store: TCPStore, rank: int, world_size: int) -> None:
        self._store = store
        self._sockets: list[Descriptor] = []
        self.rank = rank
        self.world_size = world_size

    def another(self) -> Control:
        """A connection for another thread. Called by the main thread."""
        before = set(open_sockets())
        other = Control(_connect(self._store.host, self._store.port), self.rank, self.world_size)
        made = [item for item in open_sockets() if item not in before]
        other._sockets = [item for item in made if peer_port(item) == self._store.port]
        return other

    def renumber(self, rank: int, world_size: int) -> None:
        """From the next generation on this is another rank of fewer."""
        self.rank, self.world_size = rank, world_size

    def disconnect(self) -> None:
        """End the connection: whoever waits on it gets a `dist.DistError`."""
        for item in self._sockets:
            cut_socket(item)

    def generation(self, number: int) -> Generation:
        """The keys of one generation."""
        return Generation(self._store, number, self.rank, self.world_size)

    def store_for_groups(self, attempt: int) -> Store:
        """Where process groups find each other; nobody has used it before."""
        return PrefixStore(f"groups/{attempt}", self._store)


def open_control(first: Store, rank: int, world_size: int, host: str) -> Control:
    """Rank 0 starts to serve the store, the others connect to it. All ranks call it.

    Args:
        first: A store that all ranks share already, to pass on the port.
        rank: This rank.
        world_size: How many ranks there are.
        host: Address of rank 0's node.
    """
    key = _PORT_KEY.format(len(_opened))
    if rank == 0:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        first.set(key, str(store.port))
    else:
        store = _connect(host, int(first.get(key).decode()))
    _opened.append(store)
    protect_port(store.port)
    return Control(store, rank, world_size)


def _connect(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False)
