"""The control store: how ranks learn of faults, and how they meet.

A `TCPStore` of its own, so that ending the connections of process groups leaves it alone. Rank 0 serves it from a
thread in C++ that needs no GIL. Keys begin with the number of the generation, which counts restarts: nothing that an
earlier generation left behind can be mistaken for news.

A store client answers one call at a time: whoever waits on it blocks all others. So each thread has its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
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
from lightning_resilience.errors import RankLost
from lightning_resilience.restart.peers import Place
from lightning_resilience.restart.policy import Fault
from lightning_resilience.restart.reports import Meeting, Report, Standing, fault_from_json, fault_to_json
from lightning_resilience.restart.roll import Pulse
from lightning_resilience.restart.witness import Statement

OVER = "over"
_FOREVER = timedelta(days=365)
_LOST = "lost "
_TOPICS = ("stand", "settled", "report")
_PORT_KEY = "lightning_resilience/control_port/{}"
_opened: list[TCPStore] = []
"""Process groups made after a restart find each other in them, and may outlive whoever asked for the restart."""


class Generation:
    """One thread's view of the control store between two restarts."""

    def __init__(self, store: Store, number: int, rank: int, world_size: int) -> None:
        self.number = number
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

    def state(self, statement: Statement) -> None:
        """Say where this rank is, before anything is interrupted."""
        self._store.set(f"statement/{self._rank}", statement.to_json())

    def statements(self) -> list[Statement]:
        """Of the ranks that have made one so far, in their order."""
        keys = [key for rank in self._ranks if self._store.check([key := f"statement/{rank}"])]
        return [Statement.from_json(text) for text in self._store.multi_get(keys)] if keys else []

    def declare_lost(self, fault: Fault) -> None:
        """A rank is gone for good: nobody waits for it in this generation, and it is told, should it come."""
        for topic in _TOPICS:
            self._store.compare_set(f"{topic}/{fault.rank}", "", _LOST + fault_to_json(fault))
        self.raise_alarm(fault)

    # --- meetings; each returns what all ranks say, or raises `dist.DistStoreError` when one does not come in time

    def stand(self, standing: Standing, timeout_s: float) -> list[Standing]:
        """Tell how far this rank is, before anything is interrupted; returns what those say that are not lost."""
        answers, _ = self._exchange("stand", f"{standing.step} {standing.stage}", timeout_s)
        return [Standing(step=int(step), stage=int(stage)) for step, stage in map(str.split, answers)]

    def settle(self, timeout_s: float) -> None:
        """Tell that this rank is as far as the others."""
        self._exchange("settled", "yes", timeout_s)

    def report(self, report: Report, timeout_s: float, *, without_late: bool = False) -> Meeting:
        """Meet after everything has stopped.

        Args:
            report: Of this rank.
            timeout_s: How long to wait for the others.
            without_late: Whoever does not come in time counts as lost. Rank 0 says who that is, so that all know the
                same.

        Raises:
            RankLost: This rank counts as lost.
        """
        if without_late and self._rank == 0:
            self._say("report", report.to_json())
            self._give_up_late(timeout_s, report.standing.step)
        patience_s = 2 * timeout_s if without_late else timeout_s
        answers, lost = self._exchange("report", report.to_json(), patience_s)
        return Meeting(reports=[Report.from_json(text) for text in answers], lost=lost)

    def _give_up_late(self, timeout_s: float, step: int) -> None:
        keys = [f"report/{rank}" for rank in self._ranks]
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            for rank, key in enumerate(keys):
                if not self._store.check([key]):
                    why = f"rank {rank} has not come within {timeout_s:.0f} s after a fault"
                    loss = Fault(kind="lost", rank=rank, step=max(0, step), message=why, at_s=time.time())
                    self.declare_lost(loss)

    def _exchange(self, topic: str, text: str, timeout_s: float) -> tuple[list[str], list[Fault]]:
        """What ranks say, in their order, and which of them are lost: all ranks see the same.

        Raises:
            RankLost: This rank counts as lost.
        """
        self._say(topic, text)
        keys = [f"{topic}/{rank}" for rank in self._ranks]
        self._store.wait(keys, timedelta(seconds=timeout_s))
        answers = [value.decode() for value in self._store.multi_get(keys)]
        losses = [_loss(answer) for answer in answers if answer.startswith(_LOST)]
        return [answer for answer in answers if not answer.startswith(_LOST)], losses

    def _say(self, topic: str, text: str) -> None:
        noted = self._store.compare_set(f"{topic}/{self._rank}", "", text).decode()
        if noted.startswith(_LOST):
            raise RankLost(f"the other ranks have given this one up: {_loss(noted).message}")


class StoreBoard:
    """The :class:`lightning_resilience.restart.roll.Board` in the control store.

    Args:
        store: A connection that nobody else uses.
        run: Tells one `fit` from another.
    """

    def __init__(self, store: Store, run: int) -> None:
        self._store = PrefixStore(f"board/{run}", store)

    def announce(self, place: Place) -> None:
        """See :class:`Board`, as for all below."""
        self._store.set(f"place/{place.rank}", place.to_json())
        number = self._store.add(f"machine/{place.machine}", 1)
        self._store.set(f"machine/{place.machine}/{number}", place.to_json())

    def place(self, rank: int) -> Place | None:
        """None if it has not announced itself."""
        text = self._get(f"place/{rank}")
        return None if text is None else Place.from_json(text)

    def places_on(self, machine: str) -> list[Place]:
        """In the order in which they announced themselves."""
        count = self._store.add(f"machine/{machine}", 0)
        texts = [self._get(f"machine/{machine}/{number}") for number in range(1, count + 1)]
        return [Place.from_json(text) for text in texts if text is not None]

    def beat(self, rank: int, pulse: Pulse) -> None:
        """Replaces the one before."""
        self._store.set(f"pulse/{rank}", pulse.to_json())

    def pulse(self, rank: int) -> Pulse | None:
        """None before the first."""
        text = self._get(f"pulse/{rank}")
        return None if text is None else Pulse.from_json(text)

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


class Control:
    """A connection to the control store, of one thread.

    Args:
        store: The connection.
        rank: This rank.
        world_size: How many ranks there are.
        sockets: What `disconnect` ends.
    """

    def __init__(self, store: TCPStore, rank: int, world_size: int, sockets: Iterable[Descriptor] = ()) -> None:
        self._store = store
        self._sockets = list(sockets)
        self.rank = rank
        self.world_size = world_size

    def another(self) -> Control:
        """A connection for another thread. Called by the main thread."""
        return _connect(self._store.host, self._store.port, self.rank, self.world_size)

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

    def board(self, run: int) -> StoreBoard:
        """What ranks know of each other during one `fit`."""
        return StoreBoard(self._store, run)

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
        control = Control(store, rank, world_size)
    else:
        control = _connect(host, int(first.get(key).decode()), rank, world_size)
        store = control._store
    _opened.append(store)
    protect_port(store.port)
    return control


def _connect(host: str, port: int, rank: int, world_size: int) -> Control:
    before = set(open_sockets())
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    made = [item for item in open_sockets() if item not in before]
    return Control(store, rank, world_size, [item for item in made if peer_port(item) == port])


def _loss(text: str) -> Fault:
    return fault_from_json(text.removeprefix(_LOST))
