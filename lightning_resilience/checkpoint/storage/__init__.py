"""Where checkpoints lie: local and shared file systems, and whatever fsspec knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning_resilience.checkpoint.storage.local import REMOVED, REPLACED, LocalStorage
from lightning_resilience.checkpoint.storage.protocol import Entry, Place, Storage, hidden, is_url
from lightning_resilience.errors import ConfigurationError

__all__ = [
    "REMOVED",
    "REPLACED",
    "Entry",
    "LocalStorage",
    "Place",
    "Storage",
    "hidden",
    "is_url",
    "place_for",
    "storage_for",
]

_LOCAL = ("file://", "local://")


def storage_for(path: str, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """The storage that ``path`` is on.

    Args:
        path: A local path or a URL.
        storage_options: For the file system of a URL, which gets them untouched; local paths need none.

    Raises:
        ConfigurationError: Nothing here knows that kind of URL.
    """
    if is_url(path) and not path.startswith(_LOCAL):
        raise ConfigurationError(f"{path!r} is a URL, and checkpoints go to local and shared file systems so far")
    return LocalStorage()


def place_for(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Place:
    """A path as the user gave it, on its storage: local ones are made absolute, URLs stay as they are."""
    text = os.fspath(path)
    storage = storage_for(text, storage_options)
    if isinstance(storage, LocalStorage):
        text = os.path.abspath(os.path.expanduser(_without_protocol(text)))
    return Place(storage, text)


def _without_protocol(path: str) -> str:
    for protocol in _LOCAL:
        path = path.removeprefix(protocol)
    return path
