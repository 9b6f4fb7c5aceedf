"""Storages that fsspec knows: object stores, where an object appears whole, and file servers, where names change.

Mostly used by the writer process; training processes and the command line list, read and delete. fsspec is imported
when the first URL is used.
"""

from __future__ import annotations

import contextlib
import errno
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any, TypeVar

from lightning_resilience.checkpoint.digest import new_digest
from lightning_resilience.checkpoint.storage import s3
from lightning_resilience.checkpoint.storage.protocol import Entry, hidden, join, no_progress, no_tail
from lightning_resilience.checkpoint.storage.retries import Patience, Retries
from lightning_resilience.errors import ConfigurationError

T = TypeVar("T")

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "cos", "memory"}
_DRAFT = ".incomplete"
_DELETED_FIRST = ("manifest.json", ".metadata", "meta.pt")  # without them nothing is taken for a checkpoint
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")
_PATTERN = re.compile(r"[*?\[]")
_PART = 16 << 20
_RANGE = 8 << 20
_STREAMS = 4
_SFTP_PIECE = 32 << 10


class RemoteStorage:
    """See :class:`~lightning_resilience.checkpoint.storage.protocol.Storage`. Lives as long as the process.

    Args:
        url: Any URL on it; names the kind, and for file servers the host.
        storage_options: For fsspec's file system, untouched.
        patience: How often to try again.
        part_bytes: Size of the parts in which large objects are uploaded.
        sleep: Waits that many seconds.

    Raises:
        ConfigurationError: fsspec does not know such URLs, or a package for them is missing.
    """

    renames = False

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any],
        patience: Patience | None = None,
        part_bytes: int = _PART,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.protocol = url.partition("://")[0]
        self._url = url
        self._options = dict(storage_options)
        self._kind = _file_system_class(self.protocol, url)
        self._shows_whole = self.protocol in _OBJECT_STORES
        self._part_bytes = part_bytes
        self._retries = Retries(patience or Patience(), self._options, sleep)
        self._fs: Any = None
        # paramiko and its like mix up the answers to two threads; only what is asynchronous inside takes several
        self._turn = contextlib.nullcontext() if self._kind.async_impl else threading.RLock()
        self._making = threading.Lock()

    def __repr__(self) -> str:
        return f"RemoteStorage({self.protocol}://)"

    @property
    def retried(self) -> int:
        """Those of s3fs and botocore too, but not what an HTTP client sends once more as its connection had ended."""
        return self._retries.count

    # --- looking and reading -----------------------------------------------------------------------------------

    def entries(self, directory: str) -> list[Entry]:
        """Listed anew each time: other processes write here."""
        key = self._key(directory)

        def look(fs: Any) -> list[dict[str, Any]]:
            fs.invalidate_cache(key)
            found: list[dict[str, Any]] = fs.ls(key, detail=True)
            return found

        try:
            infos = self._do("list", directory, look)
        except (FileNotFoundError, NotADirectoryError):
            return []
        here = key.strip("/")
        return [_entry(info) for info in infos if info["name"].strip("/") != here]

    def stat(self, path: str) -> Entry | None:
        """Of an object, or of the beginning that several names share."""
        key = self._key(path)

        def look(fs: Any) -> dict[str, Any]:
            fs.invalidate_cache(key)
            found: dict[str, Any] = fs.info(key)
            return found

        try:
            return _entry(self._do("look at", path, look))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def resolved(self, path: str) -> str:
        """There are no links."""
        return path.rstrip("/")

    def read(self, path: str) -> bytes:
        """In one request, where that is possible."""
        if self._kind.async_impl or self._shows_whole:
            data: bytes = self._do("read", path, lambda fs: fs.cat_file(self._key(path)))
            return data
        buffer = bytearray(self._do("look at", path, lambda fs: fs.info(self._key(path))["size"]))
        return bytes(buffer[: self.read_into(path, 0, memoryview(buffer))])

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Large pieces in several requests at a time, where the file system can."""
        if not self._kind.async_impl:
            return self._do("read", path, lambda fs: _read_through(fs, self._key(path), offset, buffer))
        ranges = [(path, offset + start, buffer[start : start + _RANGE]) for start in range(0, len(buffer), _RANGE)]
        if len(ranges) <= 1:
            return sum(self._read_range(*item) for item in ranges)
        with ThreadPoolExecutor(_STREAMS, thread_name_prefix="lightning-resilience-read") as pool:
            return sum(pool.map(lambda item: self._read_range(*item), ranges))

    def _read_range(self, path: str, offset: int, buffer: memoryview) -> int:
        key = self._key(path)

        def read(fs: Any) -> int:
            try:
                data = fs.cat_file(key, start=offset, end=offset + len(buffer))
            except OSError as error:
                fs.invalidate_cache(key)
                if error.errno == errno.EINVAL and fs.info(key)["size"] <= offset:  # S3's answer behind the end
                    return 0
                raise
            buffer[: len(data)] = data
            return len(data)

        return self._do("read", path, read)

    # --- writing -----------------------------------------------------------------------------------------------

    def make_directory(self, path: str) -> None:
        """Only file servers have directories."""
        if not self._shows_whole:
            self._do("make", path, lambda fs: fs.makedirs(self._key(path), exist_ok=True))

    def write(
        self,
        path: str,
        data: memoryview,
        tail: Callable[[str], bytes] = no_tail,
        held_back: int = 0,
        progress: Callable[[], None] = no_progress,
    ) -> str:
        """Appears whole, and is looked at afterwards: a size that differs is an error."""
        body = data[: len(data) - held_back]
        written = Written(body, tail, held_back)
        progress()
        if s3.knows_parts(self._kind) and len(body) > 2 * self._part_bytes:
            self._write_parts(path, written, progress)
        elif self._shows_whole and len(body) <= 2 * self._part_bytes:
            whole = b"".join(written.pieces(len(body) or 1))
            self._do("write", path, lambda fs: fs.pipe_file(self._key(path), whole), progress)
        elif self._shows_whole:
            self._do("write", path, lambda fs: self._stream(fs, self._key(path), written, progress), progress)
        else:
            self._write_draft(path, written, progress)
        there = self.stat(path)
        if there is None or there.size != written.size:
            found = "nothing" if there is None else f"{there.size} bytes"
            raise OSError(errno.EIO, f"wrote {written.size} bytes and found {found}", path)
        return written.digest

    def put(self, path: str, data: bytes) -> None:
        """In one request, or under another name first."""
        if self._shows_whole:
            self._do("write", path, lambda fs: fs.pipe_file(self._key(path), data))
        else:
            self._write_draft(path, Written(memoryview(data), no_tail, 0), no_progress)

    def is_being_written(self, path: str) -> bool:
        """Cannot be told."""
        return False

    def publish(self, source: str, target: str) -> None:
        """Not here."""
        raise OSError(errno.ENOTSUP, "directories are not renamed here", target)

    def delete(self, path: str) -> None:
        """First what makes it valid, then the rest."""
        there = self.stat(path)
        if there is None:
            return
        if not there.is_directory:
            self._delete_file(path)
            return
        names = {entry.name for entry in self.entries(path)}
        for name in _DELETED_FIRST:
            if name in names:
                self._delete_file(join(path, name))
        with contextlib.suppress(FileNotFoundError):
            self._do("delete", path, lambda fs: _remove_tree(fs, self._key(path)))

    def forget_uploads(self, path: str, before: float) -> None:
        """On S3; elsewhere unfinished uploads end by themselves."""
        if s3.knows_parts(self._kind):
            bucket, _, prefix = self._key(path).partition("/")
            s3.forget(bucket, prefix, before, self._attempting(path))

    def _write_parts(self, path: str, written: Written, progress: Callable[[], None]) -> None:
        bucket, _, key = self._key(path).partition("/")
        attempting = self._attempting(path)
        s3.forget(bucket, key, float("inf"), attempting)  # an object has one writer: these are of its predecessors
        written.begin()
        s3.upload((bucket, key), written.body, written.hashed, written.end, attempting, progress, self._part_bytes)

    def _write_draft(self, path: str, written: Written, progress: Callable[[], None]) -> None:
        """For file servers: the whole file has another name until it is complete."""
        key = self._key(path)
        parent, _, name = key.rpartition("/")
        draft = f"{parent}/{hidden(name, uuid.uuid4().hex[:8] + _DRAFT)}"

        def write(fs: Any) -> None:
            try:
                self._stream(fs, draft, written, progress)
                if fs.info(draft)["size"] != written.size:
                    raise OSError(errno.EIO, "the connection ended before the file was complete")
                fs.mv(draft, key)
            except BaseException:
                with contextlib.suppress(Exception):  # whatever is wrong, the error that is on its way says it
                    fs.rm_file(draft)
                raise

        self._do("write", path, write, progress)

    def _stream(self, fs: Any, key: str, written: Written, progress: Callable[[], None]) -> None:
        file = fs.open(key, "wb", block_size=self._part_bytes)
        if hasattr(file, "set_pipelined"):  # SFTP: do not wait for the answer to every 32 KB
            file.set_pipelined(True)
        try:
            for piece in written.pieces(_RANGE):
                file.write(piece)
                progress()
        except BaseException:
            _discard(file)
            raise
        file.close()

    # --- how anything is done ----------------------------------------------------------------------------------

    def _key(self, path: str) -> str:
        key: str = self._kind._strip_protocol(path)
        return key

    def _do(self, what: str, path: str, act: Callable[[Any], T], before_again: Callable[[], None] = no_progress) -> T:
        def once() -> T:
            with self._turn:
                return act(self._file_system())

        def again() -> None:
            if not self._kind.async_impl:
                self._fs = None  # its connection may be gone
            before_again()

        return self._retries.run(what, path, once, again)

    def _attempting(self, path: str) -> s3.Attempting:
        return lambda what, act, before_again: self._do(what, path, act, before_again)

    def _delete_file(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._do("delete", path, lambda fs: fs.rm_file(self._key(path)))

    def _file_system(self) -> Any:
        from fsspec.core import url_to_fs

        with self._making:
            if self._fs is None:
                fresh = {} if self._kind.async_impl or self.protocol == "memory" else {"skip_instance_cache": True}
                fs = url_to_fs(self._url, **self._options, **fresh)[0]
                self._retries.told = s3.knows_parts(self._kind) and s3.tell_failures(fs, self._retries.note)
                self._fs = fs
            return self._fs


class Written:
    """Bytes on their way to a file: body, tail, and the digest that grows with every byte that leaves.

    Args:
        body: What is hashed.
        tail: Makes what follows from the digest.
        held_back: How many bytes the tail replaces; see ``new_digest``.
    """

    def __init__(self, body: memoryview, tail: Callable[[str], bytes], held_back: int) -> None:
        self.body = body
        self._tail = tail
        self._held_back = held_back
        self.begin()

    def begin(self) -> None:
        """From the first byte on, once more."""
        self.hashed = new_digest(self._held_back)
        self.size = len(self.body)
        self.digest = ""

    def pieces(self, size: int) -> Iterator[bytes]:
        """All of it, ``size`` bytes at a time."""
        self.begin()
        for start in range(0, len(self.body), size):
            piece = self.body[start : start + size]
            self.hashed.update(piece)
            yield bytes(piece)
        yield self.end(self.hashed.hexdigest())

    def end(self, digest: str) -> bytes:
        """The last bytes."""
        self.digest = digest
        tail = self._tail(digest)
        self.size = len(self.body) + len(tail)
        return tail


def _file_system_class(protocol: str, path: str) -> Any:
    from fsspec import get_filesystem_class

    try:
        return get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"cannot use {protocol}:// URLs, as in {path!r}: {error}") from error


def _read_through(fs: Any, key: str, offset: int, buffer: memoryview) -> int:
    """Through an open file. SFTP answers 32 KB at a time, so many are asked for before the first has come."""
    with fs.open(key, "rb") as file:
        if not hasattr(file, "readv"):
            file.seek(offset)
            data = file.read(len(buffer))
            buffer[: len(data)] = data
            return len(data)
        end = min(offset + len(buffer), fs.info(key)["size"])
        pieces = [(start, min(_SFTP_PIECE, end - start)) for start in range(offset, end, _SFTP_PIECE)]
        done = 0
        for data in file.readv(pieces):
            buffer[done : done + len(data)] = data
            done += len(data)
        return done


def _discard(file: Any) -> None:
    """Leave a file that was not written to its end, so that it does not appear: closing would complete it."""
    with contextlib.suppress(Exception):  # the error that is on its way says what is wrong
        if hasattr(file, "discard") and not hasattr(file, "set_pipelined"):
            file.discard()
            file.closed = True
        else:
            file.close()


def _remove_tree(fs: Any, key: str) -> None:
    """A name with a star or a bracket in it is not a pattern here, as it is to ``fs.rm``."""
    fs.invalidate_cache(key)
    if fs.async_impl and not _PATTERN.search(key):
        fs.rm(key, recursive=True)  # many in one request
        return
    found = fs.find(key, withdirs=True, detail=True)
    for path in sorted(found, key=len, reverse=True):  # a directory after what is in it
        if found[path]["type"] == "directory":
            fs.rmdir(path)
        else:
            fs.rm_file(path)


def _entry(info: Mapping[str, Any]) -> Entry:
    name = info["name"].rstrip("/").rpartition("/")[2]
    return Entry(name, int(info.get("size") or 0), _modified_s(info), info["type"] == "directory")


def _modified_s(info: Mapping[str, Any]) -> float:
    """File systems call it differently and give it in different types."""
    value = next((info[key] for key in _TIMES if info.get(key)), None)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    return float(value) if isinstance(value, (int, float)) else 0.0
