"""Files become durable whole, and replace what was there in one step."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest
import xxhash

from lightning_resilience.checkpoint.digest import BLOCK
from lightning_resilience.checkpoint.storage import local as storage


def test_the_digest_is_that_of_the_data(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    digest = storage.write_durably(tmp_path / "a", memoryview(data))
    assert (tmp_path / "a").read_bytes() == data
    assert digest == xxhash.xxh3_64_hexdigest(data)


@pytest.mark.parametrize("size", [8 << 20, (8 << 20) + 1, (20 << 20) - 1])
@pytest.mark.parametrize("misaligned", [0, 64])
def test_large_files_are_written_past_the_page_cache_to_the_same_bytes(
    tmp_path: Path, size: int, misaligned: int
) -> None:
    memory = mmap.mmap(-1, size + misaligned)
    memory.write(os.urandom(size + misaligned))
    data = memoryview(memory)[misaligned:]
    digest = storage.write_durably(tmp_path / "a", data, tail=lambda digest: b"xy", held_back=2)
    found = (tmp_path / "a").read_bytes()
    assert found == bytes(data[:-2]) + b"xy"
    assert digest == xxhash.xxh3_64_hexdigest(found[:-2])


def test_where_direct_writing_fails_half_way_the_rest_is_written_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(16 << 20)
    write, calls = os.write, []

    def refuse_the_second(fd: int, piece: memoryview) -> int:
        calls.append(len(piece))
        if len(calls) == 2:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, piece)

    monkeypatch.setattr(os, "write", refuse_the_second)
    memory = mmap.mmap(-1, len(data))
    memory.write(data)
    digest = storage.write_durably(tmp_path / "a", memoryview(memory))
    assert (tmp_path / "a").read_bytes() == data
    assert digest == "".join(xxhash.xxh3_64_hexdigest(data[start : start + BLOCK]) for start in (0, BLOCK))


def test_a_tail_replaces_what_is_held_back(tmp_path: Path) -> None:
    storage.write_durably(tmp_path / "a", memoryview(b"abcdef"), tail=lambda digest: b"-end", held_back=2)
    assert (tmp_path / "a").read_bytes() == b"abcd-end"


@pytest.mark.parametrize(("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_permissions_are_those_the_umask_says(tmp_path: Path, mask: int, file: int, folder: int) -> None:
    before = os.umask(mask)
    try:
        storage.LocalStorage().make_directory(str(tmp_path / "a.ckpt"))
        storage.write_durably(tmp_path / "a.ckpt" / "meta.pt", memoryview(b"x"))
    finally:
        os.umask(before)
    assert os.stat(tmp_path / "a.ckpt").st_mode & 0o777 == folder
    assert os.stat(tmp_path / "a.ckpt" / "meta.pt").st_mode & 0o777 == file


def test_a_shorter_second_try_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    storage.write_durably(tmp_path / "a", memoryview(b"x" * 100))
    storage.write_durably(tmp_path / "a", memoryview(b"short"))
    assert (tmp_path / "a").read_bytes() == b"short"


def a_directory(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


@pytest.mark.parametrize("exchanges", [True, False], ids=["renameat2", "without renameat2"])
@pytest.mark.parametrize("old", ["nothing", "directory", "file"])
def test_put_in_place_replaces_whatever_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, exchanges: bool
) -> None:
    target = tmp_path / "target.ckpt"
    if old == "directory":
        a_directory(target, "old")
    elif old == "file":
        target.write_text("old")
    if not exchanges:
        monkeypatch.setattr(storage, "_exchange", lambda first, second: False)
    storage.put_in_place(a_directory(tmp_path / ".attempt", "new"), target)
    assert (target / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["target.ckpt"]


def test_an_error_of_the_exchange_is_not_swallowed(tmp_path: Path) -> None:
    target = a_directory(tmp_path / "target", "old")
    with pytest.raises(OSError, match="target") as caught:
        storage.put_in_place(tmp_path / "missing", target)
    assert caught.value.errno == errno.ENOENT
    assert (target / "file").read_text() == "old"


def test_delete_takes_directories_files_and_links(tmp_path: Path) -> None:
    kept = a_directory(tmp_path / "kept", "kept")
    (tmp_path / "link").symlink_to(kept)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "link", tmp_path / "file", a_directory(tmp_path / "gone", "")):
        storage.delete(path)
    assert os.listdir(tmp_path) == ["kept"]
    assert (kept / "file").read_text() == "kept"
