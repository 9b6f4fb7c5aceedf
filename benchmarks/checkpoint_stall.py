"""What a checkpoint costs training, ours and everybody else's, in one run: ``python benchmarks/checkpoint_stall.py``.

Starts the ranks, waits for them, prints what they measured. `README.md` says what each figure means.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.jobs import available_memory, machine_facts, require_room, results_of
from benchmarks.stall.options import DEFAULT_METHODS, METHODS, QUICK_METHODS, Options, Sample
from benchmarks.stall.report import NOT_INSTALLED, figures, print_report, targets

_PREFIX = "checkpoint-stall-"
_COPIES = 11  # states that the methods hold in memory at a time, the original included
_SHARED_COPIES = 7  # of which in shared memory
_SAVES_ON_DISK = 2.2
_SMALL_TENSOR = 4096  # with all that is around it
_START_UP_S = 240.0


def main() -> None:
    """Measure and print."""
    options, json_file = _arguments()
    options, missing = _without_missing(options)
    _check_room(options)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(
        prefix="checkpoint-stall-", dir=options.directory, ignore_cleanup_errors=True
    ) as d:
        results = _measure(replace(options, directory=d))
    ranks = [[_sample(fields) for fields in result["samples"]] for result in results]
    rows = figures(ranks)
    console = Console(width=None if sys.stdout.isatty() else 160)
    facts = _facts(options, results[0], load)
    console.print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", highlight=False)
    print_report(console, rows, missing, options.tensors)
    if json_file is not None:
        content = {
            **facts,
            "rows": {name: asdict(row) for name, row in rows.items()},
            "missing": missing,
            "targets": [asdict(target) for target in targets(rows, options.tensors)],
            "samples": [asdict(sample) for samples in ranks for sample in samples],
        }
        json_file.write_text(json.dumps(content, indent=1))


def _arguments() -> tuple[Options, Path | None]:
    parser = argparse.ArgumentParser(description="Measure what a checkpoint costs training.")
    parser.add_argument("--mb", type=int, help="size of the state per rank in MB (512)")
    parser.add_argument("--saves", type=int, help="saves per method (20)")
    parser.add_argument("--ranks", type=int, default=2, help="training processes (2)")
    parser.add_argument("--tensors", type=int, default=0, help="so many small tensors instead, for the fixed cost")
    parser.add_argument("--methods", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--dir", default=".", help="an existing directory on the file system to measure (.)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--step-ms", type=float, default=70.0, help="duration of a training-like step (70)")
    parser.add_argument("--budget", type=float, help="no round of saves starts that would end later, in seconds (600)")
    parser.add_argument("--quick", action="store_true", help="64 MB, 4 saves, no peers that start processes")
    given = parser.parse_args()
    mb, saves, budget_s = (64, 4, 30.0) if given.quick else (512, 20, 600.0)
    chosen = given.methods.split(",") if given.methods else QUICK_METHODS if given.quick else DEFAULT_METHODS
    if unknown := set(chosen) - set(METHODS):
        parser.error(f"unknown methods {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}")
    options = Options(
        mb=given.mb or mb,
        tensors=given.tensors,
        saves=given.saves or saves,
        ranks=given.ranks,
        step_ms=given.step_ms,
        budget_s=given.budget or budget_s,
        methods=tuple(name for name in METHODS if name in chosen),
        directory=str(Path(given.dir).resolve()),
    )
    return options, given.json


def _without_missing(options: Options) -> tuple[Options, dict[str, str]]:
    """The options without peers that are not installed, and which those are."""
    if importlib.util.find_spec("nvidia_resiliency_ext") is not None:
        return options, {}
    missing = {name: NOT_INSTALLED for name in options.methods if name.startswith("nvrx")}
    return replace(options, methods=tuple(name for name in options.methods if name not in missing)), missing


def _check_room(options: Options) -> None:
    """Stop before anything is written that does not fit."""
    state = (options.tensors * _SMALL_TENSOR or options.mb * 10**6) * options.ranks
    require_room(
        {
            options.directory: (shutil.disk_usage(options.directory).free, _SAVES_ON_DISK * state),
            "/dev/shm": (shutil.disk_usage("/dev/shm").free, _SHARED_COPIES * state),
            "memory": (available_memory(), _COPIES * state),
        }
    )


def _measure(options: Options) -> list[dict[str, Any]]:
    """What every rank found."""
    return results_of(
        "benchmarks.stall.rank",
        options.encode(),
        ranks=options.ranks,
        directory=Path(options.directory),
        patience_s=options.budget_s + _START_UP_S,
    )


def _sample(fields: Mapping[str, Any]) -> Sample:
    return Sample(**{**fields, "idle_s": tuple(fields["idle_s"]), "busy_s": tuple(fields["busy_s"])})


def _facts(options: Options, result: Mapping[str, Any], load: float) -> dict[str, str]:
    """What was measured on what, in words."""
    state = f"{options.tensors} small tensors" if options.tensors else "parameters and Adam moments, FSDP-sharded"
    return {
        **machine_facts(load),
        "state": f"{options.ranks} ranks with {result['state_bytes'] / 1e6:.0f} MB each: {state}",
        "steps": f"{1e3 * result['step_s']:.0f} ms each while nothing is saved",
    }


if __name__ == "__main__":
    main()
