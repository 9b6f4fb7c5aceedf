"""Where in the training loop a checkpoint was written, read from the loop's own counters.

Pure: counters in, a :class:`ResumePoint` out. Lightning counts each batch and each epoch four times, as
``ready``, ``started``, ``processed`` and ``completed``, and raises these in this order; which of them are ahead
of the others tells the hook in which the checkpoint was written. Checkpoints of stock Lightning have them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Counts:
    """One of Lightning's progress trackers, for the current run of its loop."""

    ready: int
    started: int
    processed: int
    completed: int


class Remaining(Enum):
    """What the interrupted run still had to do before its next batch or epoch."""

    NOTHING = "nothing"
    BATCH_END = "batch_end"
    """Written in ``on_train_batch_end`` or inside the validation after it: validation, if it was due."""
    BATCH_END_VALIDATED = "batch_end_validated"
    """Written at the end of that validation: only what follows a validation."""
    BATCH_TAIL = "batch_tail"
    """Right after the update, which no checkpoint can be: schedulers, hooks at the batch end, then as `BATCH_END`."""
    EPOCH_END = "epoch_end"
    """Written in ``on_train_epoch_end``: schedulers that are stepped after that hook."""


@dataclass(frozen=True)
class ResumePoint:
    """Where to go on.

    Attributes:
        epoch: index of the epoch to go on with.
        mid_epoch: whether that epoch had started; if not, it starts with its hooks.
        batches: batches of it that are done.
        exhausted: whether these are all its batches.
        remaining: what is left to do first.
    """

    epoch: int
    mid_epoch: bool = False
    batches: int = 0
    exhausted: bool = False
    remaining: Remaining = Remaining.NOTHING


def resume_point(
    epoch: Counts, batch: Counts, *, is_last_batch: bool, validated: bool, max_batches: float
) -> ResumePoint:
    """Decide where to go on.

    Args:
        epoch: counts of epochs.
        batch: counts of batches in the epoch.
        is_last_batch: whether the newest batch was the last of its epoch.
        validated: whether the validation after the newest batch, if it was due, is over.
        max_batches: batches in an epoch; infinite if unknown.
    """
    in_flight = batch.ready > batch.processed
    exhausted = not in_flight and (is_last_batch or batch.processed >= max_batches)
    if epoch.started > epoch.processed:
        remaining = _after_batch(batch, in_flight=in_flight, validated=validated)
        return ResumePoint(epoch.processed, True, batch.processed, exhausted, remaining)
    if epoch.ready > epoch.processed or epoch.processed == 0:  # in on_train_epoch_start, or before it
        return ResumePoint(epoch.processed)
    if not exhausted:  # max_steps, max_time or an early stop cut the epoch short: go on with it
        return ResumePoint(epoch.processed - 1, True, batch.processed)
    ended = epoch.completed == epoch.processed
    return ResumePoint(epoch.processed, remaining=Remaining.NOTHING if ended else Remaining.EPOCH_END)


def _after_batch(batch: Counts, *, in_flight: bool, validated: bool) -> Remaining:
    if in_flight or batch.processed == 0:
        return Remaining.NOTHING
    done = batch.completed == batch.processed  # raised after on_train_batch_end, before validation
    return Remaining.BATCH_END_VALIDATED if done and validated else Remaining.BATCH_END
