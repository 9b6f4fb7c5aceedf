"""`make demo`: train a small Llama on two CPU processes, kill it without warning, watch it go on.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.llama.recovery import Recovery, recovery
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


def follow(job: Job, log: Path, show: Callable[[dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
    """Show and yield the events that the job logs, until it ends.

    Raises:
        DemoFailed: the job failed, or logs nothing for too long.
    """
    seen = len(read_events(log))
    last_news = time.monotonic()
    status = None
    while status is None:
        status = job.exit_status()  # before the log is read: nothing is written after the last look
        for event in read_events(log)[seen:]:
            seen, last_news = seen + 1, time.monotonic()
            show(event)
            yield event
        if time.monotonic() - last_news > START_LIMIT_SECONDS:
            raise DemoFailed(f"no progress for {START_LIMIT_SECONDS:.0f} s\n{job.last_words()}")
        time.sleep(0.02)
    if status != 0:
        raise DemoFailed(f"training ended with status {status}\n{job.last_words()}")


class Demo:
    """Two starts of one command with a kill between them."""

    def __init__(self, console: Console, folder: Path, options: argparse.Namespace) -> None:
        self._console = console
        self._folder = folder
        self._options = options
        self._log = folder / "checkpoints" / "steps.jsonl"
        self._command = train_command(folder / "checkpoints", options)
        self._jobs: list[Job] = []

    def run(self) -> Recovery:
        self._console.print(f"$ {' '.join(self._command[1:])}", style="dim", markup=False, soft_wrap=True)
        self._console.print("[bold]First run[/]: two processes start and train")
        self._first_run()
        self._console.print("[bold]Second run[/]: the same command again")
        self._second_run()
        if left := [str(path) for job in self._jobs for path in job.shared_memory()]:
            raise DemoFailed(f"shared memory was left behind: {left}")
        return recovery(read_events(self._log), self._options.steps)

    def _first_run(self) -> None:
        with running(self._command, self._folder / "first.out") as job:
            for event in follow(job, self._log, self._show):
                if event["event"] == "step" and event["step"] >= self._options.kill_at:
                    count = job.kill()
                    self._jobs.append(job)
                    self._console.print(f"  [bold red]SIGKILL[/] to all {count} processes of the job")
                    return
        raise DemoFailed("the first run ended before it was killed: give more --steps")

    def _second_run(self) -> None:
        with running(self._command, self._folder / "second.out") as job:
            for event in follow(job, self._log, self._show):
                if event["event"] == "start":
                    job.members()
            job.wait_until_empty(seconds=20.0)
            self._jobs.append(job)

    def _show(self, event: dict[str, Any]) -> None:
        if event["event"] == "start" and event["checkpoint"]:
            name = Path(event["checkpoint"]).name
            self._console.print(f"  [green]resumes by itself[/] from step {event['step']} ({name})")
        if event["event"] == "step" and event["step"] % self._options.checkpoint_every == 0:
            self._console.print(f"  step {event['step']:4d}  loss {event['loss']:.4f}")


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
    }
    flags = [str(part) for pair in values.items() for part in pair]
    return [sys.executable, str(TRAIN), *flags, "--no-progress-bar"]


def summary(result: Recovery) -> Table:
    """What happened, for a reader with ten seconds."""
    first = result.resumed_from + 1
    same = "yes, bit for bit" if not result.different else f"NO: {result.different}"
    stalls = result.stalls_ms
    rows = {
        "killed (SIGKILL) after step": f"{result.killed_at}",
        "resumed from the checkpoint of step": f"{result.resumed_from}",
        "steps redone": f"{len(result.redone)}",
        "redone losses equal the first run's": same,
        f"loss before the kill (step {result.killed_at})": f"{result.before[result.killed_at]:.6f}",
        f"loss right after resuming (step {first})": f"{result.after[first]:.6f}, was {result.before[first]:.6f}",
        f"loss at the end (step {result.steps})": f"{result.after[result.steps]:.6f}",
        "training stalled by a save": f"{min(stalls):.1f}-{max(stalls):.1f} ms, {len(stalls)} saves",
    }
    table = Table(title="Killed and resumed", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, kill, resume: see it happen.")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--kill-at", type=int, default=37, help="kill once this step is done")
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
