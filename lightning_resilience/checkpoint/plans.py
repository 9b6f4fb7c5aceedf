"""What the ranks know of each other's layouts: planned at the first save of a state, remembered afterwards.

Used by the training thread of all ranks, in the same order. Remembered per engine, by a signature of names, shapes,
dtypes and placements; torch's own plan cache is class-level and wrong after a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_resilience.checkpoint.candidates import METADATA
from lightning_resilience.checkpoint.exchange import Exchange
from lightning_resilience.checkpoint.layout import GlobalLayout, Leaf, Path, ShardLayout, plan_shard
from lightning_resilience.errors import SaveError


@dataclass(frozen=True)
class Plan:
    """Where everything of a state lies.

    Attributes:
        shard: This rank's pieces.
        whole: Everybody's; rank 0 has it.
    """

    shard: ShardLayout
    whole: GlobalLayout | None

    def metadata(self, others: Sequence[Leaf], values: Sequence[bytes], folder: str = "") -> dict[str, bytes]:
        """The ``.metadata`` file, on the rank that writes it.

        Args:
            others: What is not a tensor.
            values: Its archives, which follow the tensors of rank 0.
            folder: The directory inside the checkpoint where the ranks' files will lie; `.metadata` has to say so.
        """
        if self.whole is None:
            return {}
        places: list[tuple[str, Path, int, int]] = []
        start = self.shard.size
        for leaf, value in zip(others, values, strict=True):
            places.append((leaf.name, leaf.path, start, len(value)))
            start += len(value)
        if not folder:
            return {METADATA: self.whole.encode(tuple(places))}
        blank = "~" * len(folder)  # encoded once, filled in each time: strings of one length look alike in a pickle
        encoded = self.whole.encode(tuple(places), blank)
        return {METADATA: encoded.replace(blank.encode(), folder.encode())}


class Plans:
    """Owned by the engine of one rank.

    Args:
        exchange: How ranks agree.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._plans: dict[int, Plan] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._plans

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: int, leaves: Sequence[Leaf], known: bool) -> Plan:
        """The plan for a state.

        Args:
            key: The state's signature on this rank.
            leaves: The state.
            known: Whether every rank has a plan already; otherwise all ranks make one, together.

        Raises:
            SaveError: The parts of the ranks do not fit together; raised on all.
        """
        if not known:
            self._plans[key] = self._make(leaves)
        return self._plans[key]

    def _make(self, leaves: Sequence[Leaf]) -> Plan:
        shard = plan_shard(leaves, self._exchange.rank)
        layouts = [ShardLayout.decode(data) for data in self._exchange.all_gather(shard.encode())]
        whole, fault = None, ""
        if self._exchange.rank == 0:
            try:
                whole = GlobalLayout(layouts)
            except SaveError as error:
                fault = str(error)
        if fault := self._exchange.all_gather(fault.encode())[0].decode():  # all ranks raise, or none
            raise SaveError(fault)
        return Plan(shard, whole)
