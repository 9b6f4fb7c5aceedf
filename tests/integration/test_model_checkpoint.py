"""`ModelCheckpoint` with saves that are committed later, or never: it names what is there, and all that is there."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader, Dataset

from lightning_resilience import AsyncCheckpointIO
from lightning_resilience.errors import SaveError

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice about tiny runs

SCORES = [0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9, 0.25]


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return len(SCORES)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.log("score", SCORES[self.global_step % len(SCORES)])
        loss: torch.Tensor = self.layer(batch).mean()
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val", SCORES[self.global_step % len(SCORES)])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Uploads(Logger):
    """A logger that uploads what a callback names, as those of WandB, Neptune, MLFlow and Comet do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.finished: list[str] = []

    @property
    def name(self) -> str:
        return "uploads"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        named = {checkpoint_callback.best_model_path, *checkpoint_callback.best_k_models}
        for path in sorted(named | {checkpoint_callback.last_model_path} - {""}):
            torch.load(path, weights_only=True)
            self.seen.append(os.path.basename(path))

    def finalize(self, status: str) -> None:
        self.finished.append(status)


class Storage(L.Callback):
    """Stops and continues the writer process before given steps, and watches the books after each."""

    def __init__(self, stop: int = -1, resume: int = -1) -> None:
        self.stop, self.resume = stop, resume
        self.named: list[list[str]] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        plugin = trainer.strategy.checkpoint_io
        assert isinstance(plugin, AsyncCheckpointIO)
        if trainer.global_step in (self.stop, self.resume):
            assert plugin._engine is not None
            signum = signal.SIGSTOP if trainer.global_step == self.stop else signal.SIGCONT
            os.kill(plugin._engine.writer_pid, signum)
        self.watch(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.watch(trainer)

    def watch(self, trainer: L.Trainer) -> None:
        for callback in trainer.checkpoint_callbacks:
            assert isinstance(callback, ModelCheckpoint)
            named = names(callback)
            missing = [path for path in named if not os.path.exists(path)]
            assert not missing, f"step {trainer.global_step}: named, but not there: {missing}"
            self.named.append([os.path.basename(path) for path in named])


def names(callback: ModelCheckpoint) -> list[str]:
    return sorted({callback.best_model_path, callback.last_model_path, *callback.best_k_models} - {""})


def fit(plugin: AsyncCheckpointIO | None, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[plugin] if plugin else None,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"max_epochs": 1, "logger": False, **options},
    )
    loaders: dict[str, Any] = (
        {"val_dataloaders": DataLoader(Rows(), batch_size=5)} if options.get("limit_val_batches") else {}
    )
    trainer.fit(Model(), DataLoader(Rows(), batch_size=1), **loaders)
    return trainer


def steps(directory: Path) -> dict[str, int]:
    """The step in each file, and where links point to."""
    found = {}
    for path in directory.iterdir():
        found[path.name] = torch.load(path, weights_only=True)["global_step"]
        if path.is_symlink():
            found[f"{path.name} -> {os.readlink(path)}"] = -1
    return found


