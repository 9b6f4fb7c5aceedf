"""The fit loop that goes on exactly where a checkpoint was written.

Without a checkpoint it does what Lightning's own loop does, in the same order. With one:

1. ``setup_data`` prepares the loaders but makes no iterators yet;
2. the loaded counters are read as a ``ResumePoint`` (see ``resume_point.py``) and tidied up;
3. the training epoch begins: random state as at the start of that epoch, sampler epoch, iterators, skip;
4. random state as at the save; then what the interrupted run still had to do; then the next batch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torchmetrics import Metric

from lightning_resilience._lightning import (
    FitLoop,
    RestartStage,
    callback_metrics,
    clear_restarting,
    current,
    forget_loaders,
    set_sampler_epoch,
    sized_len,
    total,
)
from lightning_resilience.data.commits import Commits
from lightning_resilience.data.dealing import Dealing, batch_size_of, log_dealing, rest_of, samples_done
from lightning_resilience.data.epoch_loop import Batch, ResumableEpochLoop, counts
from lightning_resilience.data.fetcher import IdleLoader, LaggingFetcher, lagging_if_needed
from lightning_resilience.data.position import ResumedLoader, begin_next_epoch, generators_of, is_stateful
from lightning_resilience.data.rank_state import EpochStart, RankState, Restorable, restorable
from lightning_resilience.data.resume_point import Counts, Remaining, ResumePoint, resume_point
from lightning_resilience.data.rng import RngState, capture_rng, capture_rng_live, restore_rng
from lightning_resilience.errors import LoadError

log = logging.getLogger(__name__)

Guard = Callable[[Callable[[], None], Callable[[], None]], None]
"""Runs its first argument, and after a fault that it recovers from its second."""


@dataclass(frozen=True)
class Resume:
    """A resume in progress: from the start of ``run`` until its first batch.

    Attributes:
        point: Where to go on.
        saved: What this rank had saved for itself.
        live: Whether it comes from a commit in memory, so that everything but the data is there already.
        batch: The batch whose end is still to be done, if any.
    """

    point: ResumePoint
    saved: Restorable
    live: bool = False
    batch: Batch | None = None

    @property
    def first_iterators_were_open(self) -> bool:
        """Whether the checkpoint was written before the first epoch, but after its iterators were made.

        Lightning makes them before ``on_train_start``; those of later epochs after ``on_train_epoch_start``.
        """
        return self.point.epoch == 0 and self.epoch_was_opened

    @property
    def epoch_was_opened(self) -> bool:
        """Whether iterators were made for the epoch to go on with."""
        start = self.saved.epoch_start
        return self.point.mid_epoch or (start is not None and start["epoch"] == self.point.epoch)


class ResumableFitLoop(FitLoop):
    """Drop-in for Lightning's fit loop. Owned by the trainer, lives as long as it; main thread only."""

    epoch_loop: ResumableEpochLoop

    def __init__(self, trainer: Trainer, min_epochs: int | None = 0, max_epochs: int | None = None) -> None:
        super().__init__(trainer, min_epochs, max_epochs)
        self.resume: Resume | None = None
        self._stashed: RankState | None = None
        self._dealing: Dealing | None = None
        self._epoch_start: EpochStart | None = None
        self._iterators_open = False
        self._advancing = False
        self._entered = self._must_enter = False
        self.commits: Commits | None = None
        self.guard: Guard = _unguarded

    # --- checkpoint: out and in

    def capture_rank_state(self) -> RankState:
        """See :func:`lightning_resilience.data.install.capture_rank_state`."""
        return {
            "rank": self.trainer.global_rank,
            "world_size": self.trainer.world_size,
            "rng": self.epoch_loop.rng_before_validation() or self.capture_rng(),
            "epoch_start": copy.copy(self._epoch_start),  # it is completed later; the save may be written later too
            "loaders": self._loader_states(),
            "metrics": {name: value.cpu() for name, value in callback_metrics(self.trainer).items()},
            "epoch_metrics": self.epoch_loop.capture_epoch_metrics(),
            "dealing": self._dealing,
        }

    def stash_rank_state(self, state: dict[str, Any] | None) -> None:
        """See :func:`lightning_resilience.data.install.stash_rank_state`."""
        self._stashed = cast("RankState | None", state)

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Lightning's own state of the loop, with loader states that fit the batch trained last."""
        state = super().on_save_checkpoint()
        if "combined_loader" in state:
            state["combined_loader"] = self._loader_states()
        return state

    def capture_rng(self) -> RngState:
        """All random state of this rank, including the generators that the training loaders were given."""
        return capture_rng(generators_of(self._loaders))

    def restore_rng(self, state: RngState | None) -> None:
        """Undo what was drawn since ``state``; None leaves everything as it is."""
        if state is not None:
            restore_rng(state, generators_of(self._loaders))

    # --- running

    def run(self) -> None:
        """Train until done, from the loaded position if there is one."""
        self.setup_data()
        resumes = self._loaded_from_state_dict
        if self._data_fetcher is not None:
            if self._loaded_from_state_dict:
                self._begin_resume()
            elif not self._iterators_open:
                self.open_epoch()
        if self.skip:
            if resumes and (limit := self._limit_reached()):
                rank_zero_info(f"The run had already reached {limit} where it is resumed: nothing to do.")
            return
        self._commit_here(entered=False)
        try:
            self.guard(self._start, self._go_on)
        finally:
            self.resume = self._stashed = None
            self._advancing = False

    def _limit_reached(self) -> str:
        """Which of the trainer's limits the run has reached; empty if none."""
        if 0 <= self.epoch_loop.max_steps <= self.epoch_loop.global_step:
            return f"max_steps={self.epoch_loop.max_steps}"
        epochs = -1 if self.max_epochs is None else self.max_epochs
        return f"max_epochs={epochs}" if 0 <= epochs <= current(self.epoch_progress).processed else ""

    def _start(self) -> None:
        self.reset()
        self.on_run_start()
        self._train()

    def _train(self) -> None:
        """Epoch after epoch; what Lightning's ``run`` does after its start."""
        while not self.done or self._must_enter:
            self._must_enter = False
            try:
                self.on_advance_start()
                self.advance()
                self.on_advance_end()
            except StopIteration:
                break
            finally:
                self.on_iteration_done()
        self._restarting = False
        self.on_run_end()

    # --- commits in memory

    def commit(self, point: ResumePoint, batch: Batch | None = None) -> None:
        """Remember this place, if somebody wants to come back to it."""
        if self.commits is not None:
            self.commits.take(Resume(point, self._live_state(), live=True, batch=batch))

    def go_back(self, step: int, stage: int) -> None:
        """Put back the state of a commit; the next run of the guarded part goes on from it."""
        assert self.commits is not None
        commit = self.commits.go_back(step, stage)
        self.resume = commit.resume
        self._entered = commit.entered
        self.epoch_loop.abandon_validation()
        if self._combined_loader is not None:
            self._close_iterators()

    def deal_anew(self, before: int) -> None:
        """There are fewer ranks: ask for the loaders again, with samplers for those that are left. A collective.

        Args:
            before: Number of ranks that samplers have dealt for so far.
        """
        forget_loaders(self)
        self._advancing, self._loaded_from_state_dict = False, True
        self.setup_data()
        strategy: Any = self.trainer.strategy
        if strategy.is_global_zero:
            for loader in self._loaders:
                log_dealing(loader, strategy.distributed_sampler_kwargs["num_replicas"], before)

    def enter_loaded(self) -> None:
        """A checkpoint was loaded in the middle of training: the next run of the guarded part goes on from it."""
        self.epoch_loop.abandon_validation()
        for metric in self.trainer.lightning_module.modules():
            if isinstance(metric, Metric):
                metric.reset()
        self._begin_resume()
        self._entered = True

    def stand_alone(self) -> None:
        """Nobody recovers from faults any more."""
        self.guard, self.commits = _unguarded, None

    def _commit_here(self, *, entered: bool) -> None:
        """Before an epoch; before the first one a resume from a checkpoint may be in progress."""
        if self.commits is None:
            return
        if self.resume is not None:
            self.commits.take(self.resume, entered=entered)
        else:
            here = ResumePoint(current(self.epoch_progress).processed)
            self.commits.take(Resume(here, self._live_state(), live=True), entered=entered)

    def _live_state(self) -> Restorable:
        start = copy.copy(self._epoch_start)  # it is completed later
        rng = capture_rng_live(generators_of(self._loaders))
        return Restorable(rng=rng, epoch_start=start, loaders=self._loader_states())

    def _go_on(self) -> None:
        """From the commit that was put back."""
        if not self._entered:
            self._start()
            return
        self._advancing = True
        self._resuming_from_checkpoint = True
        assert self.resume is not None
        self._must_enter = self.resume.point.mid_epoch
        if self._must_enter:
            self._restart_stage = RestartStage.RESTARTED_MID_EPOCH
        self._train()

    def setup_data(self) -> None:
        """Prepare the loaders; make their iterators only if no checkpoint will say where to start."""
        before = self._data_fetcher
        try:
            super().setup_data()
        finally:
            self._show_loaders()
        if self._data_fetcher is None or self._data_fetcher is before:
            return
        self._data_fetcher = lagging_if_needed(self._data_fetcher)
        # ``ckpt_path``: ``Trainer.estimated_stepping_batches`` comes here before the checkpoint is restored.
        if self._advancing or not (self._loaded_from_state_dict or self.trainer.ckpt_path):
            self.open_epoch()
        else:
            self._close_iterators()

    def reset(self) -> None:
        """Start the run; in the middle of an epoch, do not start that epoch again."""
        super().reset()
        self._advancing = True
        if self.resume is not None and self.resume.point.mid_epoch:
            self._restart_stage = RestartStage.RESTARTED_MID_EPOCH

    def on_advance_start(self) -> None:
        """Start an epoch; the first one after a resume with the random state of the save."""
        if self.resume is not None and not self.resume.point.mid_epoch:
            if self.resume.first_iterators_were_open:
                self._reopen_epoch(self.resume)
            else:
                self._prepare_next_epoch(self.resume)
            self.restore_rng(self.resume.saved.rng)
            self._reload_as_before(self.resume)
        if self.resume is None or not self.resume.live:
            self._commit_here(entered=True)
        super().on_advance_start()

    def teardown(self) -> None:
        """Release the iterators and their workers."""
        super().teardown()
        self._iterators_open = False

    # --- entering an epoch's data

    def note_epoch_start(self) -> None:
        """Remember the random state from which the order of the coming epoch follows."""
        epoch = current(self.epoch_progress).processed
        self._epoch_start = {"epoch": epoch, "opened": self.capture_rng(), "first_fetch": None}

    def note_first_fetch(self) -> None:
        """The same, before each batch; only the first of an epoch counts."""
        if self._epoch_start is not None and self._epoch_start["first_fetch"] is None:
            self._epoch_start["first_fetch"] = self.capture_rng()

    def open_epoch(self) -> None:
        """Make the iterators of an epoch that starts at its first batch."""
        self.note_epoch_start()
        set_sampler_epoch(self._loaders, current(self.epoch_progress).processed)
        self._iterate(self._loaders)

    def enter_resumed_epoch(self, resume: Resume) -> None:
        """Make the iterators of the first epoch after a resume, if ``on_advance_start`` has not."""
        if not resume.point.mid_epoch:
            if not resume.first_iterators_were_open:
                self.open_epoch()
            return
        if resume.point.exhausted:
            self._prepare_next_epoch(resume)
            self._epoch_start = copy.copy(resume.saved.epoch_start)
        else:
            self._reopen_epoch(resume)
        self.restore_rng(resume.saved.rng)

    def _reopen_epoch(self, resume: Resume) -> None:
        """Repeat what made the iterators of a started epoch, then go to the position in it."""
        point, start = resume.point, resume.saved.epoch_start
        states = self._states_by_loader(resume) if point.batches else {}
        loaders = [self._resumed(loader, point, states.get(id(loader))) for loader in self._loaders]
        if point.epoch > 0:
            for loader in loaders:
                loader.keep_workers_alive()
        self.restore_rng(start["opened"] if start else None)
        self.note_epoch_start()
        set_sampler_epoch(self._loaders, point.epoch)
        self._iterate(loaders)
        self.restore_rng(start["first_fetch"] if start else None)
        self._epoch_start = copy.copy(start) or self._epoch_start
        for loader in loaders:
            loader.skip()

    def _resumed(self, loader: Any, point: ResumePoint, state: Any) -> ResumedLoader:
        dealing = self._dealing
        if dealing is None or dealing["epoch"] != point.epoch:
            return ResumedLoader(loader, point.batches, state)
        return ResumedLoader(loader, point.batches - dealing["batches"], state, rest_of(loader, dealing["samples"]))

    def _prepare_next_epoch(self, resume: Resume) -> None:
        """Bring the loaders to where they are after an epoch, if there was one."""
        if resume.point.epoch == 0 and not resume.point.exhausted:
            return
        states = self._states_by_loader(resume)
        ended = resume.point.exhausted or not resume.epoch_was_opened
        for loader in self._loaders:
            if id(loader) in states:
                exhausted = ended and self._is_exhausted(loader)
                begin_next_epoch(loader, states[id(loader)], exhausted=exhausted)
            else:
                ResumedLoader(loader, 0).keep_workers_alive()

    def _reload_as_before(self, resume: Resume) -> None:
        """Let ``reload_dataloaders_every_n_epochs`` take effect where it would have in the interrupted run."""
        every = self.trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]  # set in a connector
        epoch = resume.point.epoch
        if every and epoch > 0 and epoch % every == 0 and not resume.epoch_was_opened:
            self._last_train_dl_reload_epoch = float("-inf")

    def _is_exhausted(self, loader: Any) -> bool:
        """Whether the last epoch used the whole loader, rather than ending at ``limit_train_batches``."""
        batches, length = current(self.epoch_loop.batch_progress).processed, sized_len(loader)
        return batches < self.max_batches if length is None else batches >= length

    def _states_by_loader(self, resume: Resume) -> dict[int, Any]:
        stateful = [loader for loader in self._loaders if is_stateful(loader)]
        states = resume.saved.loaders
        if states and len(states) != len(stateful):
            raise LoadError(
                f"The checkpoint holds the states of {len(states)} training data loaders, but {len(stateful)} of"
                " the present ones can load a state. Use the loaders that the checkpoint was written with."
            )
        return {id(loader): state for loader, state in zip(stateful, states, strict=False)}

    # --- resuming

    def _begin_resume(self) -> None:
        saved = restorable(self._stashed, self.trainer.world_size, self._combined_loader_states_to_load)
        self._combined_loader_states_to_load = []
        self._dealing = None if self._stashed is None else self._stashed.get("dealing")
        loop, point = self.epoch_loop, self._redealt(self._resume_point())
        self.resume = Resume(point, saved)
        clear_restarting(self)
        self._restore_metrics(saved)
        if point.remaining is Remaining.EPOCH_END and saved.metrics is not None:
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        self._settle_epoch_progress(point)
        loop.settle_progress(point)
        self._close_iterators()

    def _redealt(self, point: ResumePoint) -> ResumePoint:
        """The same place in the epoch, in batches of the present number of ranks.

        The count of batches is such that the epoch ends, as always, when it reaches the length of the loader.
        """
        saved, loop = self._stashed, self.epoch_loop
        ended = loop.batch_progress.is_last_batch and point.exhausted
        if saved is None or saved["world_size"] == self.trainer.world_size or not point.mid_epoch or ended:
            return point
        loader = self._loaders[0] if len(self._loaders) == 1 else None
        ranks, strategy = saved["world_size"], cast("Any", self.trainer.strategy)
        if rest_of(loader, 0) is None:
            if strategy.is_global_zero:
                log.warning(
                    "Within this epoch samples may be seen twice or not at all: how the training data is dealt to the"
                    " ranks is not known, and each rank skips the %d batches that each of %d ranks had done.",
                    point.batches,
                    ranks,
                )
            return point
        done = samples_done(self._dealing, point.epoch, point.batches, batch_size_of(cast("Any", loader)), ranks)
        left = len(cast("Any", rest_of(loader, done)))
        batches = max(0, len(cast("Any", loader)) - left)
        self._dealing = {"epoch": point.epoch, "batches": batches, "samples": done}
        current(loop.batch_progress).processed = batches
        exhausted = left == 0 or batches >= self.max_batches
        remaining = point.remaining if batches else Remaining.NOTHING
        return replace(point, batches=batches, exhausted=exhausted, remaining=remaining)

    def _resume_point(self) -> ResumePoint:
        batches = self.epoch_loop.batch_progress
        return resume_point(
            counts(current(self.epoch_progress)),
            counts(current(batches)),
            is_last_batch=batches.is_last_batch,
            validated=self.epoch_loop.validation_is_over(),
            max_batches=self.max_batches,
        )

    def _restore_metrics(self, saved: Restorable) -> None:
        device = self.trainer.strategy.root_device
        metrics = {name: value.to(device) for name, value in (saved.metrics or {}).items()}
        callback_metrics(self.trainer).update(metrics)

    def _settle_epoch_progress(self, point: ResumePoint) -> None:
        """Make the epoch counters agree with ``point``: hooks that run again are not counted twice."""
        begun = point.epoch + int(point.mid_epoch)
        settled = Counts(ready=begun, started=begun, processed=point.epoch, completed=point.epoch)
        in_all, now = total(self.epoch_progress), current(self.epoch_progress)
        for name, value in asdict(settled).items():
            setattr(in_all, name, getattr(in_all, name) + value - getattr(now, name))
            setattr(now, name, value)

    # --- loaders

    @property
    def _loaders(self) -> list[Any]:
        return [] if self._combined_loader is None else self._combined_loader.flattened

    def _loader_states(self) -> list[Any]:
        fetcher = self._data_fetcher
        if isinstance(fetcher, LaggingFetcher) and fetcher.states is not None:
            return fetcher.states
        return [loader.state_dict() for loader in self._loaders if is_stateful(loader)]

    def _load_combined_loader_states(self) -> None:
        """Called by ``setup_data`` just before it makes iterators: hide the loaders from that."""
        assert self._combined_loader is not None
        self._combined_loader.flattened = [IdleLoader(loader) for loader in self._combined_loader.flattened]

    def _show_loaders(self) -> None:
        if any(isinstance(loader, IdleLoader) for loader in self._loaders):
            assert self._combined_loader is not None
            self._combined_loader.flattened = [idle.loader for idle in self._combined_loader.flattened]

    def _close_iterators(self) -> None:
        """Stop all loading; the lengths stay known."""
        assert self._combined_loader is not None
        self._combined_loader.reset()
        self._iterate([IdleLoader(loader) for loader in self._loaders])
        self._iterators_open = False

    def _iterate(self, loaders: Sequence[Any]) -> None:
        assert self._combined_loader is not None
        assert self._data_fetcher is not None
        with _standing_in(self._combined_loader, loaders):
            iter(self._data_fetcher)
        self._iterators_open = True


def _unguarded(first: Callable[[], None], again: Callable[[], None]) -> None:
    first()


@contextmanager
def _standing_in(combined: CombinedLoader, loaders: Sequence[Any]) -> Iterator[None]:
    """Let ``loaders`` take the place of those of ``combined`` while iterators are made."""
    originals = combined.flattened
    combined.flattened = list(loaders)
    try:
        yield
    finally:
        combined.flattened = originals
