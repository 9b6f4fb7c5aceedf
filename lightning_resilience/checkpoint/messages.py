"""What a rank and its writer process say to each other; both sides import this file and nothing else of the other.

A message is one JSON object on one line of a socket pair, so nothing that arrives is ever unpickled and the
writer never needs torch. Bytes do not travel here: they lie in the arena, a message only says where.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

T = TypeVar("T", bound="Message")


@dataclass(frozen=True)
class Message:
    """Base of all messages; ``kind`` tells them apart on the wire."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class FileImage:
    """One file of a checkpoint, as it lies in the arena.

    Attributes:
        name: Name inside the checkpoint directory; empty when the checkpoint is this one file.
        offset: Where its first byte lies in the arena.
        size: Length in bytes.
    """

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Attach(Message):
    """To the writer: use this arena from now on.

    Attributes:
        arena: Path of its file; empty for none.
        run_started: When the rank began to save, in seconds since the epoch.
    """

    kind: ClassVar[str] = "attach"
    arena: str
    run_started: float


@dataclass(frozen=True)
class Save(Message):
    """To the writer: make these images durable as part of the checkpoint at ``path``.

    Attributes:
        id: Number of the request, unique for this rank.
        path: Where the committed checkpoint will be.
        attempt: Name of this try, the same on all ranks and never used again.
        step: Optimizer steps done when the state was taken.
        rank: Rank that staged it; rank 0's writer also commits.
        world_size: How many ranks' records make the checkpoint complete.
        files: The images; a single one with an empty name is a checkpoint that is one file.
        deadline_s: Seconds after which the save counts as failed.
        staged: Whether the images still lie in the arena. False when an earlier writer had answered
            :class:`Written`: by now their place may hold another state, and only the commit is left to do.
        required: Somebody asked for just this one: it is never replaced by a newer one.
        abandoned: Why it has failed, when an earlier writer hung in it; what that has left is to be cleaned up.
        storage_options: For the file system of a path that is a URL. May hold credentials: never shown.
    """

    kind: ClassVar[str] = "save"
    id: int
    path: str
    attempt: str
    step: int
    rank: int
    world_size: int
    files: tuple[FileImage, ...]
    deadline_s: float
    staged: bool = True
    required: bool = False
    abandoned: str = ""
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Begin(Message):
    """To the writer: it is the turn of this save, and it will not be dropped any more.

    Until then the writer lets it wait; when the rank is gone it begins by itself what waits.
    """

    kind: ClassVar[str] = "begin"
    id: int


@dataclass(frozen=True)
class Drop(Message):
    """To the writer: forget a held removal, or a save that has not begun and all that should have come after it."""

    kind: ClassVar[str] = "drop"
    id: int


@dataclass(frozen=True)
class Remove(Message):
    """To the writer: delete the checkpoint at ``path`` once a newer one is committed.

    Attributes:
        id: Number of the request.
        path: What to delete.
        after: The save that must be committed before; 0 for none. If that one fails nothing is deleted.
        held: Wait for :class:`Release` besides, or until the rank is gone: it still names the checkpoint.
        storage_options: For the file system of a path that is a URL. May hold credentials: never shown.
    """

    kind: ClassVar[str] = "remove"
    id: int
    path: str
    after: int = 0
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    held: bool = False


@dataclass(frozen=True)
class Release(Message):
    """To the writer: the rank no longer names what this removal deletes."""

    kind: ClassVar[str] = "release"
    id: int


@dataclass(frozen=True)
class Retain(Message):
    """To the writer: delete what no policy keeps, once a newer checkpoint is committed; see ``removal.retain``.

    Attributes:
        id: Number of the request.
        path: The directory of the checkpoints.
        policies: As ``encode_policies`` has them.
        spared: Paths to keep in any case.
        resumed_from: To keep until this run has committed something that training can go on from; empty for none.
        after: The save that must be committed before. If that one fails nothing is deleted.
        storage_options: For the file system of a path that is a URL. May hold credentials: never shown.
    """

    kind: ClassVar[str] = "retain"
    id: int
    path: str
    policies: list[dict[str, Any]]
    spared: list[str]
    resumed_from: str
    after: int
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Link(Message):
    """To the writer: make ``link`` another name for the checkpoint at ``path`` once that is committed.

    Attributes:
        id: Number of the request.
        path: What the link shall name, in the same file system.
        link: The link; what has that name is replaced.
        after: The save that must be committed before; 0 for none. If that one fails the link stays as it is.
    """

    kind: ClassVar[str] = "link"
    id: int
    path: str
    link: str
    after: int = 0


@dataclass(frozen=True)
class Seal(Message):
    """To the writer: a snapshot in this file is complete, let its tensors have a digest when there is time.

    Attributes:
        path: Of the file.
    """

    kind: ClassVar[str] = "seal"
    path: str


@dataclass(frozen=True)
class Rescue(Message):
    """To the writer: when the rank is gone, make a checkpoint of its newest snapshot, together with the other writers.

    Replaces an earlier one. Not after :class:`Stop`: then training has ended well.

    Attributes:
        directory: Where the run's checkpoints are.
        shm_dir: Where its snapshots are.
        run: Which run they belong to.
        start: Which start of it this is; a later one puts an end to the rescue.
        base_ns: Commit time of the newest checkpoint that was there at this start; see ``choice.is_newer``.
        rank: Whose snapshots.
        world_size: How many ranks' snapshots make a checkpoint.
        deadline_s: How long writing may take, in seconds.
        storage_options: For the file system of a directory that is a URL. May hold credentials: never shown.
    """

    kind: ClassVar[str] = "rescue"
    directory: str
    shm_dir: str
    run: str
    start: int
    base_ns: int
    rank: int
    world_size: int
    deadline_s: float
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Stop(Message):
    """To the writer: leave when all is done."""

    kind: ClassVar[str] = "stop"


@dataclass(frozen=True)
class Written(Message):
    """From the writer: this rank's bytes are durable, their place in the arena is free again."""

    kind: ClassVar[str] = "written"
    id: int


@dataclass(frozen=True)
class Done(Message):
    """From the writer: the request is finished.

    Attributes:
        id: The request.
        error: Why it failed, in words for the user; empty when it succeeded.
        void: It was not done because the save it should have come after failed.
        retried: How many requests to the storage failed in passing and were sent again, for a save.
    """

    kind: ClassVar[str] = "done"
    id: int
    error: str = ""
    void: bool = False
    retried: int = 0


Request = Save | Remove | Link | Retain

_ALL = (Attach, Save, Begin, Drop, Remove, Release, Retain, Link, Rescue, Seal, Stop, Written, Done)
_KINDS: dict[str, type[Message]] = {cls.kind: cls for cls in _ALL}


def encode(message: Message) -> bytes:
    """One line, newline included."""
    return json.dumps({"kind": message.kind, **dataclasses.asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in ``line``; raises ``ValueError`` for anything else."""
    fields: dict[str, Any] = json.loads(line)
    kind = fields.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"unknown message kind {kind!r}")
    if "files" in fields:
        fields["files"] = tuple(FileImage(**image) for image in fields["files"])
    return _KINDS[kind](**fields)
