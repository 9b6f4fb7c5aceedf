"""Whether all ranks have come, without waiting for those that never will: asked before a save during an exception.

A collective would wait for as long as the process group's timeout, and might meet another collective of a rank that
knows nothing of the exception. Here every rank counts itself in a store; whoever runs out of patience spoils the count
in one step, so that either all ranks are told yes or all are told no.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store

_SPOILT = -(10**9)


class RollCall:
    """One for each process group and rank.

    Args:
        store: Shared by the ranks, used by nobody else at the same time; every operation on it is bounded in time.
        world_size: How many must come.
        patience_s: How long to wait for them.
    """

    def __init__(self, store: Store, world_size: int, patience_s: float) -> None:
        self._store = store
        self._world_size = world_size
        self._patience = timedelta(seconds=patience_s)
        self._held = 0

    def __call__(self, occasion: str) -> bool:
        """Whether all ranks have come on the same occasion; the same answer on each.

        Args:
            occasion: The same on ranks that belong together.
        """
        count, go = f"{self._held}/{occasion}/count", f"{self._held}/{occasion}/go"
        try:
            all_here = self._count(count, go)
        except RuntimeError:  # the store is gone, and with it the rank that held it
            return False
        self._held += all_here  # the next call is another one, for all ranks
        return all_here

    def _count(self, count: str, go: str) -> bool:
        here = self._store.add(count, 1)
        if here == self._world_size:
            self._store.set(go, "yes")
            return True
        if here < 0 or here > self._world_size:
            return False
        try:
            self._store.wait([go], self._patience)
        except RuntimeError:  # time is up: nobody who comes now is told yes, unless all have come this moment
            return self._store.add(count, _SPOILT) - _SPOILT == self._world_size
        return True
