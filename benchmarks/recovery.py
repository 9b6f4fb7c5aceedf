"""How long training stands still after a fault, ours and NVIDIA's, in one run: ``python benchmarks/recovery.py``.

`README.md` beside it says what each figure means.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from benchmarks.jobs import ends_of_logs, machine_facts, running_ranks, wait_for_ranks
from benchmarks.restarts.plan import KINDS, METHODS, Plan
from benchmarks.restarts.report import Outcome, outcome, print_report

_PATIENCE_S = 300.0


def main() -> None:
    """Run every job, print the table."""
    given = _arguments()
    outcomes: list[Outcome] = []
    facts = machine_facts(os.getloadavg()[0])
    console = Console(width=None if sys.stdout.isatty() else 150)
    for plan in _plans(given):
        console.print(f"running: {METHODS[plan.method]}, {plan.label}", highlight=False, style="dim")
        outcomes.append(_run(plan))
    console.print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", highlight=False)
    print_report(console, outcomes)
    if given.json is not None:
        given.json.write_text(json.dumps({**facts, "jobs": [asdict(result) for result in outcomes]}, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how long training stands still after a fault.")
    parser.add_argument("--ranks", default="2,4", help="training processes (2,4)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--methods", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--faults", type=int, default=10, help="faults per job (10)")
    parser.add_argument("--millions", type=int, default=1, help="parameters of the model in millions (1)")
    parser.add_argument("--large", type=int, default=200, help="one more job of ours with so many; 0 for none (200)")
    parser.add_argument("--deadline", type=float, default=5.0, help="seconds until no progress is a hang (5)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--quick", action="store_true", help="2 ranks, 3 faults, ours and the tuned peer")
    given = parser.parse_args()
    if given.quick:
        given.ranks, given.faults, given.large, given.deadline = "2", 3, 0, 3.0
        given.methods = given.methods or "ours,nvrx-tuned"
    return given


def _plans(given: argparse.Namespace) -> Iterator[Plan]:
    methods = given.methods.split(",") if given.methods else list(METHODS)
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        methods = [name for name in methods if not name.startswith("nvrx")]
    for ranks in map(int, given.ranks.split(",")):
        for kind in given.kinds.split(","):
            for method in methods:
                yield _plan(given, method, kind, ranks, given.millions)
    if given.large and "ours" in methods:
        yield _plan(given, "ours", "exception", 2, given.large)


def _plan(given: argparse.Namespace, method: str, kind: str, ranks: int, millions: int) -> Plan:
    return Plan(
        method=method,
        kind=kind,
        ranks=ranks,
        millions=millions,
        faults=given.faults,
        deadline_s=given.deadline,
        directory="",
    )


def _run(plan: Plan) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True) as directory:
        plan = replace(plan, directory=directory)
        patience_s = _PATIENCE_S + plan.faults * 4 * plan.deadline_s
        with running_ranks(
            "benchmarks.restarts.rank",
            plan.encode(),
            ranks=plan.ranks,
            directory=Path(directory),
            environment={
                "LOCAL_WORLD_SIZE": plan.ranks,
                "GROUP_RANK": 0,
                "MASTER_PORT": _free_port(),
                "TORCHELASTIC_RUN_ID": "recovery",  # Lightning takes the place from the environment then
            },
        ) as ranks:
            succeeded = wait_for_ranks(ranks, patience_s=patience_s)
        return outcome(plan, "" if succeeded else ends_of_logs(Path(directory), plan.ranks))


def _free_port() -> int:
    """A port that is free, and the next one too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


if __name__ == "__main__":
    main()
