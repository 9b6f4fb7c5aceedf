"""The training epoch loop that can be entered in the middle of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from lightning_resilience._lightning import (
    DataFetcher,
    ProcessedTracker,
    Progress,
    TrainingEpochLoop,
    current,
    mark_epoch_begun,
    total,
)
from lightning_resilience.data.epoch_metrics import (
    EpochMetrics,
    capture_epoch_metrics,
    restore_epoch_metrics,
    update_counts,
)
from lightning_resilience.data.resume_point import Counts, Remaining, ResumePoint
from lightning_resilience.data.rng import RngState

if TYPE_CHECKING:
    from lightning_resilience.data.fit_loop import ResumableFitLoop, Resume


class BatchListener(Protocol):
    """Hears of batches, on the training thread. Set as ``epoch_loop.listener``, by the strategy."""

    def batch_done(self) -> None:
        """A batch has ended, with all its hooks; a validation that is due comes after this."""
        ...

    def pausing(self) -> None:
        """Something else than the next batch comes: a validation, or the end of the epoch."""
        ...


class ResumableEpochLoop(TrainingEpochLoop):
    """Drop-in for Lightning's training epoch loop; belongs to a ``ResumableFitLoop``."""

    def __init__(self, trainer: Any, min_steps: int | None = None, max_steps: int = -1) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._rng_before_validation: RngState | None = None
        self._counts_before_validation: dict[str, int] | None = None
        self._plateau_metrics_unknown = False
        self.listener: BatchListener | None = None

    # --- what a checkpoint needs to know

    def validation_is_over(self) -> bool:
        """Whether the newest validation came to its end."""
        progress = self.val_loop.batch_progress
        return progress.is_last_batch and 0 < progress.current.ready == progress.current.completed

    def rng_before_validation(self) -> RngState | None:
        """Random state before the validation that is running; cut short, it will run again as a whole."""
        return None if self.validation_is_over() else self._rng_before_validation

    def capture_epoch_metrics(self) -> EpochMetrics:
        """What was gathered in this epoch; a validation that is running is not part of it."""
        before = None if self.validation_is_over() else self._counts_before_validation
        return capture_epoch_metrics(self._results, self.trainer.lightning_module, before)

    # --- going on

    def settle_progress(self, point: ResumePoint) -> None:
        """Make the counters agree with ``point``: a batch at its end counts, one in flight does not."""
        counted = current(self.batch_progress)
        in_flight = counted.ready > counted.processed
        settle(self.batch_progress)
        self.batch_progress.is_last_batch &= not in_flight
        self.scheduler_progress.reset_on_restart()
        self.automatic_optimization.optim_progress.reset_on_restart()
        if point.remaining is not Remaining.BATCH_END_VALIDATED:
            self.val_loop.batch_progress.reset_on_run()

    def reset(self) -> None:
        """Start an epoch, unless it goes on in its middle."""
        if self._resume is None or not self._resume.point.mid_epoch:
            super().reset()

    def on_run_start(self, data_fetcher: DataFetcher) -> None:
        """Make the iterators of this epoch; after a resume, end the batch at which the run was interrupted."""
        resume = self._resume
        if resume is None:
            if self.trainer.current_epoch > 0 and not self.trainer.fit_loop.is_resuming:
                self._fit_loop.note_epoch_start()  # the call below makes the iterators
            super().on_run_start(data_fetcher)
            return
        self._fit_loop.enter_resumed_epoch(resume)
        super().on_run_start(data_fetcher)
        self._fit_loop.resume = None
        if resume.point.mid_epoch:
            self._end_batch(resume, data_fetcher)

    def advance(self, data_fetcher: DataFetcher) -> None:
        """Train one batch."""
        self._fit_loop.note_first_fetch()
        super().advance(data_fetcher)
        if self.listener is not None:
            self.listener.batch_done()

    def on_advance_end(self, data_fetcher: DataFetcher) -> None:
        """Validate if it is due, then end the batch."""
        if self.listener is not None and (self.done or self._should_check_val_fx(data_fetcher)):
            self.listener.pausing()
        if not self._skip_next_val and self._should_check_val_fx(data_fetcher):
            self._rng_before_validation = self._fit_loop.capture_rng()
            self._counts_before_validation = update_counts(self.trainer.lightning_module)
        super().on_advance_end(data_fetcher)
        self._rng_before_validation = self._counts_before_validation = None

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Step the schedulers, except those that need a metric which the checkpoint did not bring along."""
        if not (update_plateau_schedulers and self._plateau_metrics_unknown):
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _end_batch(self, resume: Resume, data_fetcher: DataFetcher) -> None:
        """Do what the interrupted run still had to do between its last batch and the next one."""
        if resume.point.batches > 0:
            mark_epoch_begun(self.trainer)
        if resume.saved.epoch_metrics is not None:
            module = self.trainer.lightning_module
            restore_epoch_metrics(resume.saved.epoch_metrics, self._results, module, self.trainer)
        if resume.point.remaining is Remaining.NOTHING:
            return
        self._skip_next_val = resume.point.remaining is Remaining.BATCH_END_VALIDATED
        self._plateau_metrics_unknown = resume.saved.metrics is None
        self.on_advance_end(data_fetcher)
        self._plateau_metrics_unknown = False

    @property
    def _fit_loop(self) -> ResumableFitLoop:
        return cast("ResumableFitLoop", self.trainer.fit_loop)

    @property
    def _resume(self) -> Resume | None:
        return self._fit_loop.resume


def counts(tracker: ProcessedTracker) -> Counts:
    """A copy of one of Lightning's trackers."""
    return Counts(tracker.ready, tracker.started, tracker.processed, tracker.completed)


def settle(progress: Progress) -> None:
    """Count every batch that was processed as completed, and none that was not."""
    for tracker in (total(progress), current(progress)):
        tracker.ready = tracker.started = tracker.completed = tracker.processed
