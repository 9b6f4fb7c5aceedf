"""Reading a checkpoint directory: regions, and what a hostile directory may not do."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as ChunkMetadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from lightning_resilience._torch import storage_info
from lightning_resilience.checkpoint.envelope import archive
from lightning_resilience.checkpoint.files import CheckpointFiles
from lightning_resilience.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from lightning_resilience.checkpoint.reader import ShardReader, load_archive, overlap
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.errors import DamagedCheckpointError, UntrustedCheckpointError


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize(
    ("saved", "wanted", "expected"),
    [
        (((0, 0), (4, 4)), ((0, 0), (4, 4)), ((0, 4), (0, 4), (0, 4), (0, 4))),
        (((0, 0), (2, 4)), ((1, 0), (2, 4)), ((1, 2), (0, 4), (0, 1), (0, 4))),
        (((2, 1), (2, 2)), ((0, 0), (3, 2)), ((0, 1), (0, 1), (2, 3), (1, 2))),
        (((0, 0), (2, 4)), ((2, 0), (2, 4)), None),
        (((0, 0), (2, 4)), ((0, 0), (0, 4)), None),
    ],
)
def test_overlap(saved: Any, wanted: Any, expected: Any) -> None:
    region = overlap(*saved, *wanted)
    found = None if region is None else tuple((part.start, part.stop) for part in (*region.saved, *region.wanted))
    assert found == expected


def test_scalars_overlap_entirely() -> None:
    assert overlap((), (), (), ()) == ((), ())


def a_directory(path: Path, relative: str = "__0_0.distcp") -> Path:
    """Two pieces of a 4x2 tensor in one file."""
    pieces = [archive(torch.arange(4.0).reshape(2, 2)), archive(torch.arange(4.0, 8.0).reshape(2, 2))]
    (path / "__0_0.distcp").write_bytes(b"".join(pieces))
    offsets = [torch.Size((0, 0)), torch.Size((2, 0))]
    places = [(0, len(pieces[0])), (len(pieces[0]), len(pieces[1]))]
    metadata = Metadata(
        state_dict_metadata={
            "w": TensorStorageMetadata(
                TensorProperties(torch.float32),
                torch.Size((4, 2)),
                [ChunkMetadata(offset, torch.Size((2, 2))) for offset in offsets],
            )
        },
        storage_data={
            MetadataIndex("w", offset): storage_info(relative, *place)
            for offset, place in zip(offsets, places, strict=True)
        },
    )
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def test_a_tensor_is_put_together_from_its_pieces(tmp_path: Path) -> None:
    reader = ShardReader(place_for(a_directory(tmp_path)))
    whole = torch.zeros(4, 2)
    reader.read_into({"w": whole})
    assert torch.equal(whole, torch.arange(8.0).reshape(4, 2))


@pytest.mark.parametrize("relative", ["../__0_0.distcp", "/etc/passwd", "a/__0_0.distcp", "..", "", "a\\b", "a\0b"])
def test_a_path_in_the_metadata_never_leaves_the_directory(tmp_path: Path, relative: str) -> None:
    with pytest.raises(UntrustedCheckpointError, match="names a file outside of it"):
        ShardReader(place_for(a_directory(tmp_path, relative=relative))).read_into({"w": torch.zeros(4, 2)})


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    a_directory(tmp_path)
    os.truncate(tmp_path / "__0_0.distcp", 100)
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp ends before it is complete"):
        ShardReader(place_for(tmp_path)).read_into({"w": torch.zeros(4, 2)})


def test_metadata_cannot_run_code(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    with pytest.raises(UntrustedCheckpointError, match=r"refers to posix\.mkdir"):
        ShardReader(place_for(tmp_path))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04garbage", pickle.dumps(Metadata({}))[:-5]])
def test_metadata_that_cannot_be_read_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="metadata"):
        ShardReader(place_for(tmp_path))


def test_an_archive_cannot_run_code_unless_it_is_trusted(tmp_path: Path) -> None:
    data = archive({"bomb": Bomb(tmp_path / "mark")})
    with pytest.raises(UntrustedCheckpointError, match=r"meta\.pt holds objects.*posix\.mkdir.*trust=True"):
        load_archive(io.BytesIO(data), "meta.pt", trust=False)
    assert not (tmp_path / "mark").exists()
    load_archive(io.BytesIO(data), "meta.pt", trust=True)
    assert (tmp_path / "mark").exists()


def test_paths_are_harmless(tmp_path: Path) -> None:
    assert load_archive(io.BytesIO(archive({"dirpath": tmp_path})), "meta.pt", trust=False) == {"dirpath": tmp_path}


def test_files_in_a_folder_of_their_own_are_found(tmp_path: Path) -> None:
    """As on an object store, where the metadata names files by their path from the checkpoint."""
    folder = tmp_path / "attempt-1"
    folder.mkdir()
    a_directory(folder, relative="attempt-1/__0_0.distcp")
    files = {name: FileRecord((folder / name).stat().st_size, digest_of(folder / name)) for name in os.listdir(folder)}
    (tmp_path / MANIFEST).write_bytes(Manifest(1, 1, "1", 1, files, folder="attempt-1").encode())
    target = torch.zeros(4, 2)
    ShardReader(place_for(tmp_path)).read_into({"w": target})
    assert torch.equal(target, torch.arange(8.0).reshape(4, 2))
    with pytest.raises(UntrustedCheckpointError, match="outside"):
        CheckpointFiles(place_for(folder), None, trust=False).size("attempt-1/__0_0.distcp")


def digest_of(path: Path) -> str:
    return xxhash.xxh3_64_hexdigest(path.read_bytes())