# --- fast storage: as stock Lightning ----------------------------------------------------------------------

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top 2": ({"monitor": "score", "save_top_k": 2, "every_n_train_steps": 1}, {}),
    "top 3, max, last": (
        {"monitor": "score", "mode": "max", "save_top_k": 3, "every_n_train_steps": 1, "save_last": True},
        {},
    ),
    "all": ({"save_top_k": -1, "every_n_train_steps": 3}, {}),
    "newest": ({"every_n_train_steps": 2}, {}),
    "newest, link": ({"every_n_train_steps": 2, "save_last": "link"}, {}),
    "all, link": ({"every_n_train_steps": 3, "save_top_k": -1, "save_last": "link"}, {}),  # lightning 21110
    "only last": ({"save_top_k": 0, "save_last": True}, {"max_epochs": 2}),
    "top 1, link": ({"monitor": "score", "every_n_train_steps": 1, "save_last": "link"}, {}),
    "every 2 epochs": ({"every_n_epochs": 2, "save_top_k": -1}, {"max_epochs": 5, "limit_train_batches": 2}),
    "at the end of the epoch": (
        {"save_on_train_epoch_end": True, "monitor": "score", "save_top_k": 2},
        {"max_epochs": 4, "limit_train_batches": 3, "limit_val_batches": 1},
    ),
    "after validation": (
        {"save_on_train_epoch_end": False, "monitor": "val", "save_top_k": 2, "save_last": True},
        {"max_epochs": 4, "limit_train_batches": 3, "limit_val_batches": 1},
    ),
    "by the clock": ({"train_time_interval": timedelta(0), "save_top_k": -1}, {}),
    "the same name": ({"filename": "{epoch}", "monitor": "score", "save_top_k": 2, "every_n_train_steps": 1}, {}),
    "last with a metric": ({"every_n_train_steps": 2, "save_last": True, "filename": "{step}-{score:.1f}"}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_and_named_is_what_stock_lightning_leaves_and_names(kind: str, tmp_path: Path) -> None:
    arguments, options = KINDS[kind]

    def result(name: str, plugin: AsyncCheckpointIO | None) -> Any:
        callback = ModelCheckpoint(tmp_path / name, **arguments)
        fit(plugin, callback, **options)
        books = [os.path.relpath(path, tmp_path / name) for path in names(callback)]
        best = os.path.basename(callback.best_model_path)
        score = None if callback.best_model_score is None else float(callback.best_model_score)
        return steps(tmp_path / name), books, best, score

    assert result("ours", AsyncCheckpointIO(on_busy="wait")) == result("stock", None)


def test_two_callbacks_share_the_plugin_and_keep_their_own_books(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "a", monitor="score", save_top_k=2, every_n_train_steps=1)
    second = ModelCheckpoint(tmp_path / "b", every_n_train_steps=3, save_top_k=-1)
    fit(AsyncCheckpointIO(on_busy="wait"), first, second, watch := Storage())
    assert sorted(os.listdir(tmp_path / "a")) == sorted(map(os.path.basename, first.best_k_models))
    assert len(first.best_k_models) == 2
    assert sorted(steps(tmp_path / "b").values()) == [3, 6, 9]
    assert watch.named


def test_consecutive_steps_and_the_last_one_are_saved(tmp_path: Path) -> None:
    """torchtitan 1773."""
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, save_last=True)
    fit(AsyncCheckpointIO(on_busy="wait"), callback, max_steps=7, max_epochs=-1)
    assert sorted(steps(tmp_path).values()) == [1, 2, 3, 4, 5, 6, 7, 7]


# --- slow storage ------------------------------------------------------------------------------------------


def test_while_storage_hangs_nothing_is_named_that_is_not_there(tmp_path: Path) -> None:
    """The writer stands still from step 3 to step 8. Lightning 14035, 17915; composer 3376."""
    plugin, uploads, storage = AsyncCheckpointIO(), Uploads(), Storage(stop=3, resume=8)
    callback = ModelCheckpoint(
        tmp_path, monitor="score", save_top_k=2, every_n_train_steps=1, save_last="link", filename="{step}"
    )
    fit(plugin, callback, storage, logger=uploads)
    outcomes = {report.step: report.outcome for report in plugin.history}
    assert "replaced" in outcomes.values()
    assert outcomes[len(SCORES)] == "saved" if len(SCORES) in outcomes else True
    left = {name for name in os.listdir(tmp_path) if name != "last.ckpt"}
    assert left == {os.path.basename(path) for path in callback.best_k_models}
    assert len(left) == 2
    assert os.path.basename(os.readlink(tmp_path / "last.ckpt")) in left
    assert callback.best_model_path in callback.best_k_models
    assert uploads.seen
    assert uploads.finished == ["success"]


