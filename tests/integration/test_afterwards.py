"""After a fit that recovered from faults, the trainer and its logger are as after any other."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ranks import Stem


@pytest.fixture(scope="module")
def folder(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all ranks have left what there is to see."""
    folder = tmp_path_factory.mktemp("afterwards")
    stem.load("tests.integration.afterwards")
    stem.run("tests.integration.afterwards:main", str(folder), ranks=2, folder=folder, timeout=180)
    return folder


def test_validate_test_and_another_fit_work(folder: Path) -> None:
    for rank in range(2):
        results: dict[str, dict[str, Any]] = json.loads((folder / f"result-{rank}.json").read_text())
        calm, faulty = results["calm"], results["faulty"]
        assert (faulty["first"].pop("restarts"), faulty.pop("restarts")) == (3, 5)
        assert (calm["first"].pop("restarts"), calm.pop("restarts")) == (0, 0)
        assert faulty == calm
        assert (calm["first"]["steps"], calm["steps"], calm["exceptions"]) == (12, 18, 0)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "logs" / "version_0" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_logger_goes_on_in_the_same_place_without_gaps(folder: Path) -> None:
    """Faults in the validation after step 11 and at the end of step 15: what was logged there comes again, the same."""
    assert [path.name for path in (folder / "faulty" / "logs").iterdir()] == ["version_0"]
    calm, faulty = rows(folder / "calm"), rows(folder / "faulty")
    assert [row for number, row in enumerate(faulty) if row not in faulty[:number]] == calm
    steps = [int(row["step"]) for row in faulty if row["loss_step"]]
    assert steps == sorted([*range(18), 11, 15])
