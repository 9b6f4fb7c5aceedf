"""A damaged checkpoint is noticed, the file is named, and the one before it is used: never silence, never step 0.

Two ranks write real checkpoints once; every kind of damage is then done to copies of them. What `fit` makes of it
is seen in a second job.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from lightning_resilience import AsyncCheckpointIO, newest_checkpoint
from lightning_resilience.checkpoint.exchange import Alone, Exchange
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.checkpoint.verify import choose
from lightning_resilience.errors import DamagedCheckpointError, LoadError, NoValidCheckpointError
from tests.integration.fits import Fit, orders, result_of
from tests.integration.ranks import Stem

OLDER, NEWER = "step=2.ckpt", "step=4.ckpt"
FILES = (".metadata", "manifest.json", "meta.pt", "rank_0.pt", "rank_1.pt", "__0_0.distcp", "__1_0.distcp")
HOLE = 64 << 10
WIDE = 6001  # some hundred KB of data from each rank

Damage = Callable[[Path], None]


# --- damage ------------------------------------------------------------------------------------------------


def rewrite(path: Path, data: bytes | bytearray) -> None:
    """Other bytes and no other time: a disk that loses bits does not touch the file's time."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=times)


def flip(path: Path, place: float = 0.5) -> None:
    """Change one bit of the byte at this part of the file; a negative place counts bytes from the end."""
    data = bytearray(path.read_bytes())
    data[int(place) if place < 0 else int(place * len(data))] ^= 0x10
    rewrite(path, data)


def punch(path: Path) -> None:
    """What a lost block leaves: zeros of the right length."""
    data = bytearray(path.read_bytes())
    start = (len(data) - HOLE) // 2
    assert any(data[start : start + HOLE])
    data[start : start + HOLE] = bytes(HOLE)
    rewrite(path, data)


def cut(path: Path, keep: float = 0.5) -> None:
    data = path.read_bytes()
    rewrite(path, data[: int(keep * len(data))])


def shorten(path: Path) -> None:
    rewrite(path, path.read_bytes()[:-2])


def lengthen(path: Path) -> None:
    rewrite(path, path.read_bytes() + b"\0")


def remove(path: Path) -> None:
    times = path.parent.stat().st_atime_ns, path.parent.stat().st_mtime_ns
    path.unlink()
    os.utime(path.parent, ns=times)


DAMAGES: dict[str, tuple[str, Damage]] = {
    **{f"a flipped bit in {name}": (name, flip) for name in FILES},
    **{f"{name} is missing": (name, remove) for name in FILES},
    **{f"{name} is cut in half": (name, cut) for name in FILES},
    **{f"the first byte of {name} is another": (name, lambda path: flip(path, 0.0)) for name in FILES},
    **{f"the end of {name} is missing": (name, shorten) for name in FILES},
    "zeros in __0_0.distcp": ("__0_0.distcp", punch),
    "zeros in __1_0.distcp": ("__1_0.distcp", punch),
    "rank_1.pt is longer": ("rank_1.pt", lengthen),
}


# --- checkpoints -------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """Folders that each hold a checkpoint of step 2 and one of step 4."""

    sharded: Fit
    full: Fit
    ddp: Fit


