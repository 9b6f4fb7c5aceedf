"""Commits where directories cannot be renamed, as histories: in memory, which behaves as an object store does."""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Iterator

import pytest
import xxhash

from lightning_resilience import newest_checkpoint
from lightning_resilience.checkpoint import commit
from lightning_resilience.checkpoint.attempts import Attempt, Record, attempt_of, live_attempts, sweep
from lightning_resilience.checkpoint.candidates import find, with_predecessors
from lightning_resilience.checkpoint.commit import Commit, CommitClock, is_committed, write_file
from lightning_resilience.checkpoint.exchange import Alone
from lightning_resilience.checkpoint.manifest import FileRecord, read_manifest, seal_tail
from lightning_resilience.checkpoint.messages import FileImage, Save
from lightning_resilience.checkpoint.storage import Place, place_for
from lightning_resilience.checkpoint.storage.protocol import no_progress
from lightning_resilience.checkpoint.storage.remote import RemoteStorage
from lightning_resilience.checkpoint.verify import choose
from lightning_resilience.errors import LoadError, SaveError

SOON = time.time() + 1e6
FILES = {0: ("__0_0.distcp", ".metadata", "meta.pt"), 1: ("__1_0.distcp",)}


@pytest.fixture
def root() -> Iterator[Place]:
    place = place_for(f"memory://{uuid.uuid4().hex}/run")
    yield place
    place.delete()


def a_save(root: Place, attempt: str = "a1", name: str = "step=30.ckpt", rank: int = 0) -> Save:
    images = tuple(FileImage(name, 0, 4) for name in FILES[rank])
    return Save(1, str(root / name), attempt, 30, rank, 2, images, deadline_s=100.0)


def deliver(request: Save, error: str = "") -> None:
    attempt = attempt_of(request)
    attempt.open(request.rank)
    files = {}
    for image in request.files:
        data = f"{image.name} of {attempt.name}".encode()
        (attempt.files / image.name).write(data)
        files[image.name] = FileRecord(len(data), xxhash.xxh3_64_hexdigest(data))
    attempt.deliver(Record(request.rank, {} if error else files, error))


def commit_all(root: Place, attempt: str = "a1", name: str = "step=30.ckpt") -> None:
    for rank in (0, 1):
        deliver(a_save(root, attempt, name, rank))
    assert Commit(a_save(root, attempt, name), CommitClock(), now=0.0).advance(1.0, orphaned=False)


def names(place: Place) -> list[str]:
    return sorted(entry.name for entry in place.entries())


