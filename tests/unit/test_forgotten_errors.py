"""An error that is over keeps nothing alive: neither views of the arena nor what was being loaded.

Nothing here may need the garbage collector: it runs when it likes, and what an error holds is gigabytes.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience.checkpoint.digest import new_digest
from lightning_resilience.checkpoint.exchange import Alone, together
from lightning_resilience.checkpoint.storage import s3
from lightning_resilience.checkpoint.storage.protocol import no_progress, no_tail
from lightning_resilience.checkpoint.storage.retries import Patience, Retries
from lightning_resilience.checkpoint.transfer import run_all
from lightning_resilience.checkpoint.warm_memory import WarmMemory, create_file
from lightning_resilience.checkpoint.writer_link import Arena
from lightning_resilience.errors import ArenaError, LoadError


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def as_fsspec_does(errors: list[Exception]) -> None:
    """``fsspec.asyn.sync`` raises an error that its own list, and so the error's traceback, still holds."""
    result: list[Any] = [errors.pop(0) if errors else None]
    if isinstance(result[0], BaseException):
        try:
            raise OSError("of the library below")
        except OSError as cause:
            raise result[0] from cause


def write(data: memoryview, errors: list[Exception], tries: int) -> None:
    piece = data[:10]
    Retries(Patience(tries, first_pause_s=0.0), {}).run("write", "x", lambda: as_fsspec_does(errors), no_progress)
    assert piece


@pytest.mark.parametrize(
    ("tries", "errors"),
    [
        (3, [ConnectionResetError("one"), TimeoutError("two")]),
        (2, [ConnectionResetError("one"), TimeoutError("two")]),
        (2, [PermissionError("no")]),
    ],
    ids=["succeeds", "gives up", "never"],
)
def test_what_was_tried_again_holds_no_memory(tries: int, errors: list[Exception]) -> None:
    memory = mmap.mmap(-1, 4096)
    with contextlib.suppress(OSError):
        write(memoryview(memory), errors, tries)
    memory.close()  # BufferError: cannot close exported pointers exist


def test_an_upload_that_fails_holds_no_memory() -> None:
    memory = mmap.mmap(-1, 40 << 10)

    def attempting(what: str, act: Callable[[Any], Any], before_again: Callable[[], None], /) -> Any:
        if what == "write part 2 of":
            raise OSError("the connection ended")
        return {"UploadId": "1", "ETag": "2"}

    def upload() -> None:
        body = memoryview(memory)
        s3.upload(("bucket", "key"), body, new_digest(0), no_tail, attempting, no_progress, part_bytes=4096)

    with pytest.raises(OSError, match="the connection ended") as caught:
        upload()
    del caught
    memory.close()


def test_an_arena_is_given_back_though_an_error_holds_a_view_of_it(tmp_path: Path) -> None:
    """Whatever else a library may keep: the writer goes on, and what is not held any more is freed at once."""
    (tmp_path / "arena").write_bytes(bytes(4096))

    def look(data: memoryview) -> None:
        piece = data[:10]
        ring: list[Any] = [piece]
        ring.append(ring)

    arena = Arena(str(tmp_path / "arena"))
    look(arena.memory)
    arena.close()
    assert arena._map.closed
    arena = Arena(str(tmp_path / "arena"))
    held = arena.memory[:10]
    arena.close()
    assert bytes(held) == bytes(10)


class Tensor:
    """Something big."""


def test_a_load_that_fails_holds_nothing() -> None:
    tensors = []

    def load(through: Callable[[Callable[[], None]], None]) -> None:
        tensor = Tensor()
        tensors.append(weakref.ref(tensor))

        def job() -> None:
            assert tensor
            raise LoadError("damaged")

        with pytest.raises(LoadError):
            through(job)

    load(lambda job: run_all([job, job], threads=2))
    load(lambda job: together(Alone(), job, LoadError))
    deadline = time.monotonic() + 5.0  # a thread of the pool may be on its way out
    while any(tensor() for tensor in tensors) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert [tensor() for tensor in tensors] == [None, None]


def test_memory_that_could_not_be_had_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    memory = WarmMemory(create_file(str(tmp_path / "arena")), 4096, str(tmp_path))
    with pytest.raises(ArenaError, match="No space left"):
        memory.ready()
    memory.close()
    mapping = weakref.ref(memory.bytes)
    del memory
    assert mapping() is None
