"""The entry point: parses the command line, runs a command, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from enum import IntEnum

from lightning_resilience.cli import checkpoints, run
from lightning_resilience.errors import (
    ConfigurationError,
    DamagedCheckpointError,
    NoValidCheckpointError,
    ResilienceError,
    UntrustedCheckpointError,
)

_GROUPS = (run, checkpoints)
"""Modules that add commands: each has `add_commands(subparsers)` and sets `command`, which returns an exit code."""

_EXIT_CODES = """exit codes:
  0  all is well
  1  a checkpoint is damaged, or there is no valid one
  2  the command cannot work as given
  3  it could not be done: storage, permission, an untrusted or other kind of checkpoint
"""


class ExitCode(IntEnum):
    """What the shell is told; documented in docs/checkpoints.md."""

    FINE = 0
    DAMAGED = 1
    USAGE = 2
    FAILED = 3
    INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(
        prog="lightning-resilience",
        description="PyTorch Lightning training jobs that do not stop.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = root.add_subparsers(metavar="COMMAND", required=True)
    for group in _GROUPS:
        group.add_commands(subparsers)
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = parser().parse_args(arguments)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _fail("interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:  # whoever reads has enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FINE
    except ConfigurationError as error:
        return _fail(str(error), ExitCode.USAGE)
    except (DamagedCheckpointError, NoValidCheckpointError) as error:
        return _fail(str(error), ExitCode.DAMAGED)
    except UntrustedCheckpointError as error:
        return _fail(f"{error} For this command: --trust", ExitCode.FAILED)
    except (ResilienceError, OSError) as error:
        return _fail(str(error), ExitCode.FAILED)


def _fail(text: str, code: ExitCode) -> int:
    print(f"lightning-resilience: {text}", file=sys.stderr)
    return code
