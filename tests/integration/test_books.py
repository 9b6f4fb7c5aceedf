"""Saves that fail on two ranks: both believe the same, and it is true."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ranks import Stem


def books(
    stem: Stem, folder: Path, kind: str, limit: int, blocked: tuple[int, ...], on_busy: str = "wait"
) -> tuple[Path, list[Any]]:
    directory = folder / "c"
    directory.mkdir()
    for step in blocked:
        (directory / f"step={step}").write_text("a file is in the way of the checkpoint's directory")
    stem.run("tests.integration.books:main", str(directory), kind, str(limit), on_busy, ranks=2, folder=folder)
    return directory, [json.loads((directory / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("kind", ["sharded", "ddp"])
def test_after_failures_in_between_both_ranks_name_the_same_and_it_is_there(
    stem: Stem, tmp_path: Path, kind: str
) -> None:
    directory, (first, second) = books(stem, tmp_path, kind, 0, (4, 6))
    assert {**first, "outcomes": []} == {**second, "outcomes": []}
    assert first["error"] == ""
    there = sorted(str(path.relative_to(directory)) for path in directory.glob("step=*/model.ckpt"))
    assert first["names"] == there
    assert len(there) == 2
    assert first["best"] == "step=8/model.ckpt"
    assert os.readlink(directory / "last.ckpt") == "step=8/model.ckpt"


@pytest.mark.parametrize("kind", ["sharded", "ddp"])
def test_after_so_many_failures_in_a_row_training_ends_with_an_error_on_all_ranks(
    stem: Stem, tmp_path: Path, kind: str
) -> None:
    directory, found = books(stem, tmp_path, kind, 1, (2, 4, 6, 8))
    assert all("1 checkpoints in a row were not saved" in rank["error"] for rank in found), found
    assert (directory / "step=1" / "model.ckpt").exists()


@pytest.mark.parametrize("kind", ["sharded", "ddp"])
def test_what_is_skipped_is_skipped_on_all_ranks(stem: Stem, tmp_path: Path, kind: str) -> None:
    """Storage is behind for three saves; with DDP only rank 0 knows."""
    directory, (first, second) = books(stem, tmp_path, kind, 0, (), "skip")
    assert "skipped" in first["outcomes"]
    assert second["outcomes"] == (first["outcomes"] if kind == "sharded" else [])
    assert {**first, "outcomes": []} == {**second, "outcomes": []}
    there = sorted(str(path.relative_to(directory)) for path in directory.glob("step=*/model.ckpt"))
    assert first["names"] == there
    assert len(there) == 2
