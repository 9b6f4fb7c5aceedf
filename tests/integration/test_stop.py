"""SIGTERM: whoever gets it, all ranks stop, and the exit code says so. What batches cost meanwhile: no collective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ranks import JobFailed, Stem
from tests.integration.restarts import Run, orders

Results = list[dict[str, Any]]
CODE = 143
"""128 + SIGTERM, as a shell shows it."""


def terminate(place: str, *, rank: int, step: int) -> dict[str, Any]:
    """SIGTERM, twice."""
    return {"kind": "terminate", "place": place, "rank": rank, "step": step}


STOPS = {
    "one": [terminate("backward", rank=1, step=2)],
    "the other": [terminate("forward", rank=0, step=2)],
    "all": [terminate("batch_start", rank=rank, step=1) for rank in range(2)],
    "at different moments": [terminate("update", rank=1, step=3), terminate("batch_start", rank=0, step=3)],
    "in a validation": [terminate("validation", rank=1, step=6)],
}
RUNS = [Run("counted", model="Counted"), *(Run(name, faults) for name, faults in STOPS.items())]


@pytest.fixture(scope="module")
def results(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of each rank, by name of the run."""
    folder = tmp_path_factory.mktemp("stop")
    stem.load("tests.integration.restarts")
    stem.run("tests.integration.restarts:main", orders(*RUNS), str(folder), ranks=2, folder=folder)
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", STOPS)
def test_whoever_gets_it_all_stop_and_none_waits(results: Results, name: str) -> None:
    """Lightning 20806: a broadcast in the signal handler waits for ranks that were not signalled."""
    for rank in (found[name] for found in results):
        assert rank["error"] == f"SIGTERMException: {CODE}"
        assert rank["steps"] <= 7
        assert rank["restarts"] == []
        assert rank["exceptions"] == 1


@pytest.mark.parametrize("restart", ["with restarts", "without"])
def test_the_exit_code_says_so(stem: Stem, tmp_path: Path, restart: str) -> None:
    """Lightning 19916: it was 0. Without restarts the other rank ends when its peer is gone, with an error."""
    stem.load("tests.integration.restarts")
    options: dict[str, Any] = {} if restart == "with restarts" else {"restart": None}
    run = Run("stopped", STOPS["one"], strategy=options)
    call = "tests.integration.restarts:train"
    with stem.start(call, orders(run), str(tmp_path), ranks=2, folder=tmp_path) as job:
        with pytest.raises(JobFailed):
            job.wait(60)
        assert job.codes == ([CODE, CODE] if restart == "with restarts" else [1, CODE]), job.output


def test_a_batch_has_no_collectives_but_those_of_sharding(results: Results) -> None:
    """Lightning 21487: a broadcast before each batch, and a wait for the device."""
    for rank in results:
        assert rank["counted"]["error"] == ""
        found = set(rank["counted"]["collectives"])
        assert {name.rsplit("_", 1)[0] for name in found} == {"all_gather", "reduce_scatter"}, found
