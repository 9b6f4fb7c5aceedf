"""Jobs of several real ranks, started quickly: begin, await, or kill one with every process it has started.

Runs in the test process. The ranks are forked from a warm process (`stem.py`); a rank and whatever it starts
carry a mark of the job in their environment, so that writers, which outlive their rank, are found as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
_MARK = "LIGHTNING_RESILIENCE_TEST_JOB"
_POLL_S = 0.01


class JobFailed(AssertionError):
    """A rank ended with an error, or did not end."""


class Job:
    """All processes of one job; leaving the `with` block kills what is left of it."""

    def __init__(self, mark: str, pids: Sequence[int], output: Path) -> None:
        self._mark = f"{_MARK}={mark}".encode()
        self._ranks = {pid: os.pidfd_open(pid) for pid in pids}
        self._output = output
        self._known: set[int] = set()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for fd in self._ranks.values():
            os.close(fd)

    @property
    def output(self) -> str:
        """What all ranks and their writers have printed, rank by rank."""
        return "\n".join(self._outputs())

    @property
    def last_words(self) -> str:
        """The end of what each has printed: what comes last explains most."""
        return "\n".join(f"--- rank {rank}\n{text[-6000:]}" for rank, text in enumerate(self._outputs()))

    def _outputs(self) -> list[str]:
        files = [Path(f"{self._output}.{rank}.out") for rank in range(len(self._ranks))]
        return [file.read_text(errors="replace") for file in files if file.exists()]

    def members(self) -> set[int]:
        """Ids of the processes that are alive now."""
        started = {int(folder.name) for folder in Path("/proc").glob("[0-9]*") if self._is_marked(folder)}
        self._known = started | self.alive_ranks()
        return set(self._known)

    def alive_ranks(self) -> set[int]:
        """Ids of the ranks that have not ended."""
        ended = select.select(list(self._ranks.values()), [], [], 0)[0]
        return {pid for pid, fd in self._ranks.items() if fd not in ended}

    def kill(self) -> int:
        """SIGKILL to every process; returns how many there were.

        Ranks go first: a rank that outlived its writer for a moment would start another one.
        """
        killed: set[int] = set()
        targets = self._known or self.members()
        while targets:
            for pid in sorted(targets, key=lambda pid: pid not in self._ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= targets
            time.sleep(_POLL_S)
            targets = self.members()
        return len(killed)

    def wait(self, timeout: float = 100.0) -> str:
        """Until all ranks and their writers have ended; returns what they printed.

        Raises:
            JobFailed: A rank has failed, or something did not end.
        """
        deadline = time.monotonic() + timeout
        while members := self.alive_ranks() or self.members():
            if time.monotonic() > deadline:
                raise JobFailed(f"{members} did not end in {timeout} s\n{self.last_words}")
            time.sleep(0.05)
        if any(self.codes):
            raise JobFailed(f"the ranks ended with {self.codes}\n{self.last_words}")
        return self.output

    def let_go(self, timeout: float) -> list[int]:
        """Wait for the ranks, and for nothing that they have started, which is nobody's now; returns their codes.

        Raises:
            JobFailed: A rank does not end. Then nothing of the job is left.
        """
        deadline = time.monotonic() + timeout
        while ranks := self.alive_ranks():
            if time.monotonic() > deadline:
                self.__exit__()
                raise JobFailed(f"{ranks} did not end in {timeout} s\n{self.last_words}")
            time.sleep(_POLL_S)
        for fd in self._ranks.values():
            os.close(fd)
        return self.codes

    @property
    def codes(self) -> list[int]:
        """With which code each rank has ended; -1 for one that was killed, or still runs."""
        return [_exit_code(Path(f"{self._output}.{rank}.exit")) for rank in range(len(self._ranks))]

    def wait_for(self, path: Path, timeout: float = 60.0) -> None:
        """Until a file is there.

        Raises:
            JobFailed: It does not come, or the job ends before.
        """
        deadline = time.monotonic() + timeout
        while not path.exists():
            if time.monotonic() > deadline or not self.alive_ranks():
                raise JobFailed(f"{path} did not appear\n{self.last_words}")
            time.sleep(_POLL_S)

    def _is_marked(self, folder: Path) -> bool:
        try:
            return self._mark in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or of another user
            return False


class Stem:
    """The warm process. Lives for a test session.

    Args:
        modules: What it imports before the first job.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.stem", *modules],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def load(self, module: str) -> None:
        """Import one more module, for jobs to come."""
        self._ask({"import": module})

    def start(self, call: str, *arguments: str, ranks: int, folder: Path) -> Job:
        """Start `module:function` on new ranks, with `arguments` as `sys.argv[1:]`.

        Args:
            call: What to call on each.
            arguments: For `sys.argv`.
            ranks: How many.
            folder: Where their output goes.
        """
        mark = uuid.uuid4().hex[:12]
        output = folder / f"job-{mark}"
        environment = {_MARK: mark, "TORCHELASTIC_RUN_ID": mark}  # to Lightning the job was started by torchrun
        environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        order = {"call": call, "arguments": arguments, "ranks": ranks, "output": str(output)}
        return Job(mark, json.loads(self._ask({**order, "environment": environment})), output)

    def run(self, call: str, *arguments: str, ranks: int, folder: Path, timeout: float = 100.0) -> str:
        """Start a job and wait for it; returns what it printed."""
        with self.start(call, *arguments, ranks=ranks, folder=folder) as job:
            return job.wait(timeout)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()

    def _ask(self, order: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        assert answer, "the process that forks the ranks has died"
        return answer


def _exit_code(file: Path) -> int:
    """What a rank said at its end; one that was killed said nothing."""
    return int(file.read_text()) if file.exists() else -1
