"""What `ModelCheckpoint` does itself when saves are synchronous, done when they are committed.

Runs on the training thread of all ranks, in the same order: what a rank concludes from the fate of a save must be what
the others conclude, or they wait for each other in the next collective. So only rank 0's knowledge counts, and it is
told at each save and at the end of `fit`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary, proxy

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_resilience import _lightning
from lightning_resilience.beliefs import Beliefs, Ledger, Rules, only
from lightning_resilience.checkpoint.history import Verdict
from lightning_resilience.errors import SaveError

log = logging.getLogger(__name__)


class Saver(Protocol):
    """The checkpoint plugin, as the keeper needs it."""

    tag: int
    """Number of the save that is being asked for; 0 for one that no `ModelCheckpoint` asks for."""

    called: str
    """Which hook of the plugin the save has reached: "sharded" on all ranks, "file" on rank 0, or none of them."""

    def take_verdicts(self) -> list[Verdict]:
        """What became of saves: after a sharded one known to all ranks, otherwise to rank 0."""
        ...

    def tell(self, trainer: Trainer, message: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's message, on all ranks; called by all of them."""
        ...

    def exists(self, path: str) -> bool:
        """Whether anything is at a path that Lightning knows."""
        ...

    def link(self, path: str, link: str) -> None:
        """Make another name for a checkpoint after the newest save is committed."""
        ...

    def remove_after_newest(self, path: str) -> None:
        """Delete a checkpoint after the newest save is committed and it is released; not at all if that save fails."""
        ...

    def release(self, path: str) -> None:
        """Nobody is shown this checkpoint any more."""
        ...

    def all_here(self, trainer: Trainer) -> bool:
        """See `_lightning.Keeper`."""
        ...


