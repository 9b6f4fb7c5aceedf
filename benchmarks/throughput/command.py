"""What ``checkpoint_load.py`` and ``checkpoint_write.py`` share: arguments, the job, the table."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.jobs import available_memory, machine_facts, require_room, results_of
from benchmarks.throughput.plan import Plan, Sample

_PATIENCE_S = 1500.0
_COPIES = 6  # states in memory at a time
_ON_DISK = 4


@dataclass(frozen=True)
class Row:
    """One line: the medians over the rounds, of the slowest rank."""

    method: str
    cold: bool
    seconds: float
    gigabytes_per_s: float


def run(task: str, labels: Mapping[str, str], target: float) -> None:
    """Measure and print.

    Args:
        task: "load" or "write".
        labels: What each method is called.
        target: Ours must come to this part of "raw".
    """
    plan, json_file = _arguments(task, labels)
    _check_room(plan)
    facts = machine_facts(os.getloadavg()[0])
    with tempfile.TemporaryDirectory(prefix=f"checkpoint-{task}-", dir=plan.directory, ignore_cleanup_errors=True) as d:
        results = _measure(replace(plan, directory=d))
    size = results[0]["state_bytes"]
    facts["state"] = f"{plan.ranks} ranks with {size / 1e6:.0f} MB each, {plan.rounds} rounds"
    rows = rows_of([[Sample(**fields) for fields in result["samples"]] for result in results], size)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", highlight=False)
    _print(console, rows, labels, target)
    if json_file is not None:
        json_file.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1))


def rows_of(ranks: Sequence[Sequence[Sample]], size: int) -> list[Row]:
    """From the samples of all ranks, taken in the same order.

    Args:
        ranks: Samples by rank.
        size: Bytes of each rank.
    """
    slowest = [replace(samples[0], seconds=max(s.seconds for s in samples)) for samples in zip(*ranks, strict=True)]
    rows = []
    for method, cold in dict.fromkeys((sample.method, sample.cold) for sample in slowest):
        seconds = median(s.seconds for s in slowest if (s.method, s.cold) == (method, cold))
        rows.append(Row(method, cold, seconds, size / seconds / 1e9))
    return rows


def ratios(rows: Sequence[Row], cold: bool) -> dict[str, float]:
    """How fast each method is beside "raw"."""
    raw = next((row.seconds for row in rows if row.method == "raw" and row.cold == cold), None)
    return {row.method: raw / row.seconds for row in rows if row.cold == cold and raw is not None}


def _arguments(task: str, labels: Mapping[str, str]) -> tuple[Plan, Path | None]:
    parser = argparse.ArgumentParser(description=f"Measure how fast checkpoints are {_done(task)}.")
    parser.add_argument("--mb", type=int, help="size of the state per rank in MB (512)")
    parser.add_argument("--rounds", type=int, help="measurements per method (7)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (2)")
    parser.add_argument("--methods", help=f"of {', '.join(labels)}")
    parser.add_argument("--dir", default=".", help="an existing directory on the file system to measure (.)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--quick", action="store_true", help="128 MB, 3 rounds")
    given = parser.parse_args()
    mb, rounds = (128, 3) if given.quick else (512, 7)
    chosen = given.methods.split(",") if given.methods else list(labels)
    if unknown := set(chosen) - set(labels):
        parser.error(f"unknown methods {', '.join(sorted(unknown))}; there are {', '.join(labels)}")
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        chosen = [name for name in chosen if name != "nvrx"]
    plan = Plan(
        task=task,
        mb=given.mb or mb,
        rounds=given.rounds or rounds,
        ranks=given.ranks,
        methods=tuple(name for name in labels if name in chosen),
        directory=str(Path(given.dir).resolve()),
    )
    return plan, given.json


def _done(task: str) -> str:
    return {"load": "loaded", "write": "written"}[task]


def _check_room(plan: Plan) -> None:
    """Stop before anything is written that does not fit."""
    state = plan.mb * 10**6 * plan.ranks
    require_room(
        {
            plan.directory: (shutil.disk_usage(plan.directory).free, _ON_DISK * state),
            "memory": (available_memory(), _COPIES * state),
        }
    )


def _measure(plan: Plan) -> list[dict[str, Any]]:
    """What every rank found."""
    return results_of(
        "benchmarks.throughput.rank",
        plan.encode(),
        ranks=plan.ranks,
        directory=Path(plan.directory),
        patience_s=_PATIENCE_S,
    )


def _print(console: Console, rows: Sequence[Row], labels: Mapping[str, str], target: float) -> None:
    table = Table("method", "cache", "seconds", "GB/s a rank", "of raw", title="median of the slowest rank")
    for row in rows:
        ratio = ratios(rows, row.cold).get(row.method)
        cache = "cold" if row.cold else "warm"
        cells = (f"{row.seconds:.3f}", f"{row.gigabytes_per_s:.2f}", "" if ratio is None else f"{ratio:.2f}")
        table.add_row(labels[row.method], cache, *cells)
    console.print(table)
    for cold in dict.fromkeys(row.cold for row in rows):
        ratio = ratios(rows, cold).get("ours")
        if ratio is not None:
            verdict = "met" if ratio >= target else "missed"
            which = "cold" if cold else "warm"
            console.print(f"ours >= {target} of raw, {which}: {ratio:.2f} {verdict}", highlight=False)
