"""How much of the time is left for training when a write takes as long as the interval between two saves.

``python benchmarks/checkpoint_efficiency.py``; `README.md` beside it says what each figure means.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.efficiency.plan import METHODS, Plan, Run
from benchmarks.jobs import available_memory, machine_facts, require_room, results_of

_TARGET = 0.9
_PATIENCE_S = 1500.0
_COPIES = 6  # states that a method holds in memory at a time, the original included
_SAVES_ON_DISK = 3


def main() -> None:
    """Measure and print."""
    plan, json_file = _arguments()
    _check_room(plan)
    facts = machine_facts(os.getloadavg()[0])
    with tempfile.TemporaryDirectory(
        prefix="checkpoint-efficiency-", dir=plan.directory, ignore_cleanup_errors=True
    ) as d:
        results = _measure(replace(plan, directory=d))
    facts |= {
        "state": f"{plan.ranks} ranks with {results[0]['state_bytes'] / 1e6:.0f} MB each",
        "steps": f"{1e3 * results[0]['step_s']:.0f} ms each while nothing is saved",
        "interval": f"{results[0]['steps_between']} steps, as long as a plain write of the state:"
        f" {results[0]['write_s']:.2f} s",
    }
    runs = [_slowest([Run(**result["runs"][index]) for result in results]) for index in range(len(plan.methods))]
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", highlight=False)
    _print(console, runs, plan.saves)
    if json_file is not None:
        json_file.write_text(json.dumps({**facts, "runs": [asdict(run) for run in runs]}, indent=1))


def _arguments() -> tuple[Plan, Path | None]:
    parser = argparse.ArgumentParser(description="Measure training that saves as often as storage can take it.")
    parser.add_argument("--mb", type=int, help="size of the state per rank in MB (512)")
    parser.add_argument("--saves", type=int, help="saves per method (10)")
    parser.add_argument("--ranks", type=int, default=2, help="training processes (2)")
    parser.add_argument("--methods", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--dir", default=".", help="an existing directory on the file system to measure (.)")
    parser.add_argument("--step-ms", type=float, default=70.0, help="duration of a training-like step (70)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--quick", action="store_true", help="64 MB, 4 saves")
    given = parser.parse_args()
    mb, saves = (64, 4) if given.quick else (512, 10)
    chosen = given.methods.split(",") if given.methods else list(METHODS)
    if unknown := set(chosen) - set(METHODS):
        parser.error(f"unknown methods {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}")
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        chosen = [name for name in chosen if name != "nvrx"]
    plan = Plan(
        mb=given.mb or mb,
        saves=given.saves or saves,
        ranks=given.ranks,
        step_ms=given.step_ms,
        methods=tuple(name for name in METHODS if name in chosen),
        directory=str(Path(given.dir).resolve()),
    )
    return plan, given.json


def _check_room(plan: Plan) -> None:
    """Stop before anything is written that does not fit."""
    state = plan.mb * 10**6 * plan.ranks
    require_room(
        {
            plan.directory: (shutil.disk_usage(plan.directory).free, (plan.saves + _SAVES_ON_DISK) * state),
            "memory": (available_memory(), _COPIES * state),
        }
    )


def _measure(plan: Plan) -> list[dict[str, Any]]:
    """What every rank found."""
    return results_of(
        "benchmarks.efficiency.rank",
        plan.encode(),
        ranks=plan.ranks,
        directory=Path(plan.directory),
        patience_s=_PATIENCE_S,
    )


def _slowest(runs: Sequence[Run]) -> Run:
    return min(runs, key=lambda run: run.efficiency)


def _print(console: Console, runs: Sequence[Run], asked: int) -> None:
    table = Table(
        "method", "efficiency", "blocked, part of time", "durable", title="slowest rank", title_justify="left"
    )
    for run in runs:
        cells = (f"{run.efficiency:.0%}", f"{run.blocked_s / run.wall_s:.0%}", f"{run.saved} of {asked}")
        table.add_row(METHODS[run.method], *cells)
    console.print(table)
    for run in runs:
        if run.method == "ours":
            met = "met" if run.efficiency >= _TARGET else "missed"
            console.print(f"efficiency >= {_TARGET:.0%}: {run.efficiency:.0%} {met}", highlight=False)


if __name__ == "__main__":
    main()
