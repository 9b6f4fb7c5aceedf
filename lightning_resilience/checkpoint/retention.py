"""Which checkpoints are kept: policies are values, and one pure function says what may be deleted.

Decided and carried out by rank 0's writer process, after a newer checkpoint has been committed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lightning_resilience.errors import ConfigurationError


@dataclass(frozen=True)
class Committed:
    """A committed checkpoint, as policies see it.

    Attributes:
        path: Where it is.
        step: Optimizer steps done when it was taken.
        created_ns: When it was committed; strictly increasing within a directory.
        resumable: Training can go on from it; False when it holds weights only.
    """

    path: str
    step: int
    created_ns: int
    resumable: bool = True


class KeepPolicy(Protocol):
    """Says which checkpoints to keep. What any policy of a list keeps is kept."""

    def keeps(self, committed: Sequence[Committed]) -> set[str]:
        """Paths to keep, of checkpoints in the order of their commits, newest first. Pure; must not raise."""
        ...


@dataclass(frozen=True)
class KeepLatest:
    """Keep the checkpoints of the ``count`` steps that were committed last.

    Args:
        count: How many steps; two files of one step (``last.ckpt`` beside it) count once.

    Raises:
        ConfigurationError: ``count`` is not a positive integer.
    """

    count: int

    def __post_init__(self) -> None:
        _check_positive(self, "count", self.count)

    def keeps(self, committed: Sequence[Committed]) -> set[str]:
        """See :class:`KeepPolicy`."""
        steps = list(dict.fromkeys(checkpoint.step for checkpoint in committed))[: self.count]
        return {checkpoint.path for checkpoint in committed if checkpoint.step in steps}


@dataclass(frozen=True)
class KeepEvery:
    """Keep the first checkpoint at or after each multiple of ``steps``, for good.

    Args:
        steps: Optimizer steps; checkpoints need not fall on the multiples exactly.

    Raises:
        ConfigurationError: ``steps`` is not a positive integer.
    """

    steps: int

    def __post_init__(self) -> None:
        _check_positive(self, "steps", self.steps)

    def keeps(self, committed: Sequence[Committed]) -> set[str]:
        """See :class:`KeepPolicy`."""
        first: dict[int, int] = {}
        for checkpoint in committed:
            turn = checkpoint.step // self.steps
            first[turn] = min(checkpoint.step, first.get(turn, checkpoint.step))
        first.pop(0, None)  # before the first multiple
        return {checkpoint.path for checkpoint in committed if checkpoint.step in first.values()}


_POLICIES = {policy.__name__: policy for policy in (KeepLatest, KeepEvery)}


def doomed(
    committed: Collection[Committed], policies: Sequence[KeepPolicy], spared: Collection[str] = ()
) -> list[Committed]:
    """What may be deleted, oldest first.

    Checkpoints to resume from and those that hold weights only are judged apart, so that neither takes the other's
    place. The newest of either kind is always kept, whatever the policies say; without a policy everything is.

    Args:
        committed: All that are whole; a torn one is not here, so it counts for nothing.
        policies: What any of them keeps is kept.
        spared: Paths to keep in any case.
    """
    if not policies:
        return []
    found: list[Committed] = []
    for resumable in (True, False):
        kind = [checkpoint for checkpoint in committed if checkpoint.resumable is resumable]
        kind.sort(key=lambda checkpoint: checkpoint.created_ns, reverse=True)
        kept = {checkpoint.path for checkpoint in kind[:1]}.union(*(policy.keeps(kind) for policy in policies), spared)
        found += [checkpoint for checkpoint in kind if checkpoint.path not in kept]
    return sorted(found, key=lambda checkpoint: checkpoint.created_ns)


def checked_policies(keep: object) -> tuple[KeepLatest | KeepEvery, ...]:
    """The policies in ``keep``.

    Raises:
        ConfigurationError: It is not a list of them.
    """
    if keep is None:
        return ()
    if not isinstance(keep, (list, tuple)) or not all(isinstance(policy, (KeepLatest, KeepEvery)) for policy in keep):
        raise ConfigurationError(f"keep={keep!r}: a list of policies, as in [KeepLatest(3), KeepEvery(1000)]")
    return tuple(keep)


def encode_policies(policies: Sequence[KeepLatest | KeepEvery]) -> list[dict[str, Any]]:
    """As plain values, to be told to another process."""
    return [{"policy": type(policy).__name__, **asdict(policy)} for policy in policies]


def decode_policies(encoded: Sequence[Mapping[str, Any]]) -> list[KeepLatest | KeepEvery]:
    """The opposite of :func:`encode_policies`."""
    return [
        _POLICIES[item["policy"]](**{key: value for key, value in item.items() if key != "policy"}) for item in encoded
    ]


def _check_positive(policy: object, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{type(policy).__name__}({name}={value!r}): a whole number, 1 or more")
