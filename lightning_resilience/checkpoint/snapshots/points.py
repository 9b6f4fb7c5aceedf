"""What goes into a snapshot, what comes out of it, and the seam at which a restart asks for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_resilience.checkpoint.restore import Target


@dataclass(frozen=True)
class State:
    """What a snapshot is made of.

    Attributes:
        tensors: Nested dictionaries of tensors, ``DTensor`` and values that torch can save.
        steady: Flat names of the tensors that nothing but an optimizer update changes.
        files: Small files of this rank, by name; ``meta.pt`` and ``rank.pt`` are given back by ``load``.
    """

    tensors: Mapping[str, Any]
    steady: Collection[str]
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Restored:
    """What ``load`` could not put into the module itself.

    Attributes:
        content: Loops, callbacks, schedulers, hyper-parameters: as in a Lightning checkpoint; ``optimizer_states`` are
            for ``restore.apply_optimizers``, when callbacks have added the parameter groups that they had added before.
        rank_state: Random numbers and data position of this rank.
    """

    content: dict[str, Any]
    rank_state: dict[str, Any]


class RestorePoints(Protocol):
    """States that this rank can go back to without storage: what a restart asks for, and chooses among.

    Called by the training thread. A choice is the newest step in everybody's ``steps`` (``choice.newest_common``).
    Copies that other nodes keep will be restore points of the same kind.
    """

    def steps(self) -> list[int]:
        """Optimizer steps of the complete states, newest first; one that is still being copied is none."""
        ...

    def verify(self, step: int) -> str:
        """What is wrong with the state of a step, in words; empty when nothing is, or nothing can prove it."""
        ...

    def drop(self, step: int) -> None:
        """Never offer the state of this step again."""
        ...

    def load(self, step: int, target: Target) -> Restored:
        """Put one back into the module, in place, and give the rest; no collective.

        Raises:
            LoadError: There is no such step, or it does not fit.
        """
        ...
