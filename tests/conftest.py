"""A test leaves nothing running: no child process, no thread, no shared memory, no changed environment."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.servers.s3 import S3Server
from tests.servers.sftp import SftpServer


def _children() -> set[int]:
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids.update(int(pid) for pid in (task / "children").read_text().split())
        except FileNotFoundError:  # a thread that just ended
            continue
    return pids - S3Server.running


def _shared_memory() -> set[str]:
    """Arenas that nobody holds any more; those of other jobs on this machine are in use."""
    return {str(path) for path in Path("/dev/shm").glob("lightning-resilience-*") if _is_abandoned(path)}


def _is_abandoned(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or gone by now
        return False
    return True


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("lightning-resilience")}


def _leftovers(children: set[int], shm: set[str], threads: set[threading.Thread]) -> str:
    found: dict[str, set[Any]] = {
        "child processes": _children() - children,
        "shared memory": _shared_memory() - shm,
        "threads": _threads() - threads,
    }
    return ", ".join(f"{what}: {sorted(str(item) for item in items)}" for what, items in found.items() if items)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a thread of ours, shared memory or an environment variable."""
    before = _children(), _shared_memory(), _threads()
    environment = dict(os.environ)
    yield
    deadline = time.monotonic() + 5.0  # a process that was told to leave may need a moment to be gone
    while (left := _leftovers(*before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    changed = {key for key in set(environment) | set(os.environ) if environment.get(key) != os.environ.get(key)} - {
        "PYTEST_CURRENT_TEST"
    }
    os.environ.clear()
    os.environ.update(environment)
    assert not left, f"left behind: {left}"
    assert not changed, f"environment variables changed: {sorted(changed)}"


@pytest.fixture(autouse=True)
def an_empty_memory_file_system() -> Iterator[None]:
    """``memory://`` is one for the whole process: what a test puts there must not meet the next one."""
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for the whole session; tests use `s3`."""
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3Server) -> Iterator[S3Server]:
    """An empty bucket. A test that leaves an unfinished upload fails."""
    s3_server.reset()
    yield s3_server
    left = s3_server.uploads()
    assert not left, f"unfinished uploads: {left}"


@pytest.fixture
def sftp(tmp_path: Path) -> Iterator[SftpServer]:
    """A server of an empty folder."""
    (tmp_path / "served").mkdir()
    server = SftpServer(tmp_path / "served")
    yield server
    server.close()
