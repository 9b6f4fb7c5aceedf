"""What every benchmark command needs: processes that are surely gone in the end, and what was measured on what."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_VERSIONS = ("torch", "lightning", "xxhash", "nvidia-resiliency-ext")
_LOG_TAIL = 3000


@contextmanager
def running_ranks(
    module: str, options: str, *, ranks: int, directory: Path, environment: Mapping[str, object] | None = None
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Start ``python -m module options`` for each rank; at the end the ranks and every helper they started are gone.

    Args:
        module: What to run.
        options: Its one argument.
        ranks: How many processes.
        directory: Where their logs go, as ``rank<n>.log``.
        environment: More variables than the place in the job.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
            variables = {key: str(value) for key, value in {**place, **(environment or {})}.items()}
            processes.append(_start([sys.executable, "-m", module, options], variables, directory / f"rank{rank}.log"))
        yield processes
    finally:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                _end_group(process, signum)


def wait_for_ranks(processes: Sequence[subprocess.Popen[bytes]], *, patience_s: float) -> bool:
    """Whether all ended well within ``patience_s`` seconds; one that fails ends the wait."""
    deadline = time.monotonic() + patience_s
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            return False
        time.sleep(0.1)
    return not any(process.returncode for process in processes)


def results_of(module: str, options: str, *, ranks: int, directory: Path, patience_s: float) -> list[dict[str, Any]]:
    """Run :func:`running_ranks` to its end and read what each rank left in ``rank<n>.json``; exits if one fails."""
    with running_ranks(module, options, ranks=ranks, directory=directory) as processes:
        if not wait_for_ranks(processes, patience_s=patience_s):
            sys.exit(ends_of_logs(directory, ranks))
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def require_room(needs: Mapping[str, tuple[float, float]]) -> None:
    """Exit before anything is written that does not fit.

    Args:
        needs: Free and needed bytes by the name of the place.
    """
    for where, (free, needed) in needs.items():
        if free < needed:
            sys.exit(f"{where}: {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free; pass a smaller --mb")


def ends_of_logs(directory: Path, ranks: int) -> str:
    """What the ranks said last."""
    logs = [(directory / f"rank{rank}.log").read_text(errors="replace")[-_LOG_TAIL:] for rank in range(ranks)]
    return "a rank failed or took too long; the ends of their logs:\n\n" + "\n\n".join(logs)


def machine_facts(load: float) -> dict[str, str]:
    """When, where and with what.

    Args:
        load: The load average before the measurement began.
    """
    versions = (f"{name} {version}" for name in _VERSIONS if (version := _version(name)))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{len(os.sched_getaffinity(0))} cores, load average {load:.1f} at the start",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end_group(process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    """Send the signal to a rank and its helpers, and give them a moment."""
    try:
        os.killpg(process.pid, signum)
    except ProcessLookupError:
        process.wait()
        return
    try:
        process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        pass


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
