"""Where checkpoints lie: local and shared file systems, and whatever fsspec knows."""

from __future__ import annotations

import json
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
    "in_process_only",
    "is_url",
    "place_for",
    "storage_for",
]

_LOCAL = ("file://", "local://")
_LONGEST_NAME = 255  # bytes, on every file system of Linux
_NO_PLACE = {  # what fsspec only reads, or what stands before another file system
    *("http", "https", "data", "git", "github", "gist", "dvc", "reference", "root", "dask", "jupyter", "jlab"),
    *("zip", "tar", "libarchive"),
    *("dir", "cached", "blockcache", "filecache", "simplecache", "generic", "async_wrapper", "asyncwrapper"),
}
_WORKS = (
    "Checkpoints go to local paths, s3://, gs://, abfs:// and other object stores, sftp:// and other file servers that"
    " fsspec writes to, and memory://."
)


def storage_for(path: str, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """The storage that ``path`` is on.

    Args:
        path: A local path or a URL.
        storage_options: For the file system of a URL, which gets them untouched; local paths need none.

    Raises:
        ConfigurationError: Nothing here knows that kind of URL, nothing can be written to it, or it holds a password.
    """
    if not is_url(path) or path.startswith(_LOCAL):
        return _LOCAL_STORAGE
    kind, _, rest = path.partition("://")
    host = rest.partition("/")[0]
    if ":" in host.rpartition("@")[0]:
        raise ConfigurationError(
            f"the {kind}:// URL holds a password, and URLs are shown in logs: pass it in storage_options instead"
        )
    if "::" in kind:
        raise ConfigurationError(
            f"checkpoints cannot go through the chain {kind}: use the last URL of it alone. What stands before it would"
            f" hide what other processes write. {_WORKS}"
        )
    if kind in _NO_PLACE:
        raise ConfigurationError(f"checkpoints cannot lie on {kind}://, as in {path!r}. {_WORKS}")
    return _remote(kind, host, path, storage_options or {})


def _remote(kind: str, host: str, path: str, storage_options: Mapping[str, Any]) -> Storage:
    """One for each kind, host and set of options, so that connections are kept."""
    from lightning_resilience.checkpoint.storage.remote import RemoteStorage  # fsspec, only where there is a URL

    try:
        key = json.dumps([kind, host, storage_options], sort_keys=True)
    except TypeError:  # options that cannot be compared
        return RemoteStorage(path, storage_options)
    if key not in _remotes:
        _remotes[key] = RemoteStorage(path, storage_options)
    return _remotes[key]


_LOCAL_STORAGE = LocalStorage()
_remotes: dict[str, Storage] = {}


def in_process_only(path: str) -> bool:
    """Whether only the process that writes there can read it again."""
    return path.startswith("memory://")


def place_for(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Place:
    """A path as the user gave it, on its storage: local ones are made absolute, URLs stay as they are.

    Raises:
        ConfigurationError: It cannot be the path of anything, or is a URL of a kind that nothing here knows.
    """
    text = _checked(path)
    storage = storage_for(text, storage_options)
    if isinstance(storage, LocalStorage):
        text = os.path.abspath(os.path.expanduser(_without_protocol(text)))
        _check_length(text)
    return Place(storage, text)


def _checked(path: object) -> str:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise ConfigurationError(f"{path!r} ({type(path).__name__}) is no path: pass a string or a pathlib.Path")
    if not text.strip():
        raise ConfigurationError("an empty path names nothing; the current directory is '.'")
    if "\0" in text:
        raise ConfigurationError(f"{text!r} has a zero byte, which no path can have")
    return text


def _check_length(path: str) -> None:
    name = max(map(os.fsencode, path.split("/")), key=len)
    if len(name) > _LONGEST_NAME:
        raise ConfigurationError(
            f"a name in the path, {os.fsdecode(name[:40])!r}..., has {len(name)} bytes; {_LONGEST_NAME} are possible"
        )


def _without_protocol(path: str) -> str:
    for protocol in _LOCAL:
        path = path.removeprefix(protocol)
    return path
