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
        arena: Path of its file.
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
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Remove(Message):
    """To the writer: delete the checkpoint at ``path`` once everything asked for before is committed."""

    kind: ClassVar[str] = "remove"
    id: int
    path: str
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
    """

    kind: ClassVar[str] = "done"
    id: int
    error: str = ""


_KINDS: dict[str, type[Message]] = {cls.kind: cls for cls in (Attach, Save, Remove, Stop, Written, Done)}


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
