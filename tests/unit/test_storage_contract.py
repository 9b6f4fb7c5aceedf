"""What every storage promises, asked of each kind: local files, memory, a real S3 server and a real SFTP server."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from lightning_resilience.checkpoint.digest import BlockDigest
from lightning_resilience.checkpoint.storage import Place, place_for
from lightning_resilience.checkpoint.storage.protocol import GivenUp
from lightning_resilience.checkpoint.storage.remote import RemoteStorage
from tests.servers.s3 import BUCKET, S3Server
from tests.servers.sftp import SftpServer

KINDS = ["local", "memory", "s3", "sftp"]
PART = 5 << 20  # the smallest that S3 takes


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty directory on a storage of each kind."""
    if request.param == "local":
        (tmp_path / "run").mkdir()
        return place_for(tmp_path / "run")
    if request.param == "memory":
        return place_for(f"memory://{uuid.uuid4().hex}")
    if request.param == "s3":
        s3: S3Server = request.getfixturevalue("s3")
        return Place(RemoteStorage(f"s3://{BUCKET}", s3.options, part_bytes=PART), f"s3://{BUCKET}/run")
    sftp: SftpServer = request.getfixturevalue("sftp")
    place = place_for(f"{sftp.url}/run", sftp.options)
    place.storage.make_directory(str(place))
    return place


def digest_of(data: bytes) -> str:
    digest = BlockDigest()
    digest.update(memoryview(data))
    return digest.hexdigest()


def names(place: Place) -> list[str]:
    return sorted(entry.name for entry in place.entries())


def test_nothing_is_there_before(root: Place) -> None:
    assert root.entries() == []
    assert (root / "a").entries() == []
    assert not (root / "a").exists()
    with pytest.raises(FileNotFoundError):
        (root / "a").read()
    (root / "a").delete()  # no error


def test_what_is_written_is_there(root: Place) -> None:
    data = os.urandom(300_000)
    before = time.time()
    assert (root / "a").write(data) == digest_of(data)
    assert (root / "a").read() == data
    (entry,) = root.entries()
    assert (entry.name, entry.size, entry.is_directory) == ("a", len(data), False)
    assert before - 2.0 < entry.modified_s < time.time() + 2.0
    assert (root / "a").is_file()
    assert root.is_dir()


@pytest.mark.parametrize("size", [0, 1, 11 << 20, 16 << 20])
def test_sizes(root: Place, size: int) -> None:
    data = os.urandom(size)
    assert (root / "a").write(data) == digest_of(data)
    buffer = memoryview(bytearray(size + 10))
    assert (root / "a").read_into(0, buffer) == size
    assert bytes(buffer[:size]) == data
    assert names(root) == ["a"]


def test_a_tail_replaces_what_is_held_back(root: Place) -> None:
    for size in (100, 11 << 20):
        data = os.urandom(size)
        digest = (root / "a").write(data, tail=lambda digest: digest.encode(), held_back=2)
        assert digest == xxhash.xxh3_64_hexdigest(data[:-2])
        assert (root / "a").read() == data[:-2] + digest.encode()


def test_pieces(root: Place) -> None:
    data = os.urandom(20 << 20)
    (root / "a").write(data)
    for offset, size in [(0, 1), (5, 100), (1 << 20, 17 << 20), (len(data) - 3, 10), (len(data), 10)]:
        buffer = memoryview(bytearray(size))
        count = (root / "a").read_into(offset, buffer)
        assert bytes(buffer[:count]) == data[offset : offset + size]


def test_the_second_replaces_the_first(root: Place) -> None:
    (root / "a").write(b"x" * 100)
    (root / "a").write(b"short")
    assert (root / "a").read() == b"short"
    (root / "a").put(b"other")
    assert (root / "a").read() == b"other"
    (root / "a").put(b"")
    assert (root / "a").read() == b""
    assert names(root) == ["a"]


def test_directories(root: Place) -> None:
    inner = root / "step=1.ckpt" / "attempt-1"
    inner.storage.make_directory(str(inner))
    (inner / ".metadata").put(b"m")
    (root / "step=1.ckpt" / "manifest.json").put(b"{}")
    assert [(entry.name, entry.is_directory) for entry in root.entries()] == [("step=1.ckpt", True)]
    assert names(root / "step=1.ckpt") == ["attempt-1", "manifest.json"]
    assert names(inner) == [".metadata"]
    assert (root / "step=1.ckpt").is_dir()
    (root / "step=1.ckpt").delete()
    assert names(root) == []
    assert not (inner / ".metadata").exists()


@pytest.mark.parametrize("name", ["epoch=0-val_loss=0.52.ckpt", "with space", "ümläut", "a+b%20c#d?e", "[x]", "*"])
def test_names_stay_as_they_are(root: Place, name: str) -> None:
    (root / name).put(b"1")
    assert names(root) == [name]
    assert (root / name).read() == b"1"
    (root / name).delete()
    assert names(root) == []
    for directory in (name, "x"):
        inner = root / directory
        inner.storage.make_directory(str(inner))
        (inner / "meta.pt").put(b"1")
    (root / name).delete()
    assert names(root) == ["x"]


@pytest.mark.parametrize("size", [3 << 20, 22 << 20])
def test_a_write_that_is_given_up_leaves_what_was_there(root: Place, size: int) -> None:
    (root / "a").put(b"before")

    def stop(calls: list[int]) -> Callable[[], None]:
        def progress() -> None:
            calls.append(1)
            if len(calls) == 2 or size < PART or "memory" in repr(root.storage):
                raise GivenUp("time is up")

        return progress

    with pytest.raises(GivenUp, match="time is up"):
        (root / "a").write(os.urandom(size), progress=stop([]))
    if not root.storage.renames:  # locally the draft of a whole checkpoint is what is given up
        assert (root / "a").read() == b"before"
        assert names(root) == ["a"]
