"""A rank is killed, and the others go on without it: as a fresh job of fewer ranks would from the same checkpoint."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from tests.integration.fewer_ranks import Run, orders
from tests.integration.ranks import JobFailed, Stem

Results = list[dict[str, Any]]


def train(stem: Stem, folder: Path, ranks: int, **options: Any) -> Results:
    """What each rank that was not killed tells, by its number at the end."""
    folder.mkdir()
    run = Run(str(folder), **options)
    stem.load("tests.integration.fewer_ranks")
    with stem.start("tests.integration.fewer_ranks:main", orders(run), ranks=ranks, folder=folder) as job:
        with contextlib.suppress(JobFailed):  # of those that are killed
            job.wait(60)
        left = ranks - sum(map(len, run.deaths.values()))
        assert len(list(folder.glob("result-*.json"))) == left, job.output[-8000:]
    results = [json.loads(file.read_text()) for file in folder.glob("result-*.json")]
    return sorted(results, key=lambda result: int(result["rank"]))


def seen(results: Results, first: int, last: int) -> list[int]:
    """The samples that all ranks together have trained in these steps."""
    return sorted(
        n for result in results for step, _, numbers in result["rows"] if first <= step < last for n in numbers
    )


def goes_on_like(survivors: Results, fresh: Results) -> None:
    """From the step of the checkpoint on everything is the same, bit for bit."""
    assert len(survivors) == len(fresh)
    for one, other in zip(survivors, fresh, strict=True):
        assert one["rows"][-len(other["rows"]) :] == other["rows"]
        same = ("rank", "world_size", "state", "steps", "epoch", "accumulates", "val_loss")
        assert {name: one[name] for name in same} == {name: other[name] for name in same}


def test_three_of_four_ranks_go_on(stem: Stem, tmp_path: Path) -> None:
    survivors = train(stem, tmp_path / "four", 4, samples=40, deaths={"3": [2]})
    assert [result["world_size"] for result in survivors] == [3, 3, 3]
    assert [result["environment"] for result in survivors] == [["0", "3"], ["1", "3"], ["2", "3"]]
    fresh = train(stem, tmp_path / "three", 3, samples=40, resume=str(tmp_path / "four" / "step=2.ckpt"))
    goes_on_like(survivors, fresh)
    rest = seen(fresh, 2, 6)
    assert len(rest) == len(set(rest)) == 40 - 2 * 4 * 2  # what four ranks had not trained of this epoch, each once
    assert [step for step, outcome in survivors[0]["saves"] if outcome == "saved"] == [2, 4, 6, 8, 10, 12]
    assert survivors[0]["best"].endswith("step=12.ckpt")
    newest = str(tmp_path / "four" / "step=12.ckpt")
    again = train(stem, tmp_path / "two", 2, samples=40, resume=newest)
    assert [result["steps"] for result in again] == [13, 13]  # what three ranks had left of the epoch is one batch each


def test_one_of_two_ranks_does_the_work_of_both(stem: Stem, tmp_path: Path) -> None:
    survivors = train(stem, tmp_path / "two", 2, samples=24, deaths={"3": [1]})
    twice = {"accumulate_grad_batches": 2}
    checkpoint = str(tmp_path / "two" / "step=2.ckpt")
    fresh = train(stem, tmp_path / "one", 1, samples=24, resume=checkpoint, trainer=twice)
    goes_on_like(survivors, fresh)
    assert survivors[0]["accumulates"] == 2
    assert survivors[0]["steps"] == 2 * 24 // (2 * 2)  # as many as with two ranks
    assert seen(fresh, 0, 6) == sorted(set(seen(fresh, 0, 6)))