@pytest.fixture(scope="module")
def saved(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    fits = Saved(
        sharded=Fit("sharded", str(folder / "sharded"), every=2, width=WIDE),
        full=Fit("full", str(folder / "full"), full=True, every=2, width=WIDE),
        ddp=Fit("ddp", str(folder / "ddp"), strategy="ddp", every=2, width=WIDE),
    )
    stem.run("tests.integration.fits:main", orders(*fits), ranks=2, folder=folder)
    assert [result_of(fit).error for fit in fits] == [""] * 3
    return fits


def copy_of(fit: Fit, folder: Path) -> Path:
    """The two checkpoints of a fit, where they can be damaged."""
    for name in (OLDER, NEWER):
        source, target = Path(fit.folder, name), folder / name
        folder.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy2(source, target)
    return folder


class Together:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, board: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.world_size, self._board, self._barrier = rank, len(board), board, barrier

    def all_gather(self, data: bytes) -> list[bytes]:
        self._board[self.rank] = data
        self._barrier.wait(timeout=30)
        answer = list(self._board)
        self._barrier.wait(timeout=30)
        return answer


def chosen(path: Path, ranks: int, *, fall_back: bool = True) -> list[Path | LoadError]:
    """What each of several ranks chooses to load."""
    board, barrier = [b""] * ranks, threading.Barrier(ranks)
    exchanges: list[Exchange] = [Together(rank, board, barrier) for rank in range(ranks)] if ranks > 1 else [Alone()]
    answers: dict[int, Path | LoadError] = {}

    def choose_one(exchange: Exchange) -> None:
        try:
            answers[exchange.rank] = Path(choose(place_for(path), exchange, fall_back=fall_back).path)
        except LoadError as error:
            answers[exchange.rank] = error

    threads = [threading.Thread(target=choose_one, args=(exchange,)) for exchange in exchanges]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[rank] for rank in range(ranks)]


# --- a directory of shards ---------------------------------------------------------------------------------


def test_the_list_of_files_is_complete(saved: Saved) -> None:
    """So that no file is left out of the damage below."""
    assert sorted(path.name for path in Path(saved.sharded.folder, NEWER).iterdir()) == sorted(FILES)
    assert Path(saved.sharded.folder, NEWER, "__1_0.distcp").stat().st_size > 4 * HOLE


