"""`make demo`: train a small Llama on two CPU processes; an exception, a hang and SIGKILL; watch it go on.

Exits with a status other than 0 if anything is not as the README promises.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.llama.recovery import Recovery, Restart, recovery
from examples.llama.step_log import read_events

TRAIN = Path(__file__).with_name("train.py")
MARK = "LLAMA_DEMO_JOB"
START_LIMIT_SECONDS = 300.0
"""How long a run may go without a new line in its log; two processes import much before their first step."""


class DemoFailed(Exception):
    """Something in the demo is not as promised."""


class Job:
    """One start of the training command: its processes, found by a mark in their environment.

    The mark also finds processes that left the session of the job or outlived their parent.
    """

    def __init__(self, command: list[str], output: Path) -> None:
        mark = uuid.uuid4().hex
        self._needle = f"{MARK}={mark}".encode()
        self._output = output
        self.pids: set[int] = set()
        """Every process of the job that was ever seen."""
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {MARK: mark},
            )

    def exit_status(self) -> int | None:
        return self._process.poll()

    def members(self) -> set[int]:
        """Ids of all processes of the job that are alive, whoever their parent is."""
        alive = {int(folder.name) for folder in Path("/proc").glob("[0-9]*") if self._owns(folder)}
        self.pids |= alive
        return alive

    def _owns(self, folder: Path) -> bool:
        try:
            return self._needle in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or of another user
            return False

    def kill(self) -> int:
        """SIGKILL every process of the job and wait until none is left; says how many there were."""
        killed: set[int] = set()
        while members := self.members():
            for pid in members:
                _kill(pid)
            killed |= members
            time.sleep(0.01)
        self._process.wait()
        return len(killed)

    def wait_until_empty(self, seconds: float) -> None:
        """Let helpers of a finished run leave.

        Raises:
            DemoFailed: one stays.
        """
        deadline = time.monotonic() + seconds
        while members := self.members():
            if time.monotonic() > deadline:
                raise DemoFailed(f"processes {sorted(members)} outlived the job")
            time.sleep(0.05)

    def shared_memory(self) -> list[Path]:
        """Shared memory of ours that carries the number of one of the job's processes in its name."""
        files = Path("/dev/shm").glob("lightning-resilience-*")
        return [path for path in files if self.pids & {int(part) for part in path.name.split("-") if part.isdigit()}]

    def last_words(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-30:])


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it was faster
        pass


@contextmanager
def running(command: list[str], output: Path) -> Iterator[Job]:
    """A job that is gone, all of it, when the block is left."""
    job = Job(command, output)
    try:
        yield job
    finally:
        job.kill()


class News:
    """Lines that are new in some logs; a log that is not there yet has none."""

    def __init__(self, *logs: Path) -> None:
        self._seen = {log: len(read_events(log)) for log in logs}

    def read(self) -> list[dict[str, Any]]:
        """Each line once."""
        fresh = []
        for log, seen in self._seen.items():
            events = read_events(log)
            self._seen[log] = len(events)
            fresh += events[seen:]
        return sorted(fresh, key=lambda event: float(event["time"]))


