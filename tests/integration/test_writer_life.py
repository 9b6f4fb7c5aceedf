"""Ends of ranks and of writers: what is pending is saved or reported, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.ranks import Stem

ENGINE = """
import os, resource, signal, sys, torch
from lightning_resilience.checkpoint.engine import CheckpointEngine, EngineOptions
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts with `&` ignores it
folder = sys.argv[1]
engine = CheckpointEngine(EngineOptions(shm_dir=folder + "/shm", deadline_s=float(sys.argv[2])))
def save(step, count=1):
    state = {"state_dict": {f"w{index}": torch.full((50,), float(step)) for index in range(count)}}
    engine.save_sharded(f"{folder}/{step}.ckpt", step, state, {"meta.pt": b"x"})
"""

SLOW = """
save(1)
engine.wait()
os.kill(engine.writer_pid, signal.SIGSTOP)
save(2)
save(3)
print(engine.writer_pid, flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    return tmp_path


@dataclass(frozen=True)
class Ended:
    """How a rank has ended; its writer may live on."""

    returncode: int
    stdout: str
    stderr: str


def run(folder: Path, code: str) -> Ended:
    """In an interpreter of its own. The writer may outlive it, so its output goes to files, which need no reader."""
    with open(folder / "out", "w+") as out, open(folder / "err", "w+") as err:
        command = [sys.executable, "-c", ENGINE + code, str(folder), "60"]
        returncode = subprocess.run(command, stdout=out, stderr=err, timeout=90).returncode
    return Ended(returncode, (folder / "out").read_text(), (folder / "err").read_text())


def fork(stem: Stem, folder: Path, code: str, deadline_s: float = 60.0) -> Ended:
    """The same in a fork of the warm process, in a third of the time; of a signal it says no more than -1."""
    arguments = (ENGINE + code, str(folder), str(deadline_s))
    job = stem.start("tests.integration.snippets:main", *arguments, ranks=1, folder=folder)
    (returncode,) = job.let_go(timeout=90)
    return Ended(returncode, (folder / "out").read_text(), (folder / "err").read_text())


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ckpt"))


def wait_until_gone(pid: int, folder: Path) -> None:
    deadline = time.monotonic() + 60
    while (Path(f"/proc/{pid}").exists() or os.listdir(folder / "shm")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
    assert os.listdir(folder / "shm") == []


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError('mine')", "os.kill(os.getpid(), signal.SIGINT)"])
def test_however_the_interpreter_ends_what_is_pending_is_saved_before(stem: Stem, folder: Path, end: str) -> None:
    """Nobody has closed the engine; in a container a writer would not outlive its rank."""
    code = "save(1)\nsave(2)\n" + end
    done = run(folder, code) if "SIGINT" in end else fork(stem, folder, code)
    assert saved(folder) == ["1.ckpt", "2.ckpt"]
    assert os.listdir(folder / "shm") == []
    assert {"": 0, "s": 3, "r": 1, "o": -signal.SIGINT}[end[:1]] == done.returncode, done.stderr


def test_an_interpreter_that_ends_while_storage_hangs_reports_what_is_lost(stem: Stem, folder: Path) -> None:
    """The writer is stopped: at the deadline it is killed, its save has failed, and another one writes the next."""
    done = fork(stem, folder, SLOW, deadline_s=1.0)
    assert "2.ckpt (step 2) was NOT saved: it was not durable 1 s after its turn came" in done.stderr
    assert saved(folder) == ["1.ckpt", "3.ckpt"]
    wait_until_gone(int(done.stdout), folder)


def test_an_idle_writer_that_hangs_does_not_hang_the_interpreter(stem: Stem, folder: Path) -> None:
    done = fork(
        stem, folder, "save(1)\nengine.wait()\nos.kill(engine.writer_pid, 19)\nprint(engine.writer_pid, flush=True)"
    )
    assert done.returncode == 0
    wait_until_gone(int(done.stdout), folder)


def test_a_killed_rank_has_all_that_it_staged_written_although_the_second_had_to_wait(stem: Stem, folder: Path) -> None:
    code = SLOW + "os.kill(os.getpid(), signal.SIGKILL)"
    done = fork(stem, folder, code)
    writer = int(done.stdout)
    assert saved(folder) == ["1.ckpt"]
    os.kill(writer, signal.SIGCONT)
    wait_until_gone(writer, folder)
    assert saved(folder) == ["1.ckpt", "2.ckpt", "3.ckpt"]


def test_of_a_killed_rank_only_what_had_not_given_way_is_written(stem: Stem, folder: Path) -> None:
    done = fork(stem, folder, SLOW + "save(4)\nos.kill(os.getpid(), signal.SIGKILL)")
    writer = int(done.stdout)
    os.kill(writer, signal.SIGCONT)
    wait_until_gone(writer, folder)
    assert saved(folder) == ["1.ckpt", "2.ckpt", "4.ckpt"]


def test_a_dead_writer_is_noticed_and_replaced_while_nothing_is_going_on(stem: Stem, folder: Path) -> None:
    code = """
import time
first = engine.writer_pid
os.kill(first, signal.SIGKILL)
began = time.monotonic()
while engine.writer_pid == first and time.monotonic() < began + 60:
    time.sleep(0.001)
print(time.monotonic() - began)
save(1)
"""
    assert fork(stem, folder, code).returncode == 0
    assert saved(folder) == ["1.ckpt"]


BLOCKED = """
import ctypes, subprocess, threading, time
from lightning_resilience.checkpoint.writer import WriterClient
WRITER = '''
import ctypes, sys
from lightning_resilience.checkpoint import writer_process
from lightning_resilience.checkpoint.storage.local import LocalStorage
write = LocalStorage.write
def blocks(self, path, *args):
    if ".2.ckpt" in path:
        ctypes.PyDLL(None).sleep(1000000)
    return write(self, path, *args)
LocalStorage.write = blocks
writer_process.main(int(sys.argv[1]), int(sys.argv[2]))
'''
def start(fd):
    rank = os.pidfd_open(os.getpid())
    try:
        return subprocess.Popen([sys.executable, "-c", WRITER, str(fd), str(rank)], pass_fds=(fd, rank))
    finally:
        os.close(rank)
events = []
options = EngineOptions(shm_dir=folder + "/shm", deadline_s=float(sys.argv[2]))
engine.close()
engine = CheckpointEngine(options, writer=lambda emit: WriterClient(start, emit), emit=events.append)
save(1)
engine.wait()
began = time.monotonic()
save(2)
save(3)
assert time.monotonic() - began < float(sys.argv[2]), "training was held up"
engine.wait()
print([event.kind for event in events if event.kind.startswith("writer")], [r.outcome for r in engine.history])
engine.close()
"""


def test_a_write_that_never_returns_costs_one_save_and_training_goes_on(stem: Stem, folder: Path) -> None:
    """In C, with the interpreter's lock held: no thread of the writer can do anything about it."""
    done = fork(stem, folder, BLOCKED, deadline_s=3.0)
    assert done.stdout == "['writer_hung'] ['saved', 'failed', 'saved']\n", done.stderr
    assert saved(folder) == ["1.ckpt", "3.ckpt"]
    assert os.listdir(folder / "shm") == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_save_is_in_flight_loses_nothing(folder: Path, signum: int) -> None:
    """SIGTERM ends an interpreter at once: the writer finishes alone. After Ctrl-C it is waited for."""
    code = f"save(1, 500)\nsave(2, 500)\nprint(engine.writer_pid, flush=True)\nos.kill(os.getpid(), {signum:d})"
    done = run(folder, code)
    assert done.returncode == -signum
    wait_until_gone(int(done.stdout), folder)
    assert saved(folder) == ["1.ckpt", "2.ckpt"]


STUCK = """
import os, socket, subprocess, sys, time
from lightning_resilience.checkpoint.writer_link import Connection, leave_when_stuck
rank = subprocess.Popen(["sleep", "60"])
pidfd = os.pidfd_open(rank.pid)
ours, theirs = socket.socketpair()
leave_when_stuck(Connection(ours, pidfd), lambda: sys.argv[1], lambda: "; NOT saved: a.ckpt (step 3)", quiet_s=1.0)
rank.kill()
rank.wait()
end = time.monotonic() + 1.5
while time.monotonic() < end:  # it gets on
    sum(range(100000))
print("still here", flush=True)
time.sleep(60)  # it does not
"""


def test_a_writer_whose_rank_is_gone_leaves_when_storage_lets_nothing_through(tmp_path: Path) -> None:
    arena = tmp_path / "arena"
    arena.write_text("")
    done = subprocess.run([sys.executable, "-c", STUCK, str(arena)], capture_output=True, text=True, timeout=50)
    assert done.stdout == "still here\n"
    assert "no progress for 1 s; NOT saved: a.ckpt (step 3)" in done.stderr
    assert done.returncode == 1
    assert not arena.exists()


def test_two_thousand_tensors_under_a_limit_of_256_descriptors(stem: Stem, folder: Path) -> None:
    """What ``ulimit -n 256`` does; torch's own shared tensors take a descriptor each."""
    code = "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\nsave(1, 2000)\nsave(2, 2000)\nengine.close()"
    done = fork(stem, folder, code)
    assert done.returncode == 0, done.stderr
    assert saved(folder) == ["1.ckpt", "2.ckpt"]


SNAPSHOTS = """
from lightning_resilience.checkpoint.envelope import archive
from lightning_resilience.checkpoint.snapshots.choice import Request
from lightning_resilience.checkpoint.snapshots.engine import Snapshots
from lightning_resilience.checkpoint.snapshots.points import State
from lightning_resilience.checkpoint.snapshots.start import begin_run
from lightning_resilience.checkpoint.storage import place_for
snapshots = Snapshots(folder + "/shm", 1)
begin_run(snapshots, place_for(folder), Request(None, asked=True), lambda: [])
engine.rescue(snapshots.run, folder + "/shm", folder, None)
save(1)
small = archive({"global_step": 7})
state = State({"state_dict": {"w": torch.full((50,), 7.0)}}, set(), {"meta.pt": small, "rank.pt": small})
snapshots.take(7, lambda: state)
print(engine.writer_pid, flush=True)
"""


@pytest.mark.parametrize(
    ("end", "rescued"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", True),
        ("engine.close(60.0, to_heir=True)\nsnapshots.close(keep=True)\nassert folder", True),  # an exception in fit
        ("engine.close()\nsnapshots.close(keep=True)", False),  # all is well
    ],
)
def test_a_snapshot_becomes_a_checkpoint_unless_training_has_ended_well(
    stem: Stem, folder: Path, end: str, rescued: bool
) -> None:
    done = fork(stem, folder, SNAPSHOTS + end)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{int(done.stdout)}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert saved(folder) == (["1.ckpt", "rescued-step=7.ckpt"] if rescued else ["1.ckpt"]), (folder / "err").read_text()
    assert len(os.listdir(folder / "shm")) == 1, "the snapshot itself, for a successor"
