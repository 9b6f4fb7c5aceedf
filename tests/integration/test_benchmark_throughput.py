"""The benchmarks of loading and writing run, have a row for every method, and leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.throughput.command import Row, ratios, rows_of
from benchmarks.throughput.plan import LOADS, WRITES, Sample

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("command", "methods", "states"),
    [("checkpoint_load", tuple(LOADS), 2), ("checkpoint_write", tuple(name for name in WRITES if name != "nvrx"), 1)],
)
def test_every_method_has_a_row(tmp_path: Path, command: str, methods: tuple[str, ...], states: int) -> None:
    scratch, report = tmp_path / "scratch", tmp_path / "report.json"
    scratch.mkdir()
    arguments = ["--mb", "1", "--rounds", "1", "--ranks", "1", "--methods", ",".join(methods)]
    done = subprocess.run(
        [sys.executable, f"benchmarks/{command}.py", *arguments, "--dir", str(scratch), "--json", str(report)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert {row["method"] for row in json.loads(report.read_text())["rows"]} == set(methods)
    assert done.stdout.count("of raw,") == states
    assert list(scratch.iterdir()) == []


def test_the_slowest_rank_counts_and_the_median_of_the_rounds() -> None:
    fast = [Sample("raw", False, seconds) for seconds in (1.0, 1.0, 1.0)]
    slow = [Sample("raw", False, seconds) for seconds in (2.0, 9.0, 3.0)]
    assert rows_of([fast, slow], 6 * 10**9) == [Row("raw", False, 3.0, 2.0)]


def test_a_ratio_compares_with_raw_of_the_same_cache() -> None:
    rows = [
        Row("raw", False, 1.0, 1.0),
        Row("raw", True, 4.0, 1.0),
        Row("ours", False, 2.0, 1.0),
        Row("ours", True, 5.0, 1.0),
    ]
    assert ratios(rows, cold=False)["ours"] == 0.5
    assert ratios(rows, cold=True)["ours"] == 0.8
    assert ratios(rows[2:], cold=True) == {}
