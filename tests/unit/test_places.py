"""Paths as users give them: URLs stay as they are, local ones become absolute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from lightning_resilience.checkpoint.storage import LocalStorage, Place, is_url, place_for


@pytest.mark.parametrize(
    "path", ["s3://b/x", "gs://b", "memory://x", "sftp://host/x", "file:///x", "simplecache::s3://b/x", "s3a://b/x"]
)
def test_a_url(path: str) -> None:
    assert is_url(path)


@pytest.mark.parametrize("path", ["/a/b", "a/b", "s3:/b/x", "~/x", "a/b://c", "C:", "step=1.ckpt"])
def test_no_url(path: str) -> None:
    assert not is_url(path)


def test_joining_keeps_a_url_intact() -> None:
    place = Place(LocalStorage(), "s3://bucket/run") / "a.ckpt" / "manifest.json"
    assert str(place) == "s3://bucket/run/a.ckpt/manifest.json"
    assert str(place.parent.parent) == "s3://bucket/run"
    assert place.parent.name == "a.ckpt"
    assert str(place.parent.with_name(".a")) == "s3://bucket/run/.a"


def test_local_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert place_for("a.ckpt").path == str(tmp_path / "a.ckpt")
    assert place_for(tmp_path / "a.ckpt").path == str(tmp_path / "a.ckpt")
    assert place_for(f"file://{tmp_path}/a.ckpt").path == str(tmp_path / "a.ckpt")
    assert place_for("~/a.ckpt").path == os.path.expanduser("~/a.ckpt")
    assert (Place(LocalStorage(), "/") / "a").path == "/a"
    assert (Place(LocalStorage(), "/") / "a").parent.path == "/"


def test_a_file_on_the_local_storage(tmp_path: Path) -> None:
    directory = place_for(tmp_path / "run")
    assert directory.entries() == []
    assert not directory.exists()
    directory.storage.make_directory(directory.path)
    file = directory / "a"
    assert file.write(b"0123456789") == xxhash.xxh3_64_hexdigest(b"0123456789")
    assert file.read() == b"0123456789"
    buffer = memoryview(bytearray(8))
    assert file.read_into(3, buffer) == 7
    assert bytes(buffer[:7]) == b"3456789"
    file.put(b"new")
    (entry,) = directory.entries()
    assert (entry.name, entry.size, entry.is_directory, entry.is_link) == ("a", 3, False, False)
    assert abs(entry.modified_s - os.stat(file.path).st_mtime) < 1e-3
    os.symlink("a", tmp_path / "run" / "link")
    os.symlink("nowhere", tmp_path / "run" / "dangling")
    assert {entry.name for entry in directory.entries() if entry.is_link} == {"link", "dangling"}
    assert (directory / "link").is_file()
    assert not (directory / "dangling").exists()
    directory.delete()
    assert not directory.exists()
    with pytest.raises(FileNotFoundError):
        file.read()
