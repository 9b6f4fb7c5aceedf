"""How writers whose ranks are gone find out, without a collective, which snapshot they all have.

In a hidden directory beside the checkpoints every writer says what its rank has left; the one of rank 0 reads that and
writes down what is done. The directory is rank 0's to delete; one that is left behind is swept by the next run.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_resilience.checkpoint.attempts import INCOMPLETE, RESCUE
from lightning_resilience.checkpoint.messages import Rescue
from lightning_resilience.checkpoint.storage import Place, hidden
from lightning_resilience.errors import SaveError

_QUIET_S = 50.0  # torchrun lets ranks that do not answer live for 30
_POLL_S = {True: 0.1, False: 1.0}
_DECISION = "decision.json"


@dataclass(frozen=True)
class Left:
    """What one rank has left.

    Attributes:
        steps: Of its complete snapshots.
        layouts: Where their tensors lie, encoded, by step.
    """

    steps: Sequence[int]
    layouts: Mapping[str, str]


class Gathering:
    """One rank's view of it; lives in its writer.

    Args:
        order: What the writer was told.
        directory: Of the checkpoints.
        check: Raises when the rescue shall end; called again and again while others are waited for.
        clock: Monotonic seconds.
        sleep: Waits so many.
    """

    def __init__(
        self,
        order: Rescue,
        directory: Place,
        check: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._order, self._check, self._clock, self._sleep = order, check, clock, sleep
        self._place = directory / hidden("snapshot", f"{RESCUE}{order.run}-{order.start}{INCOMPLETE}")

    def say(self, left: Left) -> None:
        """What this rank has."""
        rank = self._order.rank
        self._place.storage.make_directory(self._place.path)
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        (self._place / f"rank_{rank}.owner").put(json.dumps(owner).encode())
        (self._place / f"rank_{rank}.json").put(json.dumps(asdict(left)).encode())

    def hear_all(self) -> list[Left]:
        """What every rank has; rank 0 asks.

        Raises:
            SaveError: Some say nothing: their ranks live on, or their machine is gone.
        """
        wanted = {f"rank_{rank}.json": rank for rank in range(self._order.world_size)}
        found: dict[int, Left] = {}

        def look() -> bool:
            for name in self._names() & wanted.keys():
                if wanted[name] not in found:
                    found[wanted[name]] = Left(**self._read(name))
            return len(found) == len(wanted)

        self._wait(look, lambda: f"nothing came from rank {', '.join(map(str, sorted({*wanted.values()} - {*found})))}")
        return [found[rank] for rank in sorted(found)]

    def decide(self, step: int) -> None:
        """Tell the others which step is written; rank 0 does, unless it is none."""
        (self._place / _DECISION).put(json.dumps({"step": step}).encode())

    def decision(self) -> int | None:
        """The step that rank 0 writes; None when it is over already.

        Raises:
            SaveError: It says nothing.
        """
        mine = f"rank_{self._order.rank}.json"
        self._wait(
            lambda: _DECISION in (names := self._names()) or mine not in names, lambda: "nothing came from rank 0"
        )
        try:
            step: int = self._read(_DECISION)["step"]
        except FileNotFoundError:
            return None
        return step

    def end(self) -> None:
        """It is over; rank 0 says so."""
        with contextlib.suppress(OSError):  # the next run sweeps it
            self._place.delete()

    def _wait(self, done: Callable[[], bool], lacking: Callable[[], str]) -> None:
        """Until it is done; gives up when nothing new has appeared for a while."""
        seen, since = self._names(), self._clock()
        while not done():
            if (now := self._names()) != seen:
                seen, since = now, self._clock()
            if self._clock() > since + _QUIET_S:
                raise SaveError(f"{lacking()} in {_QUIET_S:.0f} s")
            self._check()
            self._sleep(_POLL_S[self._place.storage.renames])

    def _names(self) -> set[str]:
        return {entry.name for entry in self._place.entries()}

    def _read(self, name: str) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads((self._place / name).read())
        return fields
