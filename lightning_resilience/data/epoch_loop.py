"""The training epoch loop that can be entered in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from lightning_resilience._lightning import (
    DataFetcher,
    ProcessedTracker,
    Progress,
    TrainingEpochLoop,
    abandon_evaluation,
    call_train_batch_end,
    current,
    mark_epoch_begun,
    step_outputs,
    total,
    update_train_step_metrics,
)
from lightning_resilience.data.epoch_metrics import (
    EpochMetrics,
    capture_epoch_metrics,
    restore_epoch_metrics,
    update_counts,
)
from lightning_resilience.data.position import ResumedLoader
from lightning_resilience.data.resume_point import Counts, Remaining, ResumePoint
from lightning_resilience.data.rng import RngState, capture_rng, restore_rng
from lightning_resilience.restart.timeouts import Section

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


@dataclass
class Batch:
    """The batch that is trained now, as the hooks at its end will get it."""

    batch: Any
    index: int
    outputs: Any = None


class ResumableEpochLoop(TrainingEpochLoop):
    """Drop-in for Lightning's training epoch loop; belongs to a ``ResumableFitLoop``."""

    def __init__(self, trainer: Any, min_steps: int | None = None, max_steps: int = -1) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._rng_before_validation: RngState | None = None
        self._counts_before_validation: dict[str, int] | None = None
        self._plateau_metrics_unknown = False
        self.listener: BatchListener | None = None
        self.entering: Callable[[Section], None] = _nothing
        self._batch: Batch | None = None
        self._steps_before = 0

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

    def abandon_validation(self) -> None:
        """End a validation that was interrupted, with its loaders. The next one starts anew."""
        if self._rng_before_validation is None:
            return
        self._rng_before_validation = self._counts_before_validation = None
        loaders = abandon_evaluation(self.val_loop)
        rng = capture_rng()
        for loader in loaders:  # drawn for already, in the validation before or in this one
            ResumedLoader(loader, 0).keep_workers_alive()
        restore_rng(rng)

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
        self._remember_outputs()
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
        self._steps_before = self.global_step
        super().advance(data_fetcher)
        if self.listener is not None:
            self.listener.batch_done()

    def _broadcast_sigterm_tensor(self) -> None:
        """Nothing: Lightning 2.6 asks all ranks before each batch, and the device has to be waited for.

        A rank that got SIGTERM stops by itself when its batch is over; the others hear of it as of any fault.
        """

    def note_output(self, output: Any) -> None:
        """Remember what the training step returned, for the same hooks, should the batch end here."""
        if self._batch is not None:
            self._batch.outputs = output

    def finish_update(self, update: Callable[[], None]) -> None:
        """The batch was interrupted between its backward and its update: do the update, and commit it."""
        assert self._batch is not None
        self._batch.outputs = step_outputs(self._batch.outputs, self.trainer.accumulate_grad_batches)
        update()
        self.automatic_optimization.optim_progress.optimizer.step.increment_completed()
        self.batch_progress.increment_processed()
        self._fit_loop.commit(self._point(Remaining.BATCH_TAIL), self._batch)

    def _on_before_fetch(self) -> None:
        self.entering(Section.DATA_WAIT)
        super()._on_before_fetch()

    def _on_after_fetch(self) -> None:
        super()._on_after_fetch()
        self.entering(Section.HOOKS)

    def note_batch(self, batch: Any, batch_idx: int) -> None:
        """Remember the batch that is trained now, for the hooks at its end. Called by `on_train_batch_start`."""
        self._batch = Batch(batch, batch_idx)

    def on_advance_end(self, data_fetcher: DataFetcher) -> None:
        """Validate if it is due, then end the batch."""
        if self.listener is not None and (self.done or self._should_check_val_fx(data_fetcher)):
            self.listener.pausing()
        if not self._skip_next_val and self._should_check_val_fx(data_fetcher):
            self._rng_before_validation = self._fit_loop.capture_rng()
            self._counts_before_validation = update_counts(self.trainer.lightning_module)
        super().on_advance_end(data_fetcher)
        self._rng_before_validation = self._counts_before_validation = None
        self._batch = None
        if self.global_step > self._steps_before:
            self._fit_loop.commit(self._point(Remaining.NOTHING))

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Step the schedulers, except those that need a metric which the checkpoint did not bring along.

        Lightning calls this right after an update, before all else.
        """
        updated = interval == "step" and not update_plateau_schedulers and self.global_step > self._steps_before
        if updated and self._resume is None and self._batch is not None:
            self._fit_loop.commit(self._point(Remaining.BATCH_TAIL), self._batch)
        if not (update_plateau_schedulers and self._plateau_metrics_unknown):
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _end_batch(self, resume: Resume, data_fetcher: DataFetcher) -> None:
        """Do what the interrupted run still had to do between its last batch and the next one."""
        if resume.live:
            if resume.batch is not None:
                self._finish_batch(resume.batch)
                if self.listener is not None:
                    self.listener.batch_done()
                self.on_advance_end(data_fetcher)
            return
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

    def _finish_batch(self, done: Batch) -> None:
        """What Lightning's `advance` does after the update of a batch."""
        self._batch, self._steps_before = done, self.global_step - 1
        self._results.batch = done.batch
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        call_train_batch_end(self.trainer, done.outputs, done.batch, done.index)
        self.batch_progress.increment_completed()
        update_train_step_metrics(self.trainer)

    def _remember_outputs(self) -> None:
        """Hooks at the batch end get what the step returned, and may have to be called again."""
        for optimization in (self.automatic_optimization, self.manual_optimization):
            if "run" not in vars(optimization):
                vars(optimization)["run"] = self._remembering(optimization.run)

    def _remembering(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def remembering(*args: Any, **kwargs: Any) -> Any:
            outputs = run(*args, **kwargs)
            if self._batch is not None:
                self._batch.outputs = outputs
            return outputs

        return remembering

    def _point(self, remaining: Remaining) -> ResumePoint:
        """Here, in the epoch that is running."""
        batches = current(self.batch_progress).processed
        exhausted = self.batch_progress.is_last_batch or batches >= self._fit_loop.max_batches
        epoch = current(self._fit_loop.epoch_progress).processed
        return ResumePoint(epoch, True, batches, exhausted, remaining)

    @property
    def _fit_loop(self) -> ResumableFitLoop:
        return cast("ResumableFitLoop", self.trainer.fit_loop)

    @property
    def _resume(self) -> Resume | None:
        return self._fit_loop.resume


def _nothing(section: Section) -> None:
    pass


def counts(tracker: ProcessedTracker) -> Counts:
    """A copy of one of Lightning's trackers."""
    return Counts(tracker.ready, tracker.started, tracker.processed, tracker.completed)


def settle(progress: Progress) -> None:
    """Count every batch that was processed as completed, and none that was not."""
    for tracker in (total(progress), current(progress)):
        tracker.ready = tracker.started = tracker.completed = tracker.processed