class CommitKeeper:
    """Owned by the checkpoint plugin. Implements `_lightning.Keeper`.

    Args:
        saver: The plugin.
    """

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self._ledgers: WeakKeyDictionary[ModelCheckpoint, Ledger] = WeakKeyDictionary()
        self._working: set[ModelCheckpoint] = set()
        self._tag = 0

    @contextmanager
    def work(self, callback: ModelCheckpoint, trainer: Trainer) -> Iterator[None]:
        """The callback sees what it had in mind; afterwards everybody sees what is committed."""
        if callback in self._working:
            yield
            return
        ledger = self._ledger(callback)
        self._working.add(callback)
        show(callback, ledger.open_page(beliefs_of(callback)))
        try:
            yield
        except BaseException:  # what it has begun to write tells of a save that nobody was asked for
            show(callback, replace(ledger.asked, saved=_lightning.saved(callback)))
            raise
        finally:
            self._working.discard(callback)
            show(callback, ledger.close_page(beliefs_of(callback)))
        self._publish(trainer, callback, ledger)

    def save(self, callback: ModelCheckpoint, trainer: Trainer, path: str) -> None:
        """Ask for a save, and draw conclusions from what is known by then of earlier ones."""
        self._tag += 1
        ledger, tag = self._ledger(callback), self._tag
        ledger.ask(tag, trainer.global_step, path, beliefs_of(callback))
        self._saver.tag, self._saver.called = tag, ""
        error: SaveError | None = None
        try:
            trainer.save_checkpoint(path, callback.save_weights_only)
        except SaveError as caught:
            error = caught
        finally:
            self._saver.tag = 0
        _lightning.set_saved(callback, trainer.global_step, path)
        verdicts, error = self._verdicts(trainer, tag, error)
        self._settle(trainer, verdicts)
        if error is not None:
            raise error

    def link(self, callback: ModelCheckpoint, trainer: Trainer, path: str, link: str) -> None:
        """The link appears with the checkpoint it names."""
        if os.path.abspath(path) == os.path.abspath(link):
            return
        if (newest := self._ledger(callback).newest) is not None:
            newest.link = link
        if trainer.is_global_zero:
            self._saver.link(path, link)

    def remove(self, callback: ModelCheckpoint, trainer: Trainer, path: str) -> None:
        """Delete what the newest save replaces, unless that turned out not to be taken."""
        newest = self._ledger(callback).newest
        if path in beliefs_of(callback).kept:
            return
        if newest is not None:
            newest.removed.append(path)
        if trainer.is_global_zero:
            self._saver.remove_after_newest(path)

    def resume(self, callback: ModelCheckpoint, trainer: Trainer) -> None:
        """Strike out what books from a checkpoint name and what was never committed, or is gone."""
        beliefs = beliefs_of(callback)
        if not beliefs.kept:
            return
        here = [path for path in sorted(beliefs.kept) if trainer.is_global_zero and not self._saver.exists(path)]
        missing = self._saver.tell(trainer, {"missing": here})["missing"]
        if missing:
            log.warning("ModelCheckpoint forgets checkpoints that do not exist: %s", ", ".join(missing))
            show(callback, only(beliefs, missing, rules_of(callback)))

    def all_here(self, trainer: Trainer) -> bool:
        """See `_lightning.Keeper`."""
        return self._saver.all_here(trainer)

    def finish(self, trainer: Trainer, news: Sequence[Verdict]) -> None:
        """The end of `fit`: everything is committed or has failed.

        Args:
            trainer: Whose `fit`.
            news: Rank 0's, not told yet.
        """
        if self._ledgers:
            self._settle(trainer, _told(self._saver.tell(trainer, {"verdicts": [asdict(verdict) for verdict in news]})))
        self.forget()

    def forget(self) -> None:
        """The next `fit` begins with new books."""
        self._ledgers.clear()

    def _verdicts(self, trainer: Trainer, tag: int, error: SaveError | None) -> tuple[list[Verdict], SaveError | None]:
        """What all ranks know now. An error of rank 0, which alone was called, becomes an error of all."""
        if self._saver.called == "sharded":  # told in the exchange of the save itself
            return self._saver.take_verdicts(), error
        if error is not None and trainer.world_size > 1:
            trainer.strategy.barrier("Trainer.save_checkpoint")  # where the other ranks are
        verdicts = self._saver.take_verdicts() if trainer.is_global_zero else []
        if error is not None:
            verdicts.append(Verdict(tag, "failed"))
        elif trainer.is_global_zero and not self._saver.called:
            verdicts.append(Verdict(tag, "saved"))  # the strategy has written it itself
        message = {"error": str(error or ""), "verdicts": [asdict(verdict) for verdict in verdicts]}
        told = self._saver.tell(trainer, message)
        if error is None and told["error"]:
            error = SaveError(f"rank 0: {told['error']}")
        return _told(told), error

    def _settle(self, trainer: Trainer, verdicts: Sequence[Verdict]) -> None:
        for callback, ledger in list(self._ledgers.items()):
            working = callback in self._working
            mind, again = ledger.settle(verdicts, beliefs_of(callback) if working else ledger.mind)
            show(callback, mind if working else ledger.visible)
            for path in again:
                if trainer.is_global_zero:
                    self._saver.remove_after_newest(path)
            self._publish(trainer, callback, ledger)

    def _publish(self, trainer: Trainer, callback: ModelCheckpoint, ledger: Ledger) -> None:
        """Something more is committed: what it replaces goes, and loggers that upload look into the callback for it."""
        committed = ledger.take_committed()
        if not committed or not trainer.is_global_zero:
            return
        for path in (path for entry in committed for path in entry.removed):
            self._saver.release(path)
        mind = beliefs_of(callback)
        show(callback, ledger.visible)
        try:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(callback))
        finally:
            show(callback, mind)

    def _ledger(self, callback: ModelCheckpoint) -> Ledger:
        if callback not in self._ledgers:
            self._ledgers[callback] = Ledger(beliefs_of(callback), rules_of(callback))
        return self._ledgers[callback]


def beliefs_of(callback: ModelCheckpoint) -> Beliefs:
    """Its books as they are now."""
    return Beliefs(
        best=dict(callback.best_k_models),
        kth_path=callback.kth_best_model_path,
        kth_value=callback.kth_value,
        best_path=callback.best_model_path,
        best_score=callback.best_model_score,
        last_path=callback.last_model_path,
        score=callback.current_score,
        saved=_lightning.saved(callback),
    )


def show(callback: ModelCheckpoint, beliefs: Beliefs) -> None:
    """Write its books."""
    callback.best_k_models = dict(beliefs.best)
    callback.kth_best_model_path = beliefs.kth_path
    callback.kth_value = beliefs.kth_value
    callback.best_model_path = beliefs.best_path
    callback.best_model_score = beliefs.best_score
    callback.last_model_path = beliefs.last_path
    callback.current_score = beliefs.score
    _lightning.set_saved(callback, *beliefs.saved)


def rules_of(callback: ModelCheckpoint) -> Rules:
    """What it keeps its books by."""
    if callback.monitor is None:
        return Rules(callback.save_top_k, worst=None, best=None)

    def low(scores: Mapping[str, Any]) -> str:
        return min(scores, key=scores.__getitem__)

    def high(scores: Mapping[str, Any]) -> str:
        return max(scores, key=scores.__getitem__)

    worst, best = (high, low) if callback.mode == "min" else (low, high)
    return Rules(callback.save_top_k, worst=worst, best=best)


def _told(message: dict[str, Any]) -> list[Verdict]:
    return [Verdict(**verdict) for verdict in message["verdicts"]]
