"""The benchmark runs, has a row for every method, and leaves nothing behind. It asserts no duration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stall.options import METHODS, Sample
from benchmarks.stall.report import figures, lost_seconds, targets

_ROOT = Path(__file__).parents[2]
_IN_THE_RANK = ("memcpy", "memcpy-fresh", "raw", "raw-nice", "dcp-save", "dcp-thread", "ours")  # start in no time


def _benchmark(directory: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    report = directory / "report.json"
    scratch = directory / "scratch"
    scratch.mkdir()
    command = [sys.executable, "benchmarks/checkpoint_stall.py", "--mb", "2", "--saves", "2", "--step-ms", "2"]
    done = subprocess.run(
        [*command, "--dir", str(scratch), "--json", str(report), "--methods", ",".join(_IN_THE_RANK), *arguments],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert list(scratch.iterdir()) == []
    assert not _mentions(str(scratch))
    return json.loads(report.read_text()), done.stdout


def _mentions(text: str) -> list[str]:
    """Command lines of living processes that contain ``text``."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it just ended
            continue
    return [line for line in lines if text in line]


def test_every_method_has_a_row_and_nothing_is_left(tmp_path: Path) -> None:
    report, text = _benchmark(tmp_path)
    assert set(report["rows"]) == set(_IN_THE_RANK)
    for name in _IN_THE_RANK:
        assert len([sample for sample in report["samples"] if sample["method"] == name]) == 2 * 2
    assert all(facts.label in text for facts in METHODS.values())
    assert "not run" in text
    assert len(report["targets"]) == 6


def test_many_small_tensors_give_the_fixed_cost(tmp_path: Path) -> None:
    report, _ = _benchmark(tmp_path, "--tensors", "50", "--ranks", "1", "--methods", "memcpy,ours")
    assert set(report["rows"]) == {"memcpy", "ours"}
    assert len(report["targets"]) == 3


def test_an_unknown_method_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/checkpoint_stall.py", "--methods", "memcopy", "--dir", str(tmp_path)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "memcopy" in done.stderr


def _sample(method: str, rank: int = 0, stall_s: float = 0.0, idle_s: float = 0.1, busy_s: float = 0.1) -> Sample:
    return Sample(method, 0, rank, (idle_s,) * 3, stall_s, stall_s, (busy_s,) * 2, durable_s=10 * stall_s)


def test_lost_time_is_against_the_undisturbed_steps_around_the_save() -> None:
    samples = [_sample("ours", idle_s=0.1, busy_s=0.15), _sample("memcpy", idle_s=0.12, busy_s=0.12)]
    assert lost_seconds(samples) == pytest.approx([2 * (0.15 - 0.11), 0.0])


def test_the_slowest_rank_counts_and_ratios_compare_with_the_best_peer() -> None:
    stalls = {"memcpy": 0.1, "dcp-thread": 0.5, "nvrx": 0.44, "ours": 0.11}
    ranks = [[_sample(name, rank, stall_s / (2 - rank)) for name, stall_s in stalls.items()] for rank in (0, 1)]
    rows = figures(ranks)
    assert rows["ours"].stall_s == 0.11
    assert rows["ours"].durable_s == pytest.approx(1.1)
    met = {target.figure: (target.measured, target.met) for target in targets(rows, tensors=0)}
    assert met["stall / memcpy"] == ("1.10", True)
    assert met["stall + slower steps / best peer"] == ("0.25", True)
    assert met["stall / dcp.save"] == ("", False)
