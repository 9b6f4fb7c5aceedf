"""The arena: room is asked for before it is used, private, and never left behind."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from lightning_resilience.checkpoint.arena import Arena, sweep
from lightning_resilience.errors import ArenaError


def test_its_file_is_private_and_gone_after_close(tmp_path: Path) -> None:
    arena = Arena(str(tmp_path), 10_000, 2, "rank0")
    arena.ready()
    assert stat.S_IMODE(os.stat(arena.path).st_mode) == 0o600
    assert arena.slot_bytes == 12_288
    assert os.stat(arena.path).st_blocks * 512 >= arena.size  # allocated, not sparse
    arena.close()
    assert os.listdir(tmp_path) == []


def test_too_little_shared_memory_is_an_error_that_says_how_to_get_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statvfs = namedtuple("statvfs", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: statvfs(64 << 8, 4096))
    with pytest.raises(ArenaError, match=r"needs 2\.00 GiB in .* and 0\.06 GiB are free.*--shm-size.*medium: Memory"):
        Arena(str(tmp_path), 1 << 30, 2, "rank0")
    assert os.listdir(tmp_path) == []


def test_memory_that_vanishes_later_is_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    arena = Arena(str(tmp_path), 4096, 2, "rank0")
    with pytest.raises(ArenaError, match="No space left on device"):
        arena.ready()
    arena.close()


@pytest.mark.parametrize("directory", ["/nonexistent", "/dev/null/x"])
def test_a_directory_that_cannot_be_used_is_named(directory: str) -> None:
    with pytest.raises(ArenaError, match=directory):
        Arena(directory, 4096, 1, "rank0")


def test_the_sweep_takes_the_arena_of_a_killed_process_and_leaves_ours(tmp_path: Path) -> None:
    code = f"""
import os
from lightning_resilience.checkpoint.arena import Arena
Arena({str(tmp_path)!r}, 4096, 1, "rank7").ready()
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code])
    (dead,) = os.listdir(tmp_path)
    assert "rank7" in dead
    ours = Arena(str(tmp_path), 4096, 1, "rank0")  # sweeps
    assert os.listdir(tmp_path) == [os.path.basename(ours.path)]
    assert sweep(str(tmp_path)) == []
    ours.close()


def test_the_sweep_touches_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "somebody-elses").write_text("")
    (tmp_path / "lightning-resilience-link").symlink_to(tmp_path / "somebody-elses")
    sweep(str(tmp_path))
    assert len(os.listdir(tmp_path)) == 2
