"""What ranks tell each other about a fault: frozen values, as JSON in the control store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_resilience.restart.policy import Fault


def fault_to_json(fault: Fault) -> str:
    """For the control store."""
    return json.dumps(asdict(fault))


def fault_from_json(text: str | bytes) -> Fault:
    """The inverse."""
    return _fault(json.loads(text))


def _fault(fields: Mapping[str, Any]) -> Fault:
    return Fault(**{**fields, "types": tuple(fields["types"])})


def in_words(fault: Fault) -> str:
    """What happened where and when, for a log line."""
    place = f" ({fault.section})" if fault.section else ""
    return f"{fault.kind} on rank {fault.rank} at step {fault.step}{place}: {fault.title}"


@dataclass(frozen=True, kw_only=True, order=True)
class Standing:
    """How far a rank's state is: `step` optimizer steps, and `stage` commits since the last one.

    Before training it is `SETTING_UP`.
    """

    step: int
    stage: int


SETTING_UP = Standing(step=-1, stage=0)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank says of itself when ranks meet.

    Attributes:
        rank: Who says it.
        standing: Its newest commit.
        whole: False when the fault may have cut an optimizer's update in two.
        ready: Whether gradients of the next update are complete and the update has not begun, so that it can be done.
        trained: Whether it was training, rather than setting up.
        built: Whether its model is set up, and so that of all ranks.
        updated: Whether it has done an update since `fit` began.
        groups: Names of the process groups that it has.
        unhealthy: What its health checks have found.
        fault: Its own fault; None if it was only stopped by those of others.
        echo: Whether the fault only says that another rank did not answer.
    """

    rank: int
    standing: Standing
    whole: bool = True
    ready: bool = False
    trained: bool = True
    built: bool = True
    updated: bool = False
    groups: tuple[str, ...] = ()
    unhealthy: tuple[str, ...] = ()
    fault: Fault | None = None
    echo: bool = False

    @property
    def unfitness(self) -> Fault | None:
        """What was found wrong with this rank, as a fault of its own."""
        if not self.unhealthy:
            return None
        step, message = max(0, self.standing.step), "; ".join(self.unhealthy)
        return Fault(kind="unhealthy", rank=self.rank, step=step, message=message)

    def to_json(self) -> str:
        """For the control store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """The inverse."""
        fields: dict[str, Any] = json.loads(text)
        fault: Mapping[str, Any] | None = fields.pop("fault")
        standing = Standing(**fields.pop("standing"))
        fields |= {name: tuple(fields[name]) for name in ("groups", "unhealthy")}
        return cls(standing=standing, fault=None if fault is None else _fault(fault), **fields)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What came of it when ranks met; the same on all of them.

    Attributes:
        reports: Of the ranks that came, in their order.
        lost: Why the others did not: a fault of kind `lost` for each.
    """

    reports: Sequence[Report]
    lost: Sequence[Fault] = ()
