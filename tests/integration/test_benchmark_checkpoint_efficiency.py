"""The benchmark runs, has a row for every method, and leaves nothing behind. It asserts no duration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.efficiency.plan import METHODS, Run

_ROOT = Path(__file__).parents[2]


def test_every_method_has_a_row_and_nothing_is_left(tmp_path: Path) -> None:
    report, scratch = tmp_path / "report.json", tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "benchmarks/checkpoint_efficiency.py", "--mb", "2", "--saves", "3", "--step-ms", "2"]
    command += ["--ranks", "1"]  # two are in the test of the stall
    done = subprocess.run(
        [*command, "--dir", str(scratch), "--json", str(report), "--methods", "dcp-save,ours-wait,ours"],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert list(scratch.iterdir()) == []
    runs = {run["method"]: Run(**run) for run in json.loads(report.read_text())["runs"]}
    assert list(runs) == ["dcp-save", "ours-wait", "ours"]
    assert all(METHODS[name] in done.stdout for name in runs)
    assert runs["dcp-save"].saved == runs["ours-wait"].saved == 3
    assert 1 <= runs["ours"].saved <= 3
    assert all(0 < run.blocked_s < run.wall_s for run in runs.values())
    assert "efficiency >= 90%" in done.stdout
