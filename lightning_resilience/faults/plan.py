"""What is to go wrong, as values that fit into JSON and YAML."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_resilience.errors import ConfigurationError

Kind = Literal["raise", "hang", "hold", "stop", "kill", "exit", "interrupt", "skip", "terminate"]
"""An exception; a sleep without end; an hour in C code that holds the interpreter's lock; SIGSTOP; SIGKILL;
``sys.exit(3)``; ``KeyboardInterrupt``; a barrier that all ranks but this one wait in; SIGTERM, twice."""

Place = Literal[
    "prepare_data",
    "setup",
    "configure_model",
    "configure_optimizers",
    "fit_start",
    "sanity_check",
    "sanity_check_end",
    "train_start",
    "epoch_start",
    "batch_start",
    "forward",
    "backward",
    "before_update",
    "update",
    "batch_end",
    "validation",
    "validation_end",
    "save",
    "epoch_end",
    "train_end",
    "restart",
]
"""Where: ``forward`` and ``backward`` are in the middle of them, ``update`` is after parameters have changed."""


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault.

    Args:
        kind: What happens.
        place: Where in training.
        rank: To whom.
        step: After how many optimizer steps.
        times: How often; each time training comes to the place again, until that is used up.
        message: Of the exception.

    Raises:
        ConfigurationError: A value cannot work.
    """

    kind: Kind
    place: Place
    rank: int = 0
    step: int = 0
    times: int = 1
    message: str = "made on purpose"

    def __post_init__(self) -> None:
        for name, value, known in (("kind", self.kind, get_args(Kind)), ("place", self.place, get_args(Place))):
            if value not in known:
                raise ConfigurationError(f"{name}={value!r} of a planned fault must be one of {', '.join(known)}.")


def planned_fault(text: str) -> PlannedFault:
    """The fault that an option of a command line asks for: kind, place, then rank, step and times if not as usual.

    For example ``raise:backward:rank=1:step=33``.

    Raises:
        ConfigurationError: It does not say which fault.
    """
    kind, _, rest = text.partition(":")
    place, *numbers = rest.split(":")
    pairs = [part.partition("=") for part in numbers]
    try:
        values = {name: int(value) for name, _, value in pairs}
        if unknown := values.keys() - {"rank", "step", "times"}:
            raise ValueError(f"there is no {', '.join(sorted(unknown))}")
    except ValueError as error:
        raise ConfigurationError(
            f"{text!r} is no fault ({error}); one is kind:place, then :rank=0, :step=0 and :times=1 where these differ."
        ) from error
    return PlannedFault(kind=kind, place=place, **values)  # type: ignore[arg-type]  # it checks these at birth


class Plan:
    """All faults of one run.

    Args:
        faults: In any order.
    """

    def __init__(self, faults: Iterable[PlannedFault]) -> None:
        self._left = {fault: fault.times for fault in faults}

    def includes(self, kind: Kind) -> bool:
        """Whether such a fault is planned."""
        return any(fault.kind == kind for fault in self._left)

    def due(self, place: Place, step: int, rank: int) -> PlannedFault | None:
        """The fault that happens now to this rank, or to the others by what it leaves out; it is then used up."""
        for fault, times in self._left.items():
            is_concerned = fault.rank == rank or fault.kind == "skip"
            if times and is_concerned and (fault.place, fault.step) == (place, step):
                self._left[fault] = times - 1
                return fault
        return None