@pytest.mark.parametrize("on_busy", ["latest", "skip"])
def test_newest_only_on_slow_storage_leaves_one_and_it_is_the_last_state(on_busy: Any, tmp_path: Path) -> None:
    plugin, storage = AsyncCheckpointIO(on_busy=on_busy), Storage(stop=2, resume=8)
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}")
    fit(plugin, callback, storage)
    assert steps(tmp_path) == {"step=10.ckpt": 10}
    assert callback.best_model_path == str(tmp_path / "step=10.ckpt")
    assert plugin.counts.replaced + plugin.counts.skipped >= 4


def test_an_explicit_save_and_that_at_the_end_are_never_dropped(tmp_path: Path) -> None:
    class Explicit(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "explicit.ckpt")

    plugin, storage = AsyncCheckpointIO(slots=3), Storage(stop=3, resume=9)
    callback = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1, save_top_k=-1)
    fit(plugin, callback, storage, Explicit())
    assert torch.load(tmp_path / "explicit.ckpt", weights_only=True)["global_step"] == 5
    assert 10 in steps(tmp_path / "c").values()
    assert plugin.counts.replaced > 0
    assert plugin.counts.waited_s == 0


# --- saves that fail ---------------------------------------------------------------------------------------


def blocked(directory: Path, *names: int) -> Path:
    """A directory where the checkpoints of some steps cannot be written: a file is in the way."""
    directory.mkdir()
    for name in names:
        (directory / f"step={name}").write_text("in the way")
    return directory


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.ckpt"))


def test_a_save_that_fails_gives_its_place_among_the_best_back(tmp_path: Path) -> None:
    """Steps 4 and 6 would be the best by then; what they displaced is kept and named again."""
    directory = blocked(tmp_path / "c", 4, 6)
    callback = ModelCheckpoint(
        directory,
        monitor="score",
        save_top_k=2,
        every_n_train_steps=1,
        filename="{step}/model",
        enable_version_counter=False,
    )
    plugin = AsyncCheckpointIO(on_busy="wait")
    fit(plugin, callback, Storage(), max_steps=8)
    assert plugin.counts.failed == 2
    assert files(directory) == ["step=2/model.ckpt", "step=8/model.ckpt"]
    assert [os.path.relpath(path, directory) for path in names(callback)] == files(directory)
    assert callback.best_model_path == str(directory / "step=8" / "model.ckpt")
    assert callback.best_model_score == pytest.approx(0.1)


def test_newest_only_with_failures_in_between_leaves_the_newest(tmp_path: Path) -> None:
    directory = blocked(tmp_path / "c", 4, 5)
    callback = ModelCheckpoint(directory, every_n_train_steps=1, filename="{step}/model", save_last="link")
    fit(AsyncCheckpointIO(on_busy="wait"), callback, Storage(), max_steps=7)
    assert files(directory) == ["last.ckpt", "step=7/model.ckpt"]
    assert os.readlink(directory / "last.ckpt") == "step=7/model.ckpt"


def test_when_the_last_save_fails_fit_raises_and_names_what_is_there(tmp_path: Path) -> None:
    directory = blocked(tmp_path / "c", 7)
    callback = ModelCheckpoint(directory, every_n_train_steps=1, filename="{step}/model", save_last="link")
    with pytest.raises(SaveError, match=r"the last checkpoint, .*was not saved"):
        fit(AsyncCheckpointIO(on_busy="wait"), callback, max_steps=7)
    assert callback.best_model_path == str(directory / "step=6" / "model.ckpt")
    assert os.readlink(directory / "last.ckpt") == "step=6/model.ckpt"
    assert files(directory) == ["last.ckpt", "step=6/model.ckpt"]


def test_training_stops_after_so_many_failures_in_a_row(tmp_path: Path) -> None:
    directory = blocked(tmp_path / "c", *range(3, 11))
    callback = ModelCheckpoint(directory, every_n_train_steps=1, filename="{step}/model", save_top_k=-1)
    with pytest.raises(SaveError, match="2 checkpoints in a row were not saved"):
        fit(AsyncCheckpointIO(on_busy="wait", max_consecutive_failures=2), callback)
    assert callback.best_model_path == str(directory / "step=2" / "model.ckpt")


