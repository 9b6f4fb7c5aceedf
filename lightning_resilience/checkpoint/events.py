"""What happens to checkpoints, as events; see ``lightning_resilience.events``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_resilience.events import Event


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(Event):
    """About one save of this rank.

    Attributes:
        path: Where the checkpoint is, or was to be.
        step: Optimizer steps done when its state was taken.
    """

    kind: ClassVar[str] = "checkpoint"
    path: str
    step: int


@dataclass(frozen=True, kw_only=True)
class CheckpointStaged(CheckpointEvent):
    """The state was copied; training goes on.

    Attributes:
        bytes: That this rank staged.
        stall_s: Seconds for which training waited, all in all.
        waited_s: Seconds of these for which it waited for a free slot.
    """

    kind: ClassVar[str] = "checkpoint_staged"
    bytes: int
    stall_s: float
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(CheckpointEvent):
    """It is committed (on other ranks than 0: this rank's part is durable).

    Attributes:
        durable_s: Seconds since the call.
        retried: Requests to a remote storage that failed in passing and were sent again by this rank's writer.
    """

    kind: ClassVar[str] = "checkpoint_saved"
    durable_s: float
    retried: int = 0


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(CheckpointEvent):
    """It is not saved.

    Attributes:
        error: Why, in words.
        retried: Requests to a remote storage that failed in passing before.
    """

    kind: ClassVar[str] = "checkpoint_failed"
    error: str
    retried: int = 0


@dataclass(frozen=True, kw_only=True)
class CheckpointReplaced(CheckpointEvent):
    """It waited for its turn when a newer one came, and was given up for that.

    Attributes:
        by_step: The step of the newer one.
    """

    kind: ClassVar[str] = "checkpoint_replaced"
    by_step: int


@dataclass(frozen=True, kw_only=True)
class CheckpointSkipped(CheckpointEvent):
    """It was not taken.

    Attributes:
        reason: Why, in words.
    """

    kind: ClassVar[str] = "checkpoint_skipped"
    reason: str


@dataclass(frozen=True, kw_only=True)
class WriterDied(Event):
    """The writer process ended by itself, and another one was started.

    Attributes:
        pid: Of the dead one.
        exit_code: As subprocess tells it: minus the signal's number where it was killed.
        repeated: How many requests are asked for again.
    """

    kind: ClassVar[str] = "writer_died"
    pid: int
    exit_code: int | None
    repeated: int


@dataclass(frozen=True, kw_only=True)
class WriterHung(Event):
    """The writer process missed the deadline of a save; it was killed, and another one was started.

    Attributes:
        pid: Of the hung one.
        path: Which save.
        deadline_s: Seconds it had.
    """

    kind: ClassVar[str] = "writer_hung"
    pid: int
    path: str
    deadline_s: float
