"""`lightning-resilience run`: the launcher."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_resilience.launcher.cli import EPILOG, add_options, spec_from


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "run",
        help="start a training job on this machine, in place of torchrun",
        description="Start the ranks of a job, and start them anew when one fails. Takes the options of torchrun.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    spec = spec_from(options)
    if spec.dry_run:
        print(spec.describe())
        return 0
    from lightning_resilience.launcher.supervisor import Supervisor

    return Supervisor(spec).run()
