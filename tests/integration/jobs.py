"""Start the processes of a training job and wait for them: one function a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(module: str, *arguments: str, ranks: int, timeout: float = 240) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return _wait([_start([*launcher, "-m", module, *arguments])], timeout)


def script(module: str, *arguments: str, timeout: float = 120) -> str:
    """`python -m module`, which starts the other ranks by itself."""
    return _wait([_start(["-m", module, *arguments])], timeout)


def _start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _wait(processes: list[subprocess.Popen[str]], timeout: float) -> str:
    """Output of the first process. Whatever happens, no process of the job is left."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        for process, output in zip(processes, outputs, strict=True):
            assert process.returncode == 0, output[-5000:]
        return outputs[0]
    finally:
        for process in processes:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
