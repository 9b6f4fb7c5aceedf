"""`Trainer(callbacks=[ResilientModelCheckpoint(...)])`: Lightning's `ModelCheckpoint`, and how often is measured."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any, Literal

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_resilience import _lightning
from lightning_resilience.checkpoint.adviser import advice_from, duration
from lightning_resilience.checkpoint.interval import (
    ASSUMED_MTBF_S,
    IntervalAdvice,
    mean_time_between_faults_s,
    next_interval,
)
from lightning_resilience.checkpoint.pace import Pace
from lightning_resilience.checkpoint_io import AsyncCheckpointIO
from lightning_resilience.durations import checked_seconds
from lightning_resilience.errors import ConfigurationError

log = logging.getLogger(__name__)

_FIRST = 10  # steps; an early save also shows early that saving works
_STATE = "lightning_resilience.interval"


class ResilientModelCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint`` that finds out by itself how often to save.

    With ``every_n_train_steps="auto"`` the first checkpoint is taken after 10 steps. From what a save costs training,
    how long it takes to become durable, how long a step takes and how often the run was interrupted follows the
    interval that loses least time; it is looked at again whenever a save is due, the same on all ranks, and goes into
    the checkpoint. Intervals are 1, 2, 5, 10, 20, 50, ... steps. Everything else is as in ``ModelCheckpoint``.

    Args:
        dirpath: Directory of the checkpoints.
        filename: Name of a checkpoint, as in ``ModelCheckpoint``.
        every_n_train_steps: "auto", or a fixed number of steps; None when another argument says how often.
        mean_time_between_faults: What to assume until faults have been seen, in seconds or as a timedelta.
        options: Other arguments of ``ModelCheckpoint``.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(
        self,
        dirpath: _PATH | None = None,
        filename: str | None = None,
        *,
        every_n_train_steps: int | Literal["auto"] | None = "auto",
        mean_time_between_faults: float | timedelta = ASSUMED_MTBF_S,
        **options: Any,
    ) -> None:
        self._auto = every_n_train_steps == "auto"
        self._assumed_mtbf_s = checked_seconds(mean_time_between_faults, "mean_time_between_faults={}")
        if not self._auto and not (every_n_train_steps is None or isinstance(every_n_train_steps, int)):
            raise ConfigurationError(f'every_n_train_steps={every_n_train_steps!r}: "auto", a number of steps, or None')
        if self._auto and (other := {"every_n_epochs", "train_time_interval"} & options.keys()):
            raise ConfigurationError(
                f"{other.pop()} also says how often to save: pass every_n_train_steps=None with it"
            )
        steps = _FIRST if isinstance(every_n_train_steps, str) else every_n_train_steps
        super().__init__(dirpath, filename, every_n_train_steps=steps, **options)
        self._pace = Pace()
        self._stalls_s: list[float] = []
        self._trained_s = 0.0
        self._interruptions = 0

    @property
    def interval(self) -> int:
        """Steps from one save to the next, now; 0 when epochs or time decide."""
        return _lightning.save_interval(self)

    @property
    @override
    def state_key(self) -> str:
        """Does not change when the interval does."""
        if not self._auto:
            return super().state_key
        return f"{type(self).__qualname__}{{'monitor': {self.monitor!r}, 'mode': {self.mode!r}, 'auto': True}}"

    @override
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._auto:
            state[_STATE] = {
                "steps": self.interval,
                "trained_s": self._trained_s + self._pace.total_s,
                "interruptions": self._interruptions,
            }
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the interval of the run; that it had to be resumed counts as an interruption."""
        super().load_state_dict(state_dict)
        if self._auto and (saved := state_dict.get(_STATE)):
            _lightning.set_save_interval(self, saved["steps"])
            self._trained_s = saved["trained_s"]
            self._interruptions = saved["interruptions"] + 1

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._trained_s += self._pace.total_s
        self._pace = Pace()
        self._pace.tick(trainer.global_step, time.monotonic(), busy=False)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Save when it is due, and then look whether the interval is still right."""
        if not self._auto:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            return
        stepped = self._pace.tick(trainer.global_step, began := time.monotonic(), busy=_is_busy(trainer))
        saved_before = _lightning.last_saved_step(self)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if _lightning.last_saved_step(self) != saved_before:
            self._stalls_s.append(time.monotonic() - began)
            self._pace.pause(time.monotonic())
        if stepped and trainer.global_step % self.interval == 0:
            self._agree(trainer)

    def advice(self, trainer: Trainer) -> IntervalAdvice | None:
        """What this rank's measurements say; None while there are not enough."""
        plugin = trainer.strategy.checkpoint_io
        stalls_s, writes_s = self._stalls_s, self._stalls_s
        if isinstance(plugin, AsyncCheckpointIO):
            stalls_s = [report.stall_s for report in plugin.history]
            writes_s = [report.durable_s for report in plugin.history if report.durable_s is not None]
        mtbf_s = mean_time_between_faults_s(
            self._trained_s + self._pace.total_s, self._interruptions, self._assumed_mtbf_s
        )
        slowdown = self._pace.slowdown() * (writes_s[-1] if writes_s else 0.0)
        return advice_from(stalls_s, writes_s, mtbf_s, slowdown)

    def _agree(self, trainer: Trainer) -> None:
        """Rank 0's measurements decide for all; every rank comes here at the same steps."""
        before = self.interval
        advice = self.advice(trainer) if trainer.is_global_zero else None
        wanted = next_interval(before, advice, self._pace.step_s()) if trainer.is_global_zero else before
        agreed = int(trainer.strategy.broadcast(wanted))
        if agreed == before:
            return
        _lightning.set_save_interval(self, agreed)
        if advice is not None:
            log.info(
                "checkpoints every %d steps from now on, every %d until now: a save costs %.3g s and takes %.3g s, a"
                " step takes %.3g s, faults are taken to come every %s",
                *(agreed, before, advice.cost_s, advice.write_s, self._pace.step_s(), duration(advice.mtbf_s)),
            )


def _is_busy(trainer: Trainer) -> bool:
    plugin = trainer.strategy.checkpoint_io
    return isinstance(plugin, AsyncCheckpointIO) and plugin.is_busy
