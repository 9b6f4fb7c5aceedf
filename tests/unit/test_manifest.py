"""Manifest and seal: they prove themselves, and any change of a byte is noticed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from lightning_resilience.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    Seal,
    read_manifest,
    read_seal,
    seal_tail,
)
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.errors import DamagedCheckpointError


def a_manifest() -> Manifest:
    return Manifest(
        step=30,
        world_size=2,
        attempt="abc",
        created_ns=17,
        files={"meta.pt": FileRecord(3, "0" * 16), "__0_0.distcp": FileRecord(9, "f" * 16)},
    )


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(a_manifest().encode())
    assert read_manifest(place_for(tmp_path)) == a_manifest()


def test_no_manifest_is_not_an_error(tmp_path: Path) -> None:
    assert read_manifest(place_for(tmp_path)) is None


def test_every_flipped_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    good = a_manifest().encode()
    for position in range(len(good) - 1):  # the last byte is a newline that means nothing
        bad = bytearray(good)
        bad[position] ^= 0x01
        (tmp_path / MANIFEST).write_bytes(bad)
        with pytest.raises(DamagedCheckpointError, match=MANIFEST):
            read_manifest(place_for(tmp_path))


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/b", "..", "", "a\\b"])
def test_a_manifest_cannot_name_files_outside_the_checkpoint(tmp_path: Path, name: str) -> None:
    hostile = Manifest(step=1, world_size=1, attempt="x", created_ns=1, files={name: FileRecord(1, "0" * 16)})
    (tmp_path / MANIFEST).write_bytes(hostile.encode())
    with pytest.raises(DamagedCheckpointError, match="outside the checkpoint"):
        read_manifest(place_for(tmp_path))


def sealed(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()
    return data[:-2] + seal_tail(len(data), step=7, created_ns=99, digest="0123456789abcdef")


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_a_sealed_file(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(sealed({"weight": torch.arange(1000)}))
    assert torch.equal(torch.load(path, mmap=mmap, weights_only=True)["weight"], torch.arange(1000))
    seal = read_seal(place_for(path))
    assert seal == Seal(size=seal.size if seal else 0, xxh3="0123456789abcdef", step=7, created_ns=99)


def test_a_file_of_plain_torch_has_no_seal(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "a.ckpt")
    assert read_seal(place_for(tmp_path / "a.ckpt")) is None


@pytest.mark.parametrize("cut", [1, 2, 30, 150])
def test_a_truncated_seal_is_noticed(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(sealed({"weight": torch.ones(3)})[:-cut])
    with pytest.raises(DamagedCheckpointError, match="missing or changed"):
        read_seal(place_for(path))


@pytest.mark.parametrize("content", [b"", b"P", b"XK" + b"\0" * 100])
def test_a_file_that_does_not_begin_as_one_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="is no checkpoint, or a damaged one"):
        read_seal(place_for(tmp_path / "a.ckpt"))


def test_a_sealed_file_with_a_changed_start_is_still_held_to_its_seal(tmp_path: Path) -> None:
    data = bytearray(sealed({"weight": torch.ones(3)}))
    data[0] ^= 1
    (tmp_path / "a.ckpt").write_bytes(data)
    assert read_seal(place_for(tmp_path / "a.ckpt")) is not None


def test_torchs_old_format_has_no_seal(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "a.ckpt", _use_new_zipfile_serialization=False)
    assert read_seal(place_for(tmp_path / "a.ckpt")) is None
