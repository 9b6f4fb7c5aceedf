"""Where a `fit` goes on when there are snapshots in memory: one job of two ranks, a row of fits that mostly fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.ranks import Stem


@pytest.fixture(scope="module")
def job(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    folder = tmp_path_factory.mktemp("snapshot-fits")
    stem.load("tests.integration.snapshot_fits")
    output = stem.run("tests.integration.snapshot_fits:main", str(folder), ranks=2, folder=folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)], output


@pytest.mark.parametrize(
    ("name", "first", "in_memory"),
    [
        ("killed at the start", 1, True),
        ("nobody spoke of resuming", 1, True),
        ("before the first checkpoint", 5, True),
        ("an older checkpoint", 8, True),  # of step 5, and a snapshot of step 7
        ("not the newest", 6, True),  # the user named it
        ("after going back", 7, True),  # the checkpoint of step 10 is of another future
        ("to the end", 9, False),
        ("the newest is damaged", 8, False),  # of step 10; a snapshot of step 7, and before it a checkpoint of step 5
        ("full", 1, True),
        ("full, again", 4, False),
        ("manual", 1, True),
        ("manual, again", 4, False),
        ("auto", 1, True),
        ("auto, again", 6, False),  # one is taken after five steps
        ("hsdp", 1, True),
        ("hsdp, again", 4, True),
        ("hsdp, rescued", 7, False),
        ("tensor parallel", 1, True),
        ("tensor parallel, again", 4, True),
        ("tensor parallel, rescued", 7, False),
    ],
)
def test_where_a_fit_goes_on(job: tuple[list[dict[str, Any]], str], name: str, first: int, in_memory: bool) -> None:
    ranks, output = job
    for results in ranks:
        result = results[name]
        assert result["first"] == first, output[-4000:]
        assert bool(result["in_memory"]) is in_memory
        kind = name.split(",")[0]
        expected = results[f"{kind}, whole" if f"{kind}, whole" in results else "reference"]["losses"]
        assert result["losses"] == {step: expected[step] for step in result["losses"]}, "the same bits"
        if not result["error"]:
            assert max(map(int, result["losses"])) == 12
            assert result["calls"] == [12.0, 12.0], "buffers came back too"


def test_after_the_end_only_storage_is_left(job: tuple[list[dict[str, Any]], str]) -> None:
    ranks, _ = job
    assert ranks[0]["after the end"]["first"] == 11
    assert ranks[0]["after the end"]["ckpt_path"] == "step=10-v1.ckpt"


def test_lightning_knows_of_the_checkpoint_and_not_of_the_snapshot(job: tuple[list[dict[str, Any]], str]) -> None:
    """It compares the path with those it may delete."""
    ranks, _ = job
    assert ranks[0]["an older checkpoint"]["ckpt_path"] == "step=5.ckpt"
    assert ranks[0]["before the first checkpoint"]["ckpt_path"] is None


def test_a_snapshot_of_another_model_is_an_error_that_says_how_to_begin_anew(
    job: tuple[list[dict[str, Any]], str],
) -> None:
    ranks, _ = job
    for results in ranks:
        error = results["another model"]["error"]
        assert "the checkpoint of step 3 in /dev/shm/lightning-resilience-snapshot-" in error
        assert "belongs to another model" in error
        assert "To begin anew, call fit without ckpt_path, or remove " in error


def test_what_is_done_is_said(job: tuple[list[dict[str, Any]], str]) -> None:
    _, output = job
    assert "going on from the snapshot of step 4 in /dev/shm" in output
    assert "WARNING rank 0: going on from the snapshot of step 3 in /dev/shm, as there is no checkpoint in " in output
    assert "snapshots of an earlier start are not used: fit was asked for something else" in output
    assert "takes no snapshots with this strategy" in output  # DDP
