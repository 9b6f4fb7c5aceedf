"""All of `fit` runs again after a fault in its beginning; with an engine that only notes what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from lightning_resilience.errors import RestartSignal
from lightning_resilience.restart.engine import RestartEngine
from lightning_resilience.restart.from_the_start import run_from_the_start


class Engine:
    def __init__(self, *, interrupts_leaving: bool = False) -> None:
        self.recovered: list[BaseException] = []
        self._interrupts_leaving = interrupts_leaving

    def leave(self) -> None:
        if self._interrupts_leaving:
            self._interrupts_leaving = False
            raise RestartSignal

    def recover_setup(self, error: BaseException) -> Any:
        if isinstance(error, KeyError):
            raise error
        self.recovered.append(error)

    def begin_again(self, incident: object, fit: Callable[[], Any]) -> Any:
        return fit()


def run(engine: Engine | None, *outcomes: object) -> object:
    left = iter(outcomes)

    def fit() -> object:
        outcome = next(left)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return run_from_the_start(fit, lambda: cast("RestartEngine | None", engine))


def test_it_runs_until_it_works() -> None:
    engine, faults = Engine(), (OSError("a"), RestartSignal("b"))
    assert run(engine, *faults, "done") == "done"
    assert engine.recovered == list(faults)


def test_without_an_engine_nothing_is_tried_again() -> None:
    with pytest.raises(OSError, match="a"):
        run(None, OSError("a"), "done")


def test_a_verdict_ends_it() -> None:
    with pytest.raises(KeyError):
        run(Engine(), OSError("a"), KeyError("b"), "done")


def test_an_interruption_while_leaving_is_one() -> None:
    engine = Engine(interrupts_leaving=True)
    assert run(engine, OSError("a"), "done") == "done"
    assert [type(error) for error in engine.recovered] == [RestartSignal]
