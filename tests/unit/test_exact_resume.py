"""A run resumed from a checkpoint goes on as if it had never stopped: every number equal, bit for bit."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_resilience.data import capture_rank_state, install, stash_rank_state
from lightning_resilience.data.rng import capture_rng
from lightning_resilience.errors import ConfigurationError, LoadError
from tests.unit.resume_runs import (
    LOADERS,
    PER_EPOCH,
    ExactStrategy,
    Net,
    Run,
    Samples,
    SaveAt,
    SizedStream,
    StatefulLoader,
    UnsizedStatefulLoader,
    fit,
    seed_all,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*`IterableDataset` has `__len__` defined.*"),
    # ``DataLoader`` workers are forked while torch has threads; Python 3.12 on warns about it.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]
impatient = pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric:RuntimeWarning")
costs = pytest.mark.filterwarnings("ignore:Resuming. .* are loaded again and dropped:UserWarning")

When = Callable[[pl.Trainer], bool]


def last_batch_of_second_epoch(trainer: pl.Trainer) -> bool:
    return trainer.is_last_batch and trainer.current_epoch == 1


POINTS: dict[str, tuple[str, When]] = {
    "first_step": ("on_train_batch_end", lambda trainer: trainer.global_step >= 1),
    "mid_epoch": ("on_train_batch_end", lambda trainer: trainer.global_step >= 4 and trainer.current_epoch == 1),
    "last_batch": ("on_train_batch_end", last_batch_of_second_epoch),
    "validation_batch_end": ("on_validation_batch_end", lambda trainer: trainer.global_step >= 3),
    "validation_end": ("on_validation_end", lambda trainer: trainer.global_step >= 3),
    "epoch_end": ("on_train_epoch_end", lambda trainer: trainer.current_epoch == 0),
    "epoch_start": ("on_train_epoch_start", lambda trainer: trainer.current_epoch == 1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 2},
    "validate_often": {"val_check_interval": 2},
    "validate_across_epochs": {"val_check_interval": 4, "check_val_every_n_epoch": None},
    "limited": {"limit_train_batches": 4},
    "max_steps": {"max_steps": 15, "max_epochs": -1},
    "plateau_epoch": {"scheduler": "plateau_epoch"},
    "plateau_step": {"scheduler": "plateau_step", "val_check_interval": 2},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
}
CASES = [
    *((loader, "plain", point) for loader in LOADERS for point in POINTS),
    *(("random", options, point) for options in OPTIONS if options != "plain" for point in POINTS),
    *(("unsized_stateful", options, "mid_epoch") for options in OPTIONS if options != "plain"),
    *(("persistent", options, "last_batch") for options in ("limited", "reload")),
]

_checkpoints = TemporaryDirectory(prefix="exact-resume-")


@pytest.fixture(scope="module", autouse=True)
def _forget_checkpoints() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small to be worth more
    yield
    torch.set_num_threads(threads)
    uninterrupted.cache_clear()
    _checkpoints.cleanup()


@cache
def uninterrupted(loader: str, options: str) -> tuple[Run, dict[str, SaveAt]]:
    """A run from start to end that leaves a checkpoint at every point; saving does not disturb it (tested below)."""
    folder = Path(_checkpoints.name) / f"{loader}-{options}"
    saves = {point: SaveAt(folder / f"{point}.ckpt", *where) for point, where in POINTS.items()}
    return fit(LOADERS[loader](), callbacks=list(saves.values()), **OPTIONS[options]), saves


def ending_of(numbers: list[Any], length: int) -> list[Any]:
    return numbers[len(numbers) - length :]


def assert_continues(resumed: Run, whole: Run, after: int | None) -> None:
    """``resumed`` did exactly what ``whole`` did after its first ``after`` batches."""
    assert after is not None
    assert resumed.model.losses == whole.model.losses[after:]
    assert resumed.model.losses or after == len(whole.model.losses)
    validations = resumed.model.validations
    assert validations
    assert validations == ending_of(whole.model.validations, len(validations))
    assert resumed.logger.logged == ending_of(whole.logger.logged, len(resumed.logger.logged))
    for mine, theirs in zip(resumed.weights(), whole.weights(), strict=True):
        assert torch.equal(mine, theirs)
    assert resumed.trainer.global_step == whole.trainer.global_step
    assert resumed.trainer.current_epoch == whole.trainer.current_epoch


@costs
@impatient
@pytest.mark.parametrize(("loader", "options", "point"), CASES)
def test_resumed_run_equals_uninterrupted_run(loader: str, options: str, point: str) -> None:
    whole, saves = uninterrupted(loader, options)
    resumed = fit(LOADERS[loader](), seed=99, ckpt_path=saves[point].path, **OPTIONS[options])
    assert_continues(resumed, whole, saves[point].saved_after)


@pytest.mark.parametrize("loader", LOADERS)
def test_without_a_checkpoint_the_run_equals_lightnings_own(loader: str) -> None:
    ours, _ = uninterrupted(loader, "plain")
    stock = fit(LOADERS[loader](), strategy=SingleDeviceStrategy(device="cpu"))
    assert type(stock.trainer.fit_loop) is _FitLoop
    assert ours.model.losses == stock.model.losses
    assert ours.logger.logged == stock.logger.logged
    assert all(torch.equal(a, b) for a, b in zip(ours.weights(), stock.weights(), strict=True))


@pytest.mark.parametrize("options", ["reload", "validate_often", "max_steps"])
def test_random_numbers_after_the_run_are_lightnings_own(options: str) -> None:
    fit(LOADERS["random"](), **OPTIONS[options])
    ours = capture_rng()
    fit(LOADERS["random"](), strategy=SingleDeviceStrategy(device="cpu"), **OPTIONS[options])
    assert torch.equal(ours["torch"], capture_rng()["torch"])


def test_no_sample_is_loaded_again() -> None:
    _, saves = uninterrupted("random", "plain")
    samples = Samples()
    loader = DataLoader(samples, batch_size=2, shuffle=True)
    fit(loader, seed=99, ckpt_path=saves["mid_epoch"].path, max_epochs=2)
    after = saves["mid_epoch"].saved_after
    assert after is not None
    assert len(samples.loaded) == 2 * (2 * PER_EPOCH - after)


class RecordingSamples(Samples):
    """Writes what it loads to a file, because workers are other processes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.path.open("a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


def estimating() -> Net:
    """A model that asks for the number of steps before the checkpoint is restored, as many schedulers do."""
    model = Net()
    configure = model.configure_optimizers

    def configure_optimizers() -> Any:
        assert model.trainer.estimated_stepping_batches == 2 * PER_EPOCH
        return configure()

    model.configure_optimizers = configure_optimizers  # type: ignore[method-assign]  # for this one object
    return model


@pytest.mark.parametrize("make", [Net, estimating])
def test_workers_load_no_sample_again(tmp_path: Path, make: Callable[[], Net]) -> None:
    _, saves = uninterrupted("workers", "plain")
    samples = RecordingSamples(tmp_path / "loaded")
    loader = DataLoader(samples, batch_size=2, shuffle=True, num_workers=2)
    path = saves["mid_epoch"].path
    resumed = fit(loader, seed=99, ckpt_path=path, max_epochs=2, make=make)
    assert len(samples.path.read_text().split()) == 2 * len(resumed.model.losses)


@pytest.mark.parametrize("loader", ["random", "workers", "stateful"])
def test_asking_for_the_number_of_steps_changes_nothing(loader: str, tmp_path: Path) -> None:
    save = SaveAt(tmp_path / "a.ckpt", *POINTS["mid_epoch"])
    whole = fit(LOADERS[loader](), make=estimating, callbacks=[save], max_epochs=2)
    resumed = fit(LOADERS[loader](), seed=99, make=estimating, ckpt_path=save.path, max_epochs=2)
    assert_continues(resumed, whole, save.saved_after)


def test_iterable_without_state_says_what_it_costs() -> None:
    _, saves = uninterrupted("unsized", "plain")
    with pytest.warns(UserWarning, match="batches of DataLoader are loaded again and dropped.*takes as long as"):
        fit(LOADERS["unsized"](), seed=99, ckpt_path=saves["mid_epoch"].path)


def test_pending_validation_is_run() -> None:
    """Lightning's own loop skips it: the checkpoint was written just before."""
    whole, saves = uninterrupted("random", "validate_often")
    assert saves["mid_epoch"].saved_after == 7  # one batch into the epoch: validation comes after the next one
    save = SaveAt(saves["mid_epoch"].path.with_name("due.ckpt"), "on_train_batch_end", lambda t: t.global_step == 8)
    again = fit(LOADERS["random"](), callbacks=[save], **OPTIONS["validate_often"])
    assert again.model.validations == whole.model.validations
    resumed = fit(LOADERS["random"](), seed=99, ckpt_path=save.path, **OPTIONS["validate_often"])
    assert [step for step, _ in resumed.model.validations][:2] == [8, 8]
    assert_continues(resumed, whole, 8)


class Crash(pl.Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.at:
            raise RuntimeError("crash")


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
def test_several_crashes_in_a_row(tmp_path: Path) -> None:
    """With Lightning's own checkpoint callback; each run resumes from what the one before left."""
    whole, _ = uninterrupted("random", "plain")
    losses: dict[int, float] = {}
    path: Path | None = None
    for attempt, crash in enumerate((5, 10, 14)):
        saves = ModelCheckpoint(tmp_path / str(attempt), save_top_k=-1, every_n_train_steps=2, filename="{step}")
        models: list[Net] = []

        def make(models: list[Net] = models) -> Net:
            models.append(Net())
            return models[0]

        with pytest.raises(RuntimeError, match="crash"):
            fit(
                LOADERS["random"](),
                seed=attempt + 1,
                callbacks=[saves, Crash(crash)],
                ckpt_path=path,
                make=make,
            )
        first = 0 if path is None else int(path.stem.removeprefix("step="))
        losses.update({first + i: loss for i, (_, _, loss) in enumerate(models[0].losses)})
        path = Path(saves.best_model_path)
    resumed = fit(LOADERS["random"](), seed=99, ckpt_path=path)
    losses.update({14 + i: loss for i, (_, _, loss) in enumerate(resumed.model.losses)})
    assert [losses[step] for step in range(18)] == [loss for _, _, loss in whole.model.losses]
    assert_continues(resumed, whole, 14)


@pytest.mark.parametrize("loader", ["random", "persistent", "stateful", "unsized_stateful"])
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end"])
def test_longer_run_goes_on_in_the_epoch_that_max_steps_cut_short(loader: str, hook: str, tmp_path: Path) -> None:
    class Quiet(Net):
        def on_train_epoch_end(self) -> None:  # the longer run has no epoch end here
            pass

    options = OPTIONS["max_steps"]
    whole = fit(LOADERS[loader](), make=Quiet, **options)
    save = SaveAt(tmp_path / "a.ckpt", hook, lambda trainer: trainer.global_step == 9)
    fit(LOADERS[loader](), make=Quiet, callbacks=[save], **{**options, "max_steps": 9})
    resumed = fit(LOADERS[loader](), seed=99, make=Quiet, ckpt_path=save.path, **options)
    assert [step[:2] for step in resumed.model.losses][:4] == [(1, 3), (1, 4), (1, 5), (2, 0)]
    assert resumed.model.losses == whole.model.losses[9:]


@pytest.mark.parametrize("limit", ["max_steps", "max_epochs"])
def test_a_run_that_had_ended_says_that_there_is_nothing_to_do(
    limit: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = "The run had already reached {} where it is resumed: nothing to do."
    save, loader = SaveAt(tmp_path / "a.ckpt", "on_train_end", lambda trainer: True), LOADERS["sequential"]
    options: dict[str, Any] = {"max_steps": 9} if limit == "max_steps" else {"max_epochs": 2}
    with caplog.at_level(logging.INFO):
        fit(loader(), callbacks=[save], **options)
        assert "nothing to do" not in caplog.text
        resumed = fit(loader(), seed=99, ckpt_path=save.path, **options)
    assert resumed.model.losses == []
    assert told.format(f"{limit}={options[limit]}") in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert fit(loader(), seed=99, ckpt_path=save.path, max_epochs=4).model.losses
    assert "nothing to do" not in caplog.text


@pytest.mark.parametrize("point", ["mid_epoch", "last_batch", "epoch_end"])
def test_checkpoint_without_rank_state_keeps_the_position(
    point: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, saves = uninterrupted("sequential", "plain")
    save = SaveAt(tmp_path / "stock.ckpt", *POINTS[point])
    fit(LOADERS["sequential"](), strategy=SingleDeviceStrategy(device="cpu"), callbacks=[save])
    samples = Samples()
    with caplog.at_level(logging.INFO, logger="lightning_resilience"):
        resumed = fit(DataLoader(samples, batch_size=2), ckpt_path=save.path)
    after = saves[point].saved_after
    assert after is not None
    assert [step[:2] for step in resumed.model.losses] == [step[:2] for step in whole.model.losses[after:]]
    skipped = after % PER_EPOCH
    assert samples.loaded[:2] == [2 * skipped, 2 * skipped + 1]
    assert [r.message for r in caplog.records if "random number generators were not restored" in r.message]


@pytest.mark.parametrize(("ranks", "same"), [(2, True), (0, False)])
def test_another_number_of_ranks(ranks: int, same: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of more ranks each goes on with the random numbers of its number; of fewer (here none) nobody does."""
    _, saves = uninterrupted("sequential", "plain")
    checkpoint = torch.load(saves["mid_epoch"].path, weights_only=False)
    checkpoint["rank_state"]["world_size"] = ranks
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with caplog.at_level(logging.INFO, logger="lightning_resilience"):
        one = fit(LOADERS["sequential"](), seed=5, ckpt_path=tmp_path / "other.ckpt")
        other = fit(LOADERS["sequential"](), seed=6, ckpt_path=tmp_path / "other.ckpt")
    assert [step[:2] for step in one.model.losses] == [step[:2] for step in other.model.losses]
    assert (one.model.losses == other.model.losses) is same
    said = [record.message for record in caplog.records if record.name.startswith("lightning_resilience")]
    assert f"written by {ranks} ranks and is resumed by 1" in said[0]
    assert "samples may be seen twice or not at all" in said[1]


def test_rank_state_is_plain(tmp_path: Path) -> None:
    whole, _ = uninterrupted("generator", "plain")
    torch.save(capture_rank_state(whole.trainer), tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    assert loaded["rank"] == 0
    assert loaded["epoch_start"]["epoch"] == 2


def test_unused_rank_state_does_not_reach_the_next_fit() -> None:
    """Validating from a checkpoint loads it too; a later fit from scratch must not use its state."""
    whole, saves = uninterrupted("random", "plain")
    strategy = ExactStrategy()
    first = fit(LOADERS["random"](), strategy=strategy, max_epochs=0)
    path = saves["mid_epoch"].path
    first.trainer.validate(first.model, DataLoader(Samples(4), batch_size=2), path, verbose=False, weights_only=False)
    first.trainer.fit_loop.max_epochs = 3
    seed_all(1)
    model = Net()
    first.trainer.fit(model, LOADERS["random"](), DataLoader(Samples(4), batch_size=2))
    assert model.losses == whole.model.losses


def test_second_fit_of_the_same_trainer_equals_lightnings_own() -> None:
    def twice(strategy: Any) -> Run:
        run = fit(LOADERS["random"](), strategy=strategy, max_epochs=1)
        run.trainer.fit_loop.max_epochs = 2
        run.trainer.fit(run.model, LOADERS["random"](), DataLoader(Samples(4), batch_size=2))
        return run

    ours, stock = twice(ExactStrategy()), twice(SingleDeviceStrategy(device="cpu"))
    assert len(stock.model.losses) == 2 * PER_EPOCH
    assert ours.model.losses == stock.model.losses


def test_other_functions_of_the_trainer_are_unaffected() -> None:
    def use(strategy: Any) -> list[Any]:
        run = fit(LOADERS["random"](), strategy=strategy, max_epochs=1)
        results = run.trainer.validate(run.model, DataLoader(Samples(4), batch_size=2), verbose=False)
        return [results, run.model.validations]

    assert use(ExactStrategy()) == use(SingleDeviceStrategy(device="cpu"))


def test_install_keeps_limits_and_is_idempotent() -> None:
    trainer = pl.Trainer(min_epochs=2, max_epochs=7, min_steps=3, max_steps=50, logger=False, accelerator="cpu")
    install(trainer)
    loop = trainer.fit_loop
    install(trainer)
    assert trainer.fit_loop is loop
    assert (trainer.min_epochs, trainer.max_epochs, trainer.min_steps, trainer.max_steps) == (2, 7, 3, 50)


def test_install_refuses_a_custom_loop() -> None:
    class Custom(_FitLoop):
        pass

    trainer = pl.Trainer(logger=False, accelerator="cpu")
    trainer.fit_loop = Custom(trainer)
    with pytest.raises(ConfigurationError, match="Custom"):
        install(trainer)
    with pytest.raises(ConfigurationError, match="install"):
        stash_rank_state(trainer, None)


def test_states_of_other_loaders_are_refused(tmp_path: Path) -> None:
    _, saves = uninterrupted("stateful", "plain")
    loaders = CombinedLoader([StatefulLoader(), StatefulLoader()], "min_size")
    with pytest.raises(LoadError, match="states of 1 training data loaders, but 2"):
        fit(loaders, ckpt_path=saves["mid_epoch"].path, make=Pairs)


class Pairs(Net):
    """Takes the mean over several loaders."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(torch.stack(batch).mean(0), batch_idx)


@pytest.mark.parametrize("point", ["mid_epoch", "last_batch", "epoch_end"])
@costs
def test_several_loaders(point: str, tmp_path: Path) -> None:
    def loaders() -> CombinedLoader:
        streams = DataLoader(SizedStream(), batch_size=2)
        return CombinedLoader([LOADERS["random"](), LOADERS["workers"](), UnsizedStatefulLoader(), streams], "min_size")

    save = SaveAt(tmp_path / "a.ckpt", *POINTS[point])
    whole = fit(loaders(), make=Pairs, callbacks=[save], max_epochs=2)
    resumed = fit(loaders(), seed=99, make=Pairs, ckpt_path=save.path, max_epochs=2)
    assert_continues_without_validation(resumed, whole, save.saved_after)


def assert_continues_without_validation(resumed: Run, whole: Run, after: int | None) -> None:
    assert after is not None
    assert resumed.model.losses == whole.model.losses[after:]
    assert all(torch.equal(a, b) for a, b in zip(resumed.weights(), whole.weights(), strict=True))


class Metered(Net):
    """Gathers over the epoch in all the ways there are, and lets the results decide about training."""

    def __init__(self) -> None:
        super().__init__(scheduler="plateau_epoch")
        self.logged_mean, self.manual_mean = MeanMetric(), MeanMetric()
        self.validation_mean = MeanMetric()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.logged_mean(loss.detach())
        self.log("logged_mean", self.logged_mean)
        self.manual_mean.update(loss.detach())
        self.log("largest", loss.detach(), reduce_fx="max", on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validation_mean(batch.mean())
        self.log("validation_mean", self.validation_mean)

    def on_train_epoch_end(self) -> None:
        self.log("manual_mean", self.manual_mean.compute())
        self.manual_mean.reset()


@pytest.mark.parametrize("point", POINTS)
def test_averages_over_an_epoch_cover_all_of_it(point: str, tmp_path: Path) -> None:
    save = SaveAt(tmp_path / "a.ckpt", *POINTS[point])

    def stop() -> EarlyStopping:
        return EarlyStopping("manual_mean", patience=20, check_on_train_epoch_end=True)

    options: dict[str, Any] = {"val_check_interval": 3}
    whole = fit(LOADERS["random"](), make=Metered, callbacks=[stop(), save], **options)
    resumed = fit(
        LOADERS["random"](),
        seed=99,
        make=Metered,
        callbacks=[stop()],
        ckpt_path=save.path,
        **options,
    )
    assert "manual_mean" in resumed.trainer.callback_metrics
    assert_continues(resumed, whole, save.saved_after)


def test_resuming_warns_about_nothing() -> None:
    _, saves = uninterrupted("random", "plain")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*LeafSpec.*")
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        fit(LOADERS["random"](), seed=99, ckpt_path=saves["mid_epoch"].path)