def test_only_the_manifest_makes_a_checkpoint(root: Place) -> None:
    deliver(a_save(root))
    deliver(a_save(root, rank=1))
    assert names(root / "step=30.ckpt") == ["attempt-a1"]
    assert find(root) == []
    assert newest_checkpoint(str(root), wait_s=0.0) is None
    with pytest.raises(LoadError, match="neither a checkpoint"):
        with_predecessors(root / "step=30.ckpt")
    assert Commit(a_save(root), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    assert names(root) == ["step=30.ckpt"]
    assert names(root / "step=30.ckpt") == [".metadata", "attempt-a1", "manifest.json", "meta.pt"]
    assert newest_checkpoint(str(root), wait_s=0.0) == str(root / "step=30.ckpt")
    assert choose(root, Alone(), fall_back=True) == root / "step=30.ckpt"
    assert is_committed(a_save(root))


def test_saved_anew_under_the_same_name(root: Place) -> None:
    """The first is whole until the manifest changes, and its files go only then."""
    commit_all(root, "a1")
    target = root / "step=30.ckpt"
    deliver(a_save(root, "a2"))
    deliver(a_save(root, "a2", rank=1))
    assert choose(target, Alone(), fall_back=False) == target
    manifest = read_manifest(target)
    assert manifest is not None
    assert manifest.attempt == "a1"
    assert Commit(a_save(root, "a2"), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    assert choose(target, Alone(), fall_back=False) == target
    assert names(target) == [".metadata", "attempt-a2", "manifest.json", "meta.pt"]
    assert (target / "meta.pt").read() == b"meta.pt of a2"


@pytest.mark.parametrize("instant", ["before the manifest", "after the manifest", "while it tidies"])
def test_a_kill_while_it_commits_anew(root: Place, instant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_all(root, "a1")
    target = root / "step=30.ckpt"
    for rank in (0, 1):
        deliver(a_save(root, "a2", rank=rank))

    class Killed(BaseException):
        pass

    put, delete = RemoteStorage.put, RemoteStorage.delete

    def killed_put(self: RemoteStorage, path: str, data: bytes) -> None:
        if path.endswith("manifest.json") and instant == "before the manifest":
            raise Killed
        put(self, path, data)
        if path.endswith("manifest.json") and instant == "after the manifest":
            raise Killed

    def killed_delete(self: RemoteStorage, path: str) -> None:
        if path.endswith("attempt-a1") and instant == "while it tidies":
            raise Killed
        delete(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStorage, "put", killed_put)
        patch.setattr(RemoteStorage, "delete", killed_delete)
        with pytest.raises(Killed):
            Commit(a_save(root, "a2"), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    assert choose(target, Alone(), fall_back=False) == target  # whole at any instant
    again = Commit(a_save(root, "a2"), CommitClock(), now=0.0)  # what another writer makes of the same request
    assert again.advance(1.0, orphaned=False)
    assert choose(target, Alone(), fall_back=False) == target
    assert is_committed(a_save(root, "a2"))
    assert names(root) == ["step=30.ckpt"]
    sweep(root, now=SOON, before=SOON)
    assert names(target) == [".metadata", "attempt-a2", "manifest.json", "meta.pt"]
    assert (target / "meta.pt").read() == b"meta.pt of a2"


def test_a_failure_leaves_what_was_there(root: Place) -> None:
    commit_all(root, "a1")
    deliver(a_save(root, "a2"))
    deliver(a_save(root, "a2", rank=1), error="503 forever")
    with pytest.raises(SaveError, match="rank 1: 503 forever"):
        Commit(a_save(root, "a2"), CommitClock(), now=0.0).advance(1.0, orphaned=False)
    assert names(root) == ["step=30.ckpt"]
    assert names(root / "step=30.ckpt") == [".metadata", "attempt-a1", "manifest.json", "meta.pt"]
    assert choose(root, Alone(), fall_back=True) == root / "step=30.ckpt"


def test_deletion_begins_with_the_manifest(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_all(root)
    deleted: list[str] = []
    original = RemoteStorage._delete_file

    def seen(self: RemoteStorage, path: str) -> None:
        deleted.append(path.rpartition("/")[2])
        original(self, path)
        assert find(root) == []

    monkeypatch.setattr(RemoteStorage, "_delete_file", seen)
    (root / "step=30.ckpt").delete()
    assert deleted == ["manifest.json", ".metadata", "meta.pt"]
    assert names(root) == []


def owned_elsewhere(attempt: Attempt) -> None:
    owner = {"host": "another-node", "pid": 1, "target": attempt.target.name, "attempt": attempt.name}
    (attempt.scaffolding / "rank_0.owner").put(json.dumps(owner).encode())


def test_the_sweep_finds_what_a_dead_writer_left_inside_a_target(root: Place) -> None:
    for name in ("new.ckpt", "old.ckpt"):
        deliver(a_save(root, "a9", name))
    commit_all(root, "b1", "old.ckpt")
    sweep(root, now=time.time(), before=SOON)  # a moment ago: somebody may only just have opened it
    assert names(root / "new.ckpt") == ["attempt-a9"]
    sweep(root, now=SOON, before=0.0)  # of this run
    assert names(root / "new.ckpt") == ["attempt-a9"]
    sweep(root, now=SOON, before=SOON)
    assert names(root) == ["old.ckpt"]
    assert names(root / "old.ckpt") == [".metadata", "attempt-b1", "manifest.json", "meta.pt"]


def test_another_host_is_believed_for_a_minute_and_swept_after_an_hour(root: Place) -> None:
    deliver(a_save(root))
    attempt = attempt_of(a_save(root))
    owned_elsewhere(attempt)
    now = time.time()
    assert live_attempts(root, now + 30) == [attempt.scaffolding]
    assert live_attempts(root, now + 90) == []
    sweep(root, now=now + 1800, before=SOON)
    assert names(root / "step=30.ckpt") == ["attempt-a1"]
    sweep(root, now=now + 7200, before=SOON)
    assert names(root) == []


def test_an_owner_cannot_point_elsewhere(root: Place) -> None:
    (root / "precious" / "attempt-a1" / "data").put(b"1")
    scaffolding = root / "runs" / ".x.a1.incomplete"
    owner = {"host": socket.gethostname(), "pid": 2**22 + 1, "target": "../precious", "attempt": "a1"}
    (scaffolding / "rank_0.owner").put(json.dumps(owner).encode())
    sweep(root / "runs", now=SOON, before=SOON)
    assert names(root / "runs") == []
    assert (root / "precious" / "attempt-a1" / "data").exists()


def test_one_file(root: Place) -> None:
    """It replaces what was there when it is complete."""
    (root / "last.ckpt").put(b"before")
    content = b"PK" + bytes(998)
    attempt = Attempt(root / "last.ckpt", "a2")
    seen = []

    def progress() -> None:
        seen.append((names(root), len(live_attempts(root, time.time()))))

    def seal(digest: str) -> bytes:
        return seal_tail(1000, 7, 2**62, digest)

    write_file(attempt, memoryview(content), seal, progress)
    assert seen[0] == ([".last.ckpt.a2.incomplete", "last.ckpt"], 1)
    assert names(root) == ["last.ckpt"]
    assert (root / "last.ckpt").is_file()
    assert choose(root, Alone(), fall_back=False) == root / "last.ckpt"


def test_a_file_and_a_directory_do_not_replace_each_other(root: Place) -> None:
    commit_all(root, "a1", "sharded.ckpt")
    with pytest.raises(OSError, match="a sharded checkpoint of this name is there, and a single file cannot"):
        write_file(Attempt(root / "sharded.ckpt", "a2"), memoryview(b"data"), lambda digest: b"", no_progress)
    (root / "full.ckpt").put(b"data")
    with pytest.raises(OSError, match="a single file of this name is there, and a sharded checkpoint cannot"):
        Attempt(root / "full.ckpt", "a2").open(rank=1)
    assert names(root) == ["full.ckpt", "sharded.ckpt"]
    assert choose(root / "sharded.ckpt", Alone(), fall_back=False) == root / "sharded.ckpt"


def test_one_file_that_fails_leaves_nothing(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise OSError(5, "no")

    monkeypatch.setattr(RemoteStorage, "write", fail)
    with pytest.raises(OSError, match="no"):
        write_file(Attempt(root / "a.ckpt", "a1"), memoryview(b"data"), lambda digest: b"", no_progress)
    assert names(root) == []


def test_a_coordinator_looks_less_often_than_on_a_disk(root: Place) -> None:
    deliver(a_save(root))
    pending = Commit(a_save(root), CommitClock(), now=0.0)
    looks: list[float] = []
    original = Attempt.new_records

    with pytest.MonkeyPatch.context() as patch:

        def counted(self: Attempt, known: dict[int, Record]) -> list[Record]:
            looks.append(now)
            return original(self, known)

        patch.setattr(Attempt, "new_records", counted)
        for millisecond in range(0, 30_000, 20):
            now = millisecond / 1000
            assert not pending.advance(now, orphaned=False)
    assert len(looks) < 25
    assert commit._LOOKS_S[False][1] <= 2.0
