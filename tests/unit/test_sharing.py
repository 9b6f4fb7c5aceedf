"""Ranks of one machine share the reading: what several need is read once, verified, and handed on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import nn

from lightning_resilience.checkpoint.digest import BLOCK
from lightning_resilience.checkpoint.exchange import Exchange
from lightning_resilience.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from lightning_resilience.checkpoint.restore import Target, restore
from lightning_resilience.checkpoint.sharing import WINDOW, Share, divide
from lightning_resilience.checkpoint.storage import LocalStorage, Place, Storage, place_for
from lightning_resilience.checkpoint.transfer import Piece
from lightning_resilience.errors import DamagedCheckpointError
from tests.unit.test_restore import write_sharded

_T = TypeVar("_T")


class _Room:
    """Where the ranks of a test, which are threads, exchange what they say."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.said = [b""] * ranks


class _Rank:
    def __init__(self, room: _Room, rank: int) -> None:
        self.rank, self.world_size, self._room = rank, room.ranks, room

    def all_gather(self, data: bytes) -> list[bytes]:
        self._room.said[self.rank] = data
        self._room.barrier.wait()
        said = list(self._room.said)
        self._room.barrier.wait()
        return said


def on_ranks(ranks: int, act: Callable[[Exchange], _T]) -> list[_T | Exception]:
    """What each rank gets, or the error it raises."""
    room = _Room(ranks)

    def run(rank: int) -> _T | Exception:
        try:
            return act(_Rank(room, rank))
        except Exception as error:
            room.barrier.abort() if isinstance(error, threading.BrokenBarrierError) else None
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


class CountingStorage:
    """The local file system as a remote one, which counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, int]] = Counter()
        self._local = LocalStorage()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        self.asked[(Path(path).name, offset // BLOCK)] += len(buffer)
        return self._local.read_into(path, offset, buffer)


def a_piece(start: int, size: int = BLOCK) -> Piece:
    return Piece("file", start * BLOCK, start * BLOCK + size, "0" * 16)


def test_what_one_needs_it_reads_and_what_all_need_is_spread() -> None:
    common = [a_piece(number) for number in range(4)]
    first, second = divide([[*common, a_piece(10)], common])
    assert first.alone == (a_piece(10),)
    assert second.alone == ()
    assert sorted(piece.start for share in (first, second) for round in share.rounds for piece in round) == [
        number * BLOCK for number in range(4)
    ]
    assert len(second.rounds[0]) >= len(first.rounds[0])  # the first has more to do already


def test_there_are_as_many_rounds_as_the_window_asks_for() -> None:
    many = [a_piece(number) for number in range(4 * WINDOW + 2)]
    shares = divide([many, many])
    assert [len(share.rounds) for share in shares] == [3, 3]


def test_a_piece_larger_than_a_window_is_read_by_each() -> None:
    large = a_piece(0, size=BLOCK + 1)
    assert divide([[large], [large]]) == [Share((large,), ())] * 2


def test_nobody_needs_anything() -> None:
    assert divide([[], []]) == [Share((), ())] * 2


def wide(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1500, 1500), nn.Linear(1500, 1500))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """18 MB in one file, with a manifest."""
    path = write_sharded(tmp_path_factory.mktemp("sharing") / "a.ckpt", wide(0), room=20 << 20)
    local = LocalStorage()
    files = {}
    for file in path.iterdir():
        data = file.read_bytes()
        files[file.name] = FileRecord(len(data), local.write(str(file), memoryview(data)))
    (path / MANIFEST).write_bytes(Manifest(2, 1, "try", 1, files).encode())
    return path


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_byte_is_read_once_whoever_needs_it(saved: Path, ranks: int) -> None:
    storage = CountingStorage()
    place = Place(cast(Storage, storage), str(saved))
    modules = [wide(rank + 1) for rank in range(ranks)]
    found = on_ranks(ranks, lambda exchange: restore(place, Target(modules[exchange.rank]), exchange, fall_back=False))
    assert not [error for error in found if isinstance(error, Exception)]
    for module in modules:
        for ours, theirs in zip(module.parameters(), wide(0).parameters(), strict=True):
            assert torch.equal(ours, theirs)
    size = (saved / "__0_0.distcp").stat().st_size
    assert {key: count for key, count in storage.asked.items() if key[0] == "__0_0.distcp"} == {
        ("__0_0.distcp", number): min(BLOCK, size - number * BLOCK) for number in range(-(-size // BLOCK))
    }


def test_a_flipped_byte_is_an_error_of_all_and_leaves_no_numbers(saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "b.ckpt"
    place.mkdir()
    for file in saved.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".distcp":
            data[BLOCK + 5] ^= 1
        (place / file.name).write_bytes(data)
    modules = [wide(rank + 1) for rank in range(2)]
    found = on_ranks(
        2, lambda exchange: restore(place_for(place), Target(modules[exchange.rank]), exchange, fall_back=False)
    )
    for error in found:
        assert isinstance(error, DamagedCheckpointError)
        assert str(place / "__0_0.distcp") in str(error)
    for module in modules:
        assert all(bool(parameter.isnan().all()) for parameter in module.parameters())
