"""Where `fit` began: what setting up changes, so that it can be done again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning.pytorch import Trainer

from lightning_resilience import _lightning, _torch_groups
from lightning_resilience.data.commits import Parts, keep_modules, keep_trainer
from lightning_resilience.data.keeping import Copies
from lightning_resilience.data.position import generators_of
from lightning_resilience.data.rng import capture_rng_live, restore_rng
from lightning_resilience.sharding.blueprint import Blueprint


class Beginning:
    """Made when process groups are there and no hook of the user has run. Main thread.

    Until the models of all ranks are set up, the model is brought back to what it was before. From then on what was
    set up stays: to hold the whole model any longer would take its memory.

    Args:
        trainer: About to set up.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._generators = generators_of(_lightning.given_loaders(trainer))
        self._rng = capture_rng_live(self._generators)
        self._around = list(keep_trainer(trainer, Parts.of(trainer), Copies()))
        self._model = _Model(trainer, built=False)
        self._rng_when_built: dict[str, Any] | None = None

    @property
    def built(self) -> bool:
        """Whether the models of all ranks are set up."""
        return self._rng_when_built is not None

    def model_is_built(self) -> None:
        """All ranks have set up their models. Every time they have: what was drawn for that may differ."""
        if self._rng_when_built is None:
            self._rng_when_built = capture_rng_live(self._generators)
            self._model = _Model(self._trainer, built=True)
        else:
            restore_rng(self._rng_when_built, self._generators)

    def groups(self, *, built: bool) -> Collection[str]:
        """Names of the process groups there were; with `built` those that the model may use too."""
        return self._model.groups if self.built or not built else _torch_groups.live_names()

    def put_back(self, *, built: bool) -> None:
        """Begin again. With `built`, the model stays as it was when it was set up."""
        _lightning.abandon_fit(self._trainer)
        if built and not self.built:  # interrupted on the way out of setting up the model
            self.model_is_built()
        self._model.put_back()
        for part in self._around:
            part()
        restore_rng(self._rng, self._generators)

    def put_back_model(self) -> None:
        """Undo what hooks have done to a model that was set up before they ran again."""
        if self.built:
            self._model.put_back()


class _Model:
    """The model at one moment."""

    def __init__(self, trainer: Trainer, *, built: bool) -> None:
        self._blueprint = Blueprint(trainer.lightning_module, with_memory=not built)
        self._state = keep_modules(Parts.of(trainer), Copies())
        self.groups = frozenset(_torch_groups.live_names())

    def put_back(self) -> None:
        self._blueprint.put_back()
        self._state()