def test_an_exception_before_a_save_is_asked_for_leaves_no_trace_in_the_books(tmp_path: Path) -> None:
    """After a restart the callback does it again, and the same one is displaced."""

    class Disturbed(ModelCheckpoint):
        disturbed = False

        def file_exists(self, filepath: Any, trainer: L.Trainer) -> bool:
            if trainer.global_step == 6 and not self.disturbed:
                self.disturbed = True
                raise ConnectionError("no answer")
            return super().file_exists(filepath, trainer)

        def on_train_batch_end(self, *arguments: Any) -> None:
            try:
                super().on_train_batch_end(*arguments)
            except ConnectionError:
                super().on_train_batch_end(*arguments)

    callback = Disturbed(tmp_path, monitor="step", mode="max", save_top_k=2, every_n_train_steps=2, filename="{step}")
    fit(AsyncCheckpointIO(on_busy="wait"), callback, Storage(), max_steps=8)
    assert callback.disturbed
    assert files(tmp_path) == ["step=6.ckpt", "step=8.ckpt"]
    assert [os.path.relpath(path, tmp_path) for path in names(callback)] == files(tmp_path)


# --- runs that go on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{"monitor": "score", "save_top_k": 1}, {}], ids=["best", "newest"])
def test_the_checkpoint_resumed_from_stays_until_a_newer_one_is_committed(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    """Lightning 17189, 21813."""
    first = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}", **arguments)
    fit(AsyncCheckpointIO(on_busy="wait"), first, max_steps=4)
    resumed = first.best_model_path
    second = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}", **arguments)

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            assert any(name.endswith(".ckpt") for name in os.listdir(tmp_path))
            assert os.path.exists(resumed)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[AsyncCheckpointIO(on_busy="wait")],
        callbacks=[second, Watch()],
        max_steps=10,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(Rows(), batch_size=1), ckpt_path=resumed)
    assert all(os.path.exists(path) for path in names(second))


def test_books_from_a_checkpoint_lose_what_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = ModelCheckpoint(tmp_path, monitor="score", save_top_k=3, every_n_train_steps=1, filename="{step}")
    fit(AsyncCheckpointIO(on_busy="wait"), first, max_steps=4)
    gone = sorted(first.best_k_models)[0]
    resumed = tmp_path / "step=4.ckpt"
    assert str(resumed) != gone
    os.remove(gone)
    second = ModelCheckpoint(tmp_path, monitor="score", save_top_k=3, every_n_train_steps=1, filename="{step}")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[AsyncCheckpointIO(on_busy="wait")],
        callbacks=[second, watch := Storage()],
        max_steps=8,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(Rows(), batch_size=1), ckpt_path=str(resumed))
    assert f"forgets checkpoints that do not exist: {gone}" in caplog.text
    assert watch.named
    assert {os.path.basename(path) for path in second.best_k_models} == set(os.listdir(tmp_path))


def test_a_broken_link_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    """Lightning 19294: links are relative to their own directory, whatever the current one."""
    os.symlink("nowhere.ckpt", tmp_path / "last.ckpt")
    here = os.getcwd()
    os.chdir(tmp_path.parent)
    try:
        callback = ModelCheckpoint(tmp_path.name, every_n_train_steps=2, save_last="link", enable_version_counter=False)
        fit(AsyncCheckpointIO(), callback)
    finally:
        os.chdir(here)
    assert os.readlink(tmp_path / "last.ckpt") == os.path.basename(callback.best_model_path)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 10


def test_a_user_who_writes_into_the_books_is_heard(tmp_path: Path) -> None:
    class Writes(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                callback.best_model_path = "mine.ckpt"

    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}")
    fit(AsyncCheckpointIO(on_busy="wait"), callback, Writes())
    assert steps(tmp_path) == {"step=4.ckpt": 4, "step=10.ckpt": 10}
    assert callback.best_model_path.endswith("step=10.ckpt")
