"""The launcher with real processes and real kills; the ranks import nothing, so they start quickly."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.integration.ranks import ROOT

RANK = """
import os, pathlib, signal, socket, subprocess, sys, time
folder, act = pathlib.Path(sys.argv[1]), sys.argv[2]
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"rank {rank} of {os.environ['WORLD_SIZE']}, start {attempt}", flush=True)
if act == "kill" and (rank, attempt) == ("0", "0"):
    socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 10).close()
    child = "import time, pathlib, sys; time.sleep(1); pathlib.Path(sys.argv[1]).touch()"
    subprocess.Popen([sys.executable, "-c", child, str(folder / "orphan-done")])
    while not (folder / "pid-1").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if act == "wait" or (act, attempt) == ("kill", "0"):
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    time.sleep(60)
"""


@contextlib.contextmanager
def launcher(folder: Path, act: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "train.py").write_text(RANK)
    command = [sys.executable, "-m", "lightning_resilience.launcher", "--nproc-per-node", "2", *options]
    with subprocess.Popen(
        [*command, str(folder / "train.py"), str(folder), act],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_ranks(folder: Path) -> list[int]:
    deadline = time.monotonic() + 30
    files = [folder / f"pid-{rank}" for rank in range(2)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]


def test_killed_rank(tmp_path: Path) -> None:
    with launcher(tmp_path, "kill", "--tee", "1", "--log-dir", str(tmp_path / "logs")) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    expected = [f"[default{rank}]:rank {rank} of 2, start {start}" for rank in range(2) for start in range(2)]
    assert sorted(out.splitlines()) == expected
    assert "rank 0 was killed by SIGKILL" in err
    assert "Restart 1 of 3: all 2 ranks start anew" in err
    assert "1 restart: all ranks are done. Exit code 0" in err
    (file,) = (tmp_path / "logs").glob("*/attempt_1/0/stdout.log")
    assert file.read_text() == "rank 0 of 2, start 1\n"
    assert (tmp_path / "orphan-done").exists(), "what the rank had left behind was not waited for"


def test_sigterm(tmp_path: Path) -> None:
    with launcher(tmp_path, "wait") as process:
        pids = wait_for_ranks(tmp_path)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "SIGTERM: passed on to ranks 0, 1" in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_killed_launcher(tmp_path: Path) -> None:
    with launcher(tmp_path, "wait") as process:
        wait_for_ranks(tmp_path)
        process.kill()
        process.communicate(timeout=60)  # the ranks hold the pipes too: this is the end of all of them


def test_command_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_resilience.launcher", "--no-python", str(tmp_path / "nothing")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "cannot be run" in done.stderr
