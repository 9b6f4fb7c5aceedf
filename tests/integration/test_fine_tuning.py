"""Resuming where the optimizer has changed on the way, passing over weights, starting from weights; on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fine_tuning import EPOCHS
from tests.integration.ranks import Stem


@pytest.fixture(scope="module")
def found(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("fine_tuning")
    stem.run("tests.integration.fine_tuning:main", str(folder), ranks=2, folder=folder)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("epoch", [0, 2])
def test_parameter_groups_that_were_added_on_the_way_come_back(found: Any, epoch: int) -> None:
    whole, resumed = found["whole"], found[f"resumed {epoch}"]
    assert resumed["error"] == ""
    per_epoch = len(whole["losses"]) // EPOCHS
    assert resumed["losses"] == whole["losses"][(epoch + 1) * per_epoch :]
    assert resumed["weights"] == whole["weights"]


def test_parameter_groups_come_back_from_memory_too(found: Any) -> None:
    whole, resumed = found["whole"], found["resumed from memory"]
    assert resumed["error"] == ""
    per_epoch = len(whole["losses"]) // EPOCHS
    assert resumed["losses"] == whole["losses"][1 - per_epoch :], "but for the first step of the last epoch"
    assert resumed["weights"] == whole["weights"]


def test_a_newer_checkpoint_with_weights_only_does_not_block_resuming(found: Any) -> None:
    assert Path(found["newest"]).name == "weights-epoch=2.ckpt"
    assert Path(found["passed over"]["loaded"]).name == "epoch=1.ckpt"
    assert found["passed over"]["losses"] == found["weights only"]["losses"][4:]


def test_another_kind_of_optimizer_is_refused_before_a_step(found: Any) -> None:
    assert "another kind of optimizer than SGD" in found["other kind"]["error"]
    assert found["other kind"]["losses"] == []


def test_a_sharded_module_starts_from_weights(found: Any) -> None:
    assert found["started"]["weights"] == found["weights only"]["weights"]