def follow(job: Job, logs: Sequence[Path], show: Callable[[dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
    """Show and yield the events that the job logs, until it ends.

    Raises:
        DemoFailed: the job failed, or logs nothing for too long.
    """
    news = News(*logs)
    last_news = time.monotonic()
    status = None
    while status is None:
        status = job.exit_status()  # before the log is read: nothing is written after the last look
        for event in news.read():
            last_news = time.monotonic()
            show(event)
            yield event
        if time.monotonic() - last_news > START_LIMIT_SECONDS:
            raise DemoFailed(f"no progress for {START_LIMIT_SECONDS:.0f} s\n{job.last_words()}")
        time.sleep(0.02)
    if status != 0:
        raise DemoFailed(f"training ended with status {status}\n{job.last_words()}")


class Demo:
    """Two starts of one command: the first has faults on the way and is killed, the second goes on from there."""

    def __init__(self, console: Console, folder: Path, options: argparse.Namespace) -> None:
        self._console = console
        self._folder = folder
        self._options = options
        self._log = folder / "checkpoints" / "steps.jsonl"
        self._restarts = folder / "checkpoints" / "events.jsonl"
        self._command = train_command(folder / "checkpoints", options)
        self._faults = fault_flags(options.kill_at)
        self._jobs: list[Job] = []

    def run(self) -> Recovery:
        self._console.print(f"$ {' '.join(self._command[1:])}", style="dim", markup=False, soft_wrap=True)
        self._console.print(f"[bold]First start[/], with {' '.join(self._faults)}", highlight=False, soft_wrap=True)
        self._first_start()
        self._console.print("[bold]Second start[/]: the same command, without these faults")
        self._second_start()
        if left := [str(path) for job in self._jobs for path in job.shared_memory()]:
            raise DemoFailed(f"shared memory was left behind: {left}")
        return recovery(read_events(self._log), read_restarts(self._restarts), self._options.steps)

    def _first_start(self) -> None:
        with running(self._command + self._faults, self._folder / "first.out") as job:
            for event in follow(job, (self._log, self._restarts), self._show):
                if event.get("event") == "step" and event["step"] >= self._options.kill_at:
                    count = job.kill()
                    self._jobs.append(job)
                    self._console.print(f"  [bold red]SIGKILL[/] to all {count} processes of the job")
                    return
        raise DemoFailed("the first run ended before it was killed: give more --steps")

    def _second_start(self) -> None:
        with running(self._command, self._folder / "second.out") as job:
            for event in follow(job, (self._log, self._restarts), self._show):
                if event.get("event") == "start":
                    job.members()
            job.wait_until_empty(seconds=20.0)
            self._jobs.append(job)

    def _show(self, event: dict[str, Any]) -> None:
        if line := in_words(event, self._options.checkpoint_every):
            self._console.print(line, highlight=False)


def in_words(event: dict[str, Any], every: int) -> str:
    """A line about an event of the job's logs; empty for those that say nothing new, as for most steps."""
    match event:
        case {"event": "start", "checkpoint": str(path), "step": step}:
            return f"  [green]resumes by itself[/] from step {step} ({Path(path).name})"
        case {"event": "step", "step": step, "loss": loss} if step % every == 0:
            return f"  step {step:4d}  loss {loss:.4f}"
        case {"event": "fault", "kind": kind, "rank": rank, "step": step}:
            what = {"raise": "raises an exception", "hang": "hangs"}[kind]
            return f"  [bold red]rank {rank} {what}[/] after step {step}"
        case {"kind": "restarted", "rank": 0, "outcome": outcome}:
            return f"  [green]all processes stay[/], training {outcome}"
    return ""


def read_restarts(log: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(log) if event["kind"] == "restarted"]


def train_command(checkpoints: Path, options: argparse.Namespace) -> list[str]:
    values = {
        "--accelerator": "cpu",
        "--devices": 2,
        "--size": "tiny",
        "--batch-size": 4,
        "--limit-mb": 4,
        "--steps": options.steps,
        "--validate-every": options.steps,
        "--checkpoint-every": options.checkpoint_every,
        "--checkpoint-dir": checkpoints,
        "--hang-timeout": options.hang_timeout,
    }
    flags = [str(part) for pair in values.items() for part in pair]
    return [sys.executable, str(TRAIN), *flags, "--no-progress-bar"]


def fault_flags(kill_at: int) -> list[str]:
    """An exception and a hang shortly before the kill, so that the second start does these steps without them."""
    faults = f"raise:backward:rank=1:step={kill_at - 4}", f"hang:forward:rank=0:step={kill_at - 2}"
    return [part for fault in faults for part in ("--fault", fault)]


def summary(result: Recovery) -> Table:
    """What happened, for a reader with ten seconds: a column for each fault."""
    table = Table(title="What happened, and what it cost")
    table.add_column(no_wrap=True)
    columns = [*(restart_column(restart, result) for restart in result.restarts), kill_column(result)]
    for column in columns:
        table.add_column(column.pop("fault"), justify="right")
    for name in columns[0]:
        table.add_row(name, *(column.get(name, "") for column in columns))
    return table


def restart_column(restart: Restart, result: Recovery) -> dict[str, str]:
    return {
        "fault": f"{restart.kind}\non rank {restart.rank}",
        "noticed after": seconds(restart.noticed_s),
        "trains again after": seconds(restart.recovered_s),
        **{f"  {name}": seconds(value) for name, value in restart.phases.items()},
        "processes": "the same",
        "steps done again": f"{restart.redone}",
        "last step before": f"{restart.step}",
        "  its loss": f"{result.before[restart.step]:.6f}",
        "first step after": f"{restart.next_step}",
        "  its loss ": f"{result.before[restart.next_step]:.6f}",
    }


def kill_column(result: Recovery) -> dict[str, str]:
    first = result.resumed_from + 1
    return {
        "fault": "SIGKILL\nto all",
        "trains again after": seconds(result.started_s),
        "processes": "new ones",
        "steps done again": f"{len(result.redone)}",
        "last step before": f"{result.killed_at}",
        "  its loss": f"{result.before[result.killed_at]:.6f}",
        "first step after": f"{first}",
        "  its loss ": f"{result.after[first]:.6f}",
    }


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def verdict(result: Recovery) -> str:
    first, last = result.redone[0], result.redone[-1]
    stalls = result.stalls_ms
    return (
        f"Steps {first}-{last} were done in both starts, with the faults and without.\n"
        "Their losses are the same, bit for bit.\n"
        f"{len(stalls)} checkpoints were saved; each held training up for {min(stalls):.1f}-{max(stalls):.1f} ms."
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, fail, hang, be killed, go on: see it happen.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--kill-at", type=int, default=37, help="kill once this step is done")
    parser.add_argument("--hang-timeout", type=float, default=8.0, help="seconds without progress that are a hang")
    parser.add_argument("--keep", action="store_true", help="keep the folder with checkpoints and output")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="llama-demo-"))
    try:
        result = Demo(console, folder, options).run()
        problems = result.problems()
        if not problems:
            console.print(summary(result))
            console.print(verdict(result), highlight=False)
    except DemoFailed as failure:
        problems = [str(failure)]
    finally:
        if options.keep:
            console.print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    for problem in problems:
        console.print(f"not as promised: {problem}", style="bold red", markup=False, soft_wrap=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
