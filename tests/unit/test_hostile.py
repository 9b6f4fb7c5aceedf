"""A checkpoint directory from somebody else: it cannot run code, fill the memory, block, or lead anywhere."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import random
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_resilience import newest_checkpoint
from lightning_resilience._torch import storage_info
from lightning_resilience.checkpoint.archives import load_archive
from lightning_resilience.checkpoint.candidates import examine
from lightning_resilience.checkpoint.envelope import archive
from lightning_resilience.checkpoint.manifest import MANIFEST, FileRecord, Manifest, read_manifest
from lightning_resilience.checkpoint.metadata import decode_metadata
from lightning_resilience.checkpoint.optimizers import apply_state
from lightning_resilience.checkpoint.pickles import PickleGuard
from lightning_resilience.checkpoint.restore import Target, restore
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.errors import CheckpointError, DamagedCheckpointError, LoadError, UntrustedCheckpointError
from tests.unit.test_reader import Bomb
from tests.unit.test_restore import a_module, trained, two_groups, write_sharded

HUGE = 2**60


def seal(path: Path) -> Path:
    """An attacker can compute checksums too."""
    files = {}
    for file in path.iterdir():
        if file.is_file() and file.name != MANIFEST:
            data = file.read_bytes()
            files[file.name] = FileRecord(len(data), xxhash.xxh3_64_hexdigest(data))
    (path / MANIFEST).write_bytes(Manifest(2, 1, "try", 1, files).encode())
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module, optimizer = trained()
    path = write_sharded(tmp_path_factory.mktemp("hostile") / "a.ckpt", module, optimizer)
    (path / "rank_0.pt").write_bytes(archive({}))
    return seal(path)


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "a.ckpt")


def load(path: Path, trust: bool = False) -> Any:
    module = a_module()
    target = Target(module, [two_groups(module)], trust=trust)
    return restore(place_for(path), target, fall_back=False)


def metadata_of(path: Path) -> Metadata:
    return decode_metadata((path / ".metadata").read_bytes(), "it")


def rewrite(path: Path, change: Callable[[Metadata], None]) -> Path:
    metadata = metadata_of(path)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return seal(path)


def test_it_loads_as_long_as_nobody_touches_it(checkpoint: Path) -> None:
    load(checkpoint)


# --- code ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "rank_0.pt", "value"])
def test_no_file_can_run_code(checkpoint: Path, tmp_path: Path, name: str) -> None:
    bomb = Bomb(tmp_path / "mark")
    if name == ".metadata":
        (checkpoint / name).write_bytes(pickle.dumps(bomb))
    elif name != "value":
        (checkpoint / name).write_bytes(archive({"bomb": bomb}))
    else:
        data = archive(bomb)
        (checkpoint / "__9_0.distcp").write_bytes(data)

        def change(metadata: Metadata) -> None:
            value = next(k for k, v in metadata.state_dict_metadata.items() if isinstance(v, BytesStorageMetadata))
            metadata.storage_data[MetadataIndex(value)] = storage_info("__9_0.distcp", 0, len(data))

        rewrite(checkpoint, change)
    with pytest.raises(UntrustedCheckpointError, match=r"posix\.mkdir"):
        load(seal(checkpoint))
    assert not (tmp_path / "mark").exists()


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../meta.pt", "/etc/passwd", "a/b", "..", "", "a\\b", "a\0b"])
def test_a_manifest_names_nothing_outside(checkpoint: Path, name: str) -> None:
    for files, folder in (({name: FileRecord(1, "0" * 16)}, ""), ({}, name)):
        if folder == "" and not files:
            continue
        (checkpoint / MANIFEST).write_bytes(Manifest(1, 1, "x", 1, files, folder).encode())
        with pytest.raises(DamagedCheckpointError, match="outside the checkpoint"):
            load(checkpoint)


def test_metadata_uses_only_what_the_manifest_proves(checkpoint: Path) -> None:
    module, optimizer = trained()
    other = write_sharded(checkpoint.parent / "other", module, optimizer)
    os.rename(other / "__0_0.distcp", checkpoint / "__7_0.distcp")

    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "__7_0.distcp"

    manifest = (checkpoint / MANIFEST).read_bytes()
    rewrite(checkpoint, change)
    files = dict(read_manifest(place_for(checkpoint)).files)  # type: ignore[union-attr]
    del files["__7_0.distcp"]
    (checkpoint / MANIFEST).write_bytes(Manifest(2, 1, "try", 1, files).encode())
    assert manifest
    with pytest.raises(DamagedCheckpointError, match=r"__7_0\.distcp is needed, and the manifest does not know it"):
        load(checkpoint)


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__0_0.distcp", "rank_0.pt"])
def test_a_link_is_followed_only_if_it_is_trusted(checkpoint: Path, tmp_path: Path, name: str) -> None:
    os.rename(checkpoint / name, tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedCheckpointError, match=rf"{name} is a link"):
        load(checkpoint)
    load(checkpoint, trust=True)


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__0_0.distcp", "rank_0.pt", MANIFEST])
@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "nowhere"])
def test_what_is_no_file_blocks_nobody(checkpoint: Path, name: str, kind: str) -> None:
    (checkpoint / name).unlink()
    if kind == "pipe":
        os.mkfifo(checkpoint / name)
    elif kind == "directory":
        (checkpoint / name).mkdir()
    elif kind == "nowhere":
        (checkpoint / name).symlink_to("nothing")
    else:
        here = os.getcwd()
        os.chdir(checkpoint)  # names of sockets are short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
        os.chdir(here)
    with pytest.raises(LoadError):
        load(checkpoint)
    with pytest.raises(LoadError):
        load(checkpoint, trust=True)


def test_a_pipe_without_a_manifest_blocks_nobody(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    (checkpoint / "rank_0.pt").unlink()
    load(checkpoint)
    (checkpoint / "meta.pt").unlink()
    os.mkfifo(checkpoint / "meta.pt")
    with pytest.raises(LoadError, match=r"meta\.pt"):
        load(checkpoint)
    os.mkfifo(checkpoint.parent / "b.ckpt")
    assert examine(place_for(checkpoint.parent / "b.ckpt")).fault


# --- sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [HUGE, -1, 1.5, True, "7", None])
def test_a_manifest_with_absurd_sizes_is_refused(checkpoint: Path, size: Any) -> None:
    record = FileRecord(size, "0" * 16)
    (checkpoint / MANIFEST).write_bytes(Manifest(1, 1, "x", 1, {"meta.pt": record}).encode())
    with pytest.raises(DamagedCheckpointError, match=r"manifest|has \d+ bytes instead"):
        load(checkpoint)


@pytest.mark.parametrize("field", ["step", "world_size", "created_ns", "attempt"])
@pytest.mark.parametrize("value", [-1, 1.5, None, [], float("inf"), True])
def test_a_manifest_whose_numbers_are_none_is_refused(checkpoint: Path, field: str, value: Any) -> None:
    body = json.loads((checkpoint / MANIFEST).read_bytes())["manifest"]
    write_manifest(checkpoint, {**body, field: value})
    with pytest.raises(DamagedCheckpointError, match="manifest"):
        load(checkpoint)


def write_manifest(path: Path, body: Any) -> None:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = xxhash.xxh3_64_hexdigest(text.encode())
    (path / MANIFEST).write_text(f'{{"manifest":{text},"xxh3":"{digest}"}}')


def test_a_manifest_of_a_million_files_or_nested_without_end_is_refused(checkpoint: Path) -> None:
    body = json.loads((checkpoint / MANIFEST).read_bytes())["manifest"]
    record = {"size": 1, "xxh3": "0" * 16}
    write_manifest(checkpoint, {**body, "files": {str(number): record for number in range(300_000)}})
    with pytest.raises(DamagedCheckpointError, match="it names 300000 files"):
        load(checkpoint)
    (checkpoint / MANIFEST).write_text("[" * 1_000_000)
    with pytest.raises(DamagedCheckpointError, match="manifest"):
        load(checkpoint)
    with open(checkpoint / MANIFEST, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(DamagedCheckpointError, match=r"no manifest needs more"):
        load(checkpoint)


def test_a_sparse_file_of_a_terabyte_is_not_read_into_memory(checkpoint: Path) -> None:
    for name in (".metadata", "meta.pt"):
        before = (checkpoint / name).read_bytes()
        os.truncate(checkpoint / name, 2**40)
        files = {**read_manifest(place_for(checkpoint)).files, name: FileRecord(2**40, "0" * 16)}  # type: ignore[union-attr]
        (checkpoint / MANIFEST).write_bytes(Manifest(2, 1, "try", 1, files).encode())
        with pytest.raises(UntrustedCheckpointError, match=rf"{name} has \d+ bytes, which no such file needs"):
            load(checkpoint)
        (checkpoint / name).write_bytes(before)
        seal(checkpoint)


def grow(metadata: Metadata, name: str, shape: tuple[int, ...]) -> None:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    entry.size = torch.Size(shape)
    offsets = torch.Size([0] * len(shape))
    info = metadata.storage_data.pop(MetadataIndex(name, entry.chunks[0].offsets))
    entry.chunks = [ChunkStorageMetadata(offsets, torch.Size(shape))]
    metadata.storage_data[MetadataIndex(name, offsets)] = info


@pytest.mark.parametrize("shape", [(2**40,), (2**20, 2**20), (2**31, 2**31), (10**9,)])
def test_shapes_that_the_files_cannot_fill_take_no_memory(checkpoint: Path, shape: tuple[int, ...]) -> None:
    rewrite(checkpoint, lambda metadata: grow(metadata, "optimizer_0.state.0.weight.exp_avg", shape))
    with pytest.raises(UntrustedCheckpointError, match="larger than its files"):
        load(checkpoint)


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1", reason="this kernel promises any memory"
)
def test_a_sparse_file_does_not_fill_the_memory_either(checkpoint: Path) -> None:
    """Its size is real enough to hold the tensor that the metadata tells of, and nothing proves it."""
    (checkpoint / MANIFEST).unlink()
    (checkpoint / "rank_0.pt").unlink()
    metadata = metadata_of(checkpoint)
    grow(metadata, "optimizer_0.state.0.weight.exp_avg", (2**40,))
    info = metadata.storage_data[MetadataIndex("optimizer_0.state.0.weight.exp_avg", torch.Size([0]))]
    info.length = 2**42 + 2000
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    os.truncate(checkpoint / "__0_0.distcp", info.offset + info.length)
    with pytest.raises(LoadError, match="no room in memory"):
        load(checkpoint)


def test_a_place_beyond_the_end_of_a_file(checkpoint: Path) -> None:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.length = HUGE

    with pytest.raises(DamagedCheckpointError, match="ends before it is complete"):
        load(rewrite(checkpoint, change))


@pytest.mark.parametrize("value", [-1, 1.5, "0", None, True, float("nan")])
@pytest.mark.parametrize("field", ["offset", "length"])
def test_places_that_are_no_numbers(checkpoint: Path, field: str, value: Any) -> None:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            setattr(info, field, value)

    with pytest.raises(UntrustedCheckpointError, match="does not say where"):
        load(rewrite(checkpoint, change))


CHANGES: dict[str, Callable[[Metadata], None]] = {
    "names": lambda metadata: metadata.state_dict_metadata.update({3: BytesStorageMetadata()}),  # type: ignore[dict-item]
    "entries": lambda metadata: metadata.state_dict_metadata.update({"x": 3}),  # type: ignore[dict-item]
    "state": lambda metadata: setattr(metadata, "state_dict_metadata", [1]),
    "storage": lambda metadata: setattr(metadata, "storage_data", 7),
    "paths": lambda metadata: metadata.planner_data.update({"x": (b"y",)}),
    "path": lambda metadata: metadata.planner_data.update({"x": 4}),
    "piece outside": lambda metadata: metadata.state_dict_metadata.update(
        {
            "x": TensorStorageMetadata(
                TensorProperties(), torch.Size((4,)), [ChunkStorageMetadata(torch.Size((2,)), torch.Size((4,)))]
            )
        }
    ),
    "hole": lambda metadata: metadata.state_dict_metadata.update(
        {"x": TensorStorageMetadata(TensorProperties(), torch.Size((HUGE,)), [])}
    ),
    "dtype": lambda metadata: setattr(
        next(iter(metadata.state_dict_metadata.values())), "properties", TensorProperties(dtype="x")  # type: ignore[arg-type]
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_metadata_that_makes_no_sense_is_refused(checkpoint: Path, what: str) -> None:
    with pytest.raises(UntrustedCheckpointError, match="makes no sense"):
        load(rewrite(checkpoint, CHANGES[what]))


def test_a_tensor_that_repeats_one_number_for_ever_is_not_copied() -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    state = optimizer.state_dict()
    state["state"] = {0: {"momentum_buffer": torch.zeros(1).expand(2**40)}}
    with pytest.raises(UntrustedCheckpointError, match="larger than its data"):
        apply_state(module, optimizer, state, "it", whole=True)


# --- pickles and archives that swell ------------------------------------------------------------------------


PICKLES: dict[str, bytes] = {
    "tuples in tuples": b"\x80\x04}(" + b")" + b"\x85" * 300_000 + b"Nu.",
    "a tuple that doubles": b"\x80\x04})" + b"2\x86\x94" * 60 + b"N\x87.",
    "a number for a billionth value": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a string of an exabyte": b"\x80\x04\x8d" + struct.pack("<Q", HUGE) + b"x.",
    "bytes of an exabyte": b"\x80\x04\x8e" + struct.pack("<Q", HUGE) + b"x.",
    "bytes of four gigabytes": b"\x80\x03B\xff\xff\xff\xffx.",
    "a frame of an exabyte": b"\x80\x04\x95" + struct.pack("<Q", HUGE) + b"].",
    "a number of two gigabytes": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "a number in words": b"I" + b"9" * 100_000 + b"\n.",
    "an instance": b"(ios\nsystem\n.",
    "nothing": b"",
    "no end": b"\x80\x04]",
    "an empty stack": b"\x80\x04\x86.",
    "a mark that is none": b"\x80\x04t.",
    "something else": b"\x80\x04K\x07.",
}


@pytest.mark.parametrize("what", PICKLES)
def test_a_pickle_that_harms_is_refused_before_it_is_read(checkpoint: Path, what: str) -> None:
    data = PICKLES[what]
    (checkpoint / ".metadata").write_bytes(data)
    with pytest.raises(LoadError, match="metadata"):
        load(seal(checkpoint))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Metadata({})))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/version", "3\n")
    (checkpoint / "meta.pt").write_bytes(buffer.getvalue())
    with pytest.raises(LoadError, match="meta"):
        load(seal(checkpoint))


def test_the_guard_lets_through_what_people_save() -> None:
    numbers = random.Random(0).getstate()
    values = [
        {"a": [1, 2.5, "x" * 300, b"y" * 300, None, True, -(2**40)], "b": collections.OrderedDict(c=numbers)},
        torch.Size((2, 3)),
        [(name, (1, (2, 3))) for name in map(str, range(1000))],
        Metadata({"x": BytesStorageMetadata()}),
        {frozenset({1, 2}), frozenset()},
    ]
    for value in values:
        for protocol in (2, 3, 4, 5):
            data = pickle.dumps(value, protocol)
            assert PickleGuard(data + b"more").check() == len(data)


def test_an_archive_that_is_compressed_is_no_archive_of_torch(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickle.dumps({"x": "0" * 50_000_000}, 2))
    buffer.seek(0)
    with pytest.raises(UntrustedCheckpointError, match="compressed or larger"):
        load_archive(buffer, "it", trust=False)


def test_an_archive_whose_records_overlap_is_larger_than_its_file() -> None:
    data = archive(torch.zeros(1000))
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        record = next(item for item in file.infolist() if item.filename.endswith("data/0"))
    end = data.rindex(b"PK\x05\x06")
    *_, length, start = struct.unpack_from("<4s4H2LH", data, end)[:-1]
    entries = data[start : start + length]
    at = entries.index(b"PK\x01\x02", entries.index(b"archive/byteorder"))
    one = entries[at : entries.index(b"PK\x01\x02", at + 4)]
    assert record.filename.encode() in one
    count = 10 + 5000
    many = entries + one * 5000
    fields = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(many), start, 0)
    with pytest.raises(UntrustedCheckpointError, match="compressed or larger"):
        load_archive(io.BytesIO(data[:start] + many + fields), "it", trust=False)


@pytest.mark.parametrize("tail", [b"", b"PK\x05\x06", b"x" * 30])
def test_an_archive_with_something_after_its_end_is_refused(tail: bytes) -> None:
    data = archive({"x": 1}) + tail
    if tail:
        with pytest.raises(DamagedCheckpointError, match="it cannot be read"):
            load_archive(io.BytesIO(data), "it", trust=False)
    else:
        assert load_archive(io.BytesIO(data), "it", trust=False) == {"x": 1}


def test_files_of_old_torch_are_looked_through_too(tmp_path: Path) -> None:
    good, bad = io.BytesIO(), io.BytesIO()
    torch.save({"x": torch.ones(3)}, good, _use_new_zipfile_serialization=False)
    good.seek(0)
    assert torch.equal(load_archive(good, "it", trust=False)["x"], torch.ones(3))
    nested: tuple[Any, ...] = ()
    for _ in range(400):
        nested = (nested,)
    torch.save({"x": nested}, bad, _use_new_zipfile_serialization=False)
    bad.seek(0)
    with pytest.raises(UntrustedCheckpointError, match="nests tuples"):
        load_archive(bad, "it", trust=False)


# --- anything ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".metadata", MANIFEST, "meta.pt", "rank_0.pt"])
def test_whatever_the_bytes_are_only_our_errors_come_out(checkpoint: Path, name: str) -> None:
    """Seeded; with a checksum that says the bytes are right, and without a manifest."""
    dice = random.Random(name)
    good = (checkpoint / name).read_bytes()
    refused = 0
    for turn in range(120):
        data = bytearray(good)
        for _ in range(dice.choice((1, 1, 2, 8))):
            start = dice.randrange(len(data))
            kind = dice.randrange(5)
            if kind == 0:
                data[start] = dice.randrange(256)
            elif kind == 1:
                del data[start : start + dice.randrange(1, 64)]
            elif kind == 2:
                data[start:start] = dice.randbytes(dice.randrange(1, 16))
            elif kind == 3:
                data[start : start + 4] = dice.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0"))
            else:
                other = dice.randrange(len(data))
                data[start:start] = data[other : other + dice.randrange(1, 200)]
            data = data or bytearray(b"x")
        (checkpoint / name).write_bytes(data)
        if name != MANIFEST:
            seal(checkpoint)
        if turn % 3 == 2:
            (checkpoint / MANIFEST).unlink()
        try:
            load(checkpoint)
        except CheckpointError:
            refused += 1
        try:
            newest_checkpoint(checkpoint.parent, wait_s=0.0)
        except CheckpointError:
            pass
        if name == MANIFEST:
            continue
        seal(checkpoint)
    assert refused > 40
