"""Retention at work on a directory: what is deleted after a commit, and what never is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_resilience import AsyncCheckpointIO, KeepEvery, KeepLatest
from lightning_resilience.checkpoint.messages import Retain
from lightning_resilience.checkpoint.removal import retain
from lightning_resilience.checkpoint.retention import encode_policies
from lightning_resilience.errors import ConfigurationError
from lightning_resilience.kept import scope_of
from tests.unit.test_candidates import a_checkpoint, flip

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not have many workers|exists and is not empty).*")


def request(directory: Path, *policies: KeepLatest | KeepEvery, **more: Any) -> Retain:
    fields = {"spared": [], "resumed_from": "", "after": 0, **more}
    return Retain(1, str(directory), encode_policies(policies), **fields)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_no_policy_keeps_is_deleted(tmp_path: Path) -> None:
    for step in (500, 1000, 1500, 2000, 2500):
        a_checkpoint(tmp_path, step)
    assert len(retain(request(tmp_path, KeepLatest(1), KeepEvery(1000)), 0)) == 2
    assert names(tmp_path) == ["step=1000.ckpt", "step=2000.ckpt", "step=2500.ckpt"]


def test_torn_foreign_and_unfinished_ones_neither_count_nor_go(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        a_checkpoint(tmp_path, step)
    flip(tmp_path / "step=5.ckpt" / "manifest.json")
    (tmp_path / "step=4.ckpt" / "meta.pt").unlink()
    torch.save({"state_dict": {}}, tmp_path / "stock.ckpt")
    (tmp_path / ".step=6.ckpt.abc.incomplete").mkdir()
    retain(request(tmp_path, KeepLatest(2)), 0)
    left = [".step=6.ckpt.abc.incomplete", "step=2.ckpt", "step=3.ckpt", "step=4.ckpt", "step=5.ckpt", "stock.ckpt"]
    assert names(tmp_path) == left


def test_what_somebody_calls_by_another_name_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        a_checkpoint(tmp_path, step)
    (tmp_path / "best.ckpt").symlink_to("step=1.ckpt")
    elsewhere = tmp_path.parent / f"{tmp_path.name}-link"
    elsewhere.symlink_to(tmp_path)
    retain(request(tmp_path, KeepLatest(1), spared=[str(elsewhere / "step=2.ckpt")]), 0)
    assert names(tmp_path) == ["best.ckpt", "step=1.ckpt", "step=2.ckpt", "step=4.ckpt"]


def test_the_one_resumed_from_stays_until_this_run_has_committed_another(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        a_checkpoint(tmp_path, step)  # committed at 1, 2 and 3 ns
    wish = request(tmp_path, KeepLatest(1), resumed_from=str(tmp_path / "step=1.ckpt"))
    retain(wish, run_started_ns=10)
    assert names(tmp_path) == ["step=1.ckpt", "step=3.ckpt"]
    a_checkpoint(tmp_path, 4, created=11)
    retain(replace(wish, id=2), run_started_ns=10)
    assert names(tmp_path) == ["step=4.ckpt"]


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., L.Trainer]:
    (tmp_path / "shm").mkdir()

    def run(callback: ModelCheckpoint, steps: int, resume: str | None = None, keep: Any = None) -> L.Trainer:
        trainer = L.Trainer(
            max_steps=steps,
            accelerator="cpu",
            plugins=[AsyncCheckpointIO(keep=keep, on_busy="wait", shm_dir=str(tmp_path / "shm"))],
            callbacks=[callback],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        data: Any = DataLoader(RandomDataset(32, 200))
        trainer.fit(Logs(), data, ckpt_path=resume)
        return trainer

    return run


class Logs(BoringModel):
    """Logs a metric whose best value is at step 3."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("odd", abs(3.0 - (self.global_step + 1)))
        return super().training_step(batch, batch_idx)


def test_fit_keeps_what_the_policies_and_the_callback_want(tmp_path: Path, fit: Callable[..., L.Trainer]) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    every = ModelCheckpoint(
        folder,
        "{step}",
        every_n_train_steps=1,
        monitor="odd",
        save_top_k=-1,
        save_last="link",
        save_on_train_epoch_end=False,
    )
    fit(every, 9, keep=[KeepLatest(2), KeepEvery(5)])
    assert every.best_model_path.endswith("step=3.ckpt")
    assert names(folder) == ["last.ckpt", "step=3.ckpt", "step=5.ckpt", "step=8.ckpt", "step=9.ckpt"]
    assert (folder / "last.ckpt").resolve() == folder / "step=9.ckpt"
    again = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, monitor="odd", save_top_k=-1)
    fit(again, 11, resume=str(folder / "step=8.ckpt"), keep=[KeepLatest(1)])
    assert "step=11.ckpt" in names(folder)
    assert "step=8.ckpt" not in names(folder)


def test_what_a_user_saves_elsewhere_deletes_nothing_there(tmp_path: Path, fit: Callable[..., L.Trainer]) -> None:
    trainer = fit(ModelCheckpoint(tmp_path / "runs", every_n_train_steps=2, save_top_k=-1), 4, keep=[KeepLatest(1)])
    assert scope_of(trainer, str(tmp_path / "mine.ckpt")) is None
    assert scope_of(None, str(tmp_path / "mine.ckpt")) is None
    scope = scope_of(trainer, str(tmp_path / "runs" / "val" / "loss=0.5.ckpt"))
    assert scope is not None
    assert scope.directory == str(tmp_path / "runs")


def test_only_policies_are_taken_and_yaml_can_say_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"\[KeepLatest\(3\), KeepEvery\(1000\)\]"):
        AsyncCheckpointIO(keep=KeepLatest(3))  # type: ignore[arg-type]
    parser = ArgumentParser()
    parser.add_subclass_arguments(AsyncCheckpointIO, "plugin")
    text = """
    class_path: lightning_resilience.AsyncCheckpointIO
    init_args:
      keep:
        - class_path: lightning_resilience.KeepLatest
          init_args: {count: 3}
        - class_path: lightning_resilience.KeepEvery
          init_args: {steps: 1000}
    """
    (tmp_path / "plugin.yaml").write_text(text)
    parsed = parser.instantiate(parser.parse_args([f"--plugin={tmp_path / 'plugin.yaml'}"]))
    assert parsed.plugin._keep == (KeepLatest(3), KeepEvery(1000))