@pytest.mark.parametrize("ranks", [1, 2])
def test_whole_checkpoints_are_used_as_they_are(saved: Saved, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    newer = Path(saved.sharded.folder, NEWER)
    assert chosen(newer, ranks) == [newer] * ranks
    assert caplog.text == ""


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_damage_is_named_and_the_previous_checkpoint_is_used(
    saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, ranks: int
) -> None:
    folder = copy_of(saved.sharded, tmp_path / "checkpoints")
    name, damage = DAMAGES[what]
    damage(folder / NEWER / name)
    assert chosen(folder / NEWER, ranks) == [folder / OLDER] * ranks
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "DAMAGED CHECKPOINT" in warning.getMessage()
    assert str(folder / NEWER / name) in warning.getMessage()
    assert str(folder / OLDER) in warning.getMessage()
    for error in chosen(folder / NEWER, ranks, fall_back=False):
        assert isinstance(error, DamagedCheckpointError)
        assert str(folder / NEWER / name) in str(error)


@pytest.mark.parametrize("ranks", [1, 2])
def test_when_all_are_damaged_it_is_an_error_that_names_each(saved: Saved, tmp_path: Path, ranks: int) -> None:
    folder = copy_of(saved.sharded, tmp_path / "checkpoints")
    flip(folder / NEWER / "__0_0.distcp")
    remove(folder / OLDER / "rank_1.pt")
    for error in chosen(folder / NEWER, ranks):
        assert isinstance(error, NoValidCheckpointError)
        assert str(folder / NEWER / "__0_0.distcp") in str(error)
        assert str(folder / OLDER / "rank_1.pt") in str(error)
        assert "does not start from step 0" in str(error)


def test_the_start_script_never_hears_that_there_is_no_checkpoint(
    saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`newest_checkpoint` looks at names, manifests and sizes only; None would mean a start from step 0."""
    folder = copy_of(saved.sharded, tmp_path / "checkpoints")
    assert newest_checkpoint(folder) == str(folder / NEWER)
    cut(folder / NEWER / "__1_0.distcp")
    assert newest_checkpoint(folder) == str(folder / OLDER)
    assert str(folder / NEWER / "__1_0.distcp") in caplog.text
    flip(folder / OLDER / "manifest.json")
    with pytest.raises(NoValidCheckpointError, match=r"manifest\.json"):
        newest_checkpoint(folder)


# --- one file ----------------------------------------------------------------------------------------------

FILE_DAMAGES: dict[str, Damage] = {
    "the first byte": lambda path: flip(path, 0.0),
    "the second byte": lambda path: flip(path, 1.5 / path.stat().st_size),
    "a bit near the start": lambda path: flip(path, 0.02),
    "a bit in the middle": flip,
    "a bit near the end": lambda path: flip(path, 0.98),
    "the end of the archive": lambda path: flip(path, -150),
    "a bit in the seal": lambda path: flip(path, -60),
    "the last byte": lambda path: flip(path, -1),
    "zeros": punch,
    "half of it is missing": cut,
    "the last bytes are missing": shorten,
    "all but its name is missing": lambda path: cut(path, 0.0),
    "a byte too many": lengthen,
}


@pytest.mark.parametrize("what", FILE_DAMAGES)
@pytest.mark.parametrize("kind", ["full", "ddp"])
def test_a_damaged_file_is_named_and_the_previous_one_is_used(
    saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, what: str
) -> None:
    folder = copy_of(saved.full if kind == "full" else saved.ddp, tmp_path / "checkpoints")
    whole = AsyncCheckpointIO().load_checkpoint(folder / NEWER, weights_only=True)
    assert whole["global_step"] == 4
    assert caplog.text == ""
    FILE_DAMAGES[what](folder / NEWER)
    found = AsyncCheckpointIO().load_checkpoint(folder / NEWER, weights_only=True)
    assert found["global_step"] == 2
    assert "DAMAGED CHECKPOINT" in caplog.text
    assert str(folder / NEWER) in caplog.text
    with pytest.raises(DamagedCheckpointError, match=NEWER):
        AsyncCheckpointIO(on_damage="raise").load_checkpoint(folder / NEWER, weights_only=True)
    FILE_DAMAGES[what](folder / OLDER)
    with pytest.raises(NoValidCheckpointError, match=rf"{NEWER}.*{OLDER}"):
        AsyncCheckpointIO().load_checkpoint(folder / NEWER, weights_only=True)


# --- what fit makes of it ----------------------------------------------------------------------------------


def test_two_ranks_go_on_from_the_previous_checkpoint_or_say_why_not(stem: Stem, saved: Saved, tmp_path: Path) -> None:
    def damaged(name: str, *, both: bool = False, full: bool = False, on_damage: str = "previous") -> Fit:
        folder = copy_of(saved.full if full else saved.sharded, tmp_path / name)
        for checkpoint in (NEWER, OLDER) if both else (NEWER,):
            flip(folder / checkpoint if full else folder / checkpoint / "__1_0.distcp")
        resume = str(folder / NEWER)
        return Fit(name, str(folder), full=full, steps=6, resume=resume, on_damage=on_damage, width=WIDE)

    previous, previous_file = damaged("previous"), damaged("previous_file", full=True)
    refuse = damaged("refuse", on_damage="raise")
    none, none_file = damaged("none", both=True), damaged("none_file", both=True, full=True)
    output = stem.run(
        "tests.integration.fits:main",
        orders(previous, previous_file, refuse, none, none_file),
        ranks=2,
        folder=tmp_path,
    )
    for fit, before in ((previous, saved.sharded), (previous_file, saved.full)):
        result, first = result_of(fit), result_of(before)
        assert result.error == ""
        assert result.loaded == f"{fit.folder}/{OLDER}"
        assert sorted(result.losses) == [3, 4, 5, 6]
        assert (result.losses[3], result.losses[4]) == (first.losses[3], first.losses[4])
    shard, older = f"{previous.folder}/{NEWER}/__1_0.distcp", f"{previous.folder}/{OLDER}"
    assert (
        f"WARNING rank 0: DAMAGED CHECKPOINT: {shard} does not hold what was written: its checksum differs."
        f" Using {older} instead; the steps after it will be done again."
    ) in output
    for fit, error in ((refuse, "Damaged"), (none, "NoValid"), (none_file, "NoValid")):
        result = result_of(fit)
        assert result.error.startswith(f"{error}CheckpointError: ")
        assert NEWER in result.error
        assert result.losses == {}
