"""All of `fit`, guarded from the moment its engine is there: faults while setting up lead back to the beginning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from lightning_resilience.errors import RestartSignal
from lightning_resilience.restart.engine import RestartEngine

_T = TypeVar("_T")


def run_from_the_start(fit: Callable[[], _T], engine: Callable[[], RestartEngine | None]) -> _T:
    """Run `fit`; after each fault that can be recovered from and comes before training, again. Main thread.

    Args:
        fit: Sets up, which may make the engine, and trains, which guards itself.
        engine: The engine, as soon as there is one.

    Raises:
        RestartError: The fault of another rank ends the run.
        BaseException: What `fit` raised, if it is not retried, keeps coming back, or comes when nothing is guarded.
    """
    run = fit
    while True:
        error: BaseException
        try:
            try:
                result = run()
                _leave(engine())
                return result
            except BaseException as caught:  # judged below
                error = caught
                _leave(engine())
        except RestartSignal as signal:  # while leaving
            error = signal
            _leave(engine())
        made = engine()
        if made is None:
            raise error
        run = partial(made.begin_again, made.recover_setup(error), fit)
        del error  # it holds every frame that it came through, and what these hold


def _leave(engine: RestartEngine | None) -> None:
    if engine is not None:
        engine.leave()
