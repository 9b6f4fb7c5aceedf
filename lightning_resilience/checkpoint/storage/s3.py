"""Uploads to S3 in parallel parts, through s3fs: straight from the arena, a part is all that is copied at a time.

Runs in the writer process. Nothing is visible before the last part is there; what a killed writer leaves is dropped by
whoever writes the same object next, or by the sweep of a later run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotYet
from threading import Event
from typing import Any, Protocol

from lightning_resilience.checkpoint.digest import Digest
from lightning_resilience.checkpoint.storage.protocol import GivenUp, no_progress

log = logging.getLogger(__name__)

_STREAMS = 4
_MOST_PARTS = 9000  # of the 10,000 that S3 allows
_TICK_S = 1.0
_SETTLE_S = 10.0
_TOO_MANY, _SERVER_ERRORS = 429, 500


class Attempting(Protocol):
    """Carries out one request, again if need be."""

    def __call__(self, what: str, act: Callable[[Any], Any], before_again: Callable[[], None], /) -> Any:
        """What ``act`` makes of the file system."""
        ...


def knows_parts(fs: Any) -> bool:
    """Whether it is s3fs, or another that takes S3's requests as they are."""
    return hasattr(fs, "call_s3")


def tell_failures(fs: Any, note: Callable[[], None]) -> bool:
    """Have ``note`` called for each request that fails in passing: s3fs and botocore send it again by themselves.

    Args:
        fs: s3fs' file system.
        note: Called on a thread of fsspec's.

    Returns:
        False when it cannot be known, as each bucket has a client of its own.
    """
    client = fs.connect()
    if fs.cache_regions:
        return False

    def answered(response: Any = None, caught_exception: Exception | None = None, **_: Any) -> None:
        if caught_exception is not None or (response is not None and _is_passing(response[0].status_code)):
            note()

    client.meta.events.register("needs-retry.s3", answered)
    return True


def _is_passing(status: int) -> bool:
    return status == _TOO_MANY or status >= _SERVER_ERRORS


def upload(
    key: tuple[str, str],
    body: memoryview,
    digest: Digest,
    tail: Callable[[str], bytes],
    attempting: Attempting,
    progress: Callable[[], None],
    part_bytes: int,
) -> None:
    """Upload an object in parts, several at a time.

    Args:
        key: Bucket and key of the object.
        body: Its bytes.
        digest: Is told each of them.
        tail: Makes what follows from the digest.
        attempting: How to do one request.
        progress: Called at least about every second; what it raises ends the upload.
        part_bytes: Size of a part; of very large objects they are larger.
    """
    place = {"Bucket": key[0], "Key": key[1]}
    begun = attempting("begin to write", lambda fs: fs.call_s3("create_multipart_upload", **place), progress)
    place["UploadId"] = begun["UploadId"]
    stopped = Event()
    pool = ThreadPoolExecutor(_STREAMS, thread_name_prefix="lightning-resilience-upload")
    waiting: deque[Future[str]] = deque()
    try:
        tags = _send_parts(pool, waiting, place, _parts(body, digest, tail, part_bytes), attempting, progress, stopped)
        parts = {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]}
        _complete(place, parts, attempting, progress)
    except BaseException:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        # a part that arrives after the end of its upload would stay behind
        wait([part for part in waiting if not part.cancelled()], _SETTLE_S)
        try:
            attempting("give up", functools.partial(_abort, place), no_progress)
        except OSError as error:
            log.warning("parts of s3://%s/%s are left behind until the next run's sweep: %s", *key, error)
        waiting.clear()  # one of them holds the error, and the error this call
        raise
    pool.shutdown()


def forget(bucket: str, prefix: str, before: float, attempting: Attempting) -> None:
    """Abort unfinished uploads of this object, or of objects below it, that began before a moment."""
    try:
        uploads = attempting("list unfinished uploads of", lambda fs: list(_uploads(fs, bucket, prefix)), no_progress)
    except PermissionError:
        log.debug("may not list unfinished uploads in the bucket %s", bucket)
        return
    for item in uploads:
        mine = item["Key"] == prefix or item["Key"].startswith(f"{prefix}/")
        if not mine or item["Initiated"].timestamp() >= before:
            continue
        place = {"Bucket": bucket, "Key": item["Key"], "UploadId": item["UploadId"]}
        with contextlib.suppress(FileNotFoundError):
            attempting("give up", functools.partial(_abort, place), no_progress)


def _abort(place: dict[str, str], fs: Any) -> None:
    fs.call_s3("abort_multipart_upload", **place)


def _uploads(fs: Any, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
    page: dict[str, Any] = {}
    while True:
        answer = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **page)
        yield from answer.get("Uploads", [])
        if not answer.get("IsTruncated"):
            return
        page = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def _parts(body: memoryview, digest: Digest, tail: Callable[[str], bytes], part_bytes: int) -> Iterator[bytes]:
    """Hashed as they are cut; the last one ends with the tail."""
    size = max(part_bytes, -(-len(body) // _MOST_PARTS))
    for start in range(0, len(body), size):
        piece = body[start : start + size]
        digest.update(piece)
        is_last = start + size >= len(body)
        yield bytes(piece) + (tail(digest.hexdigest()) if is_last else b"")


def _send_parts(
    pool: ThreadPoolExecutor,
    waiting: deque[Future[str]],
    place: dict[str, str],
    parts: Iterator[bytes],
    attempting: Attempting,
    progress: Callable[[], None],
    stopped: Event,
) -> list[str]:
    """The tags of the parts. As many are on their way as there are streams, and one more is ready."""

    def check() -> None:
        if stopped.is_set():
            raise GivenUp("another part could not be written")

    def send(number: int, part: bytes) -> str:
        def request(fs: Any) -> Any:
            check()
            return fs.call_s3("upload_part", PartNumber=number, Body=part, **place)

        tag: str = attempting(f"write part {number} of", request, check)["ETag"]
        return tag

    tags: list[str] = []
    for number, part in enumerate(parts, 1):
        waiting.append(pool.submit(send, number, part))
        if len(waiting) > _STREAMS:
            tags.append(_result(waiting, progress))
    while waiting:
        tags.append(_result(waiting, progress))
    return tags


def _result(waiting: deque[Future[str]], progress: Callable[[], None]) -> str:
    """Of the oldest, which waits no more then."""
    while True:
        progress()
        try:
            tag = waiting[0].result(timeout=_TICK_S)
        except NotYet:
            if waiting[0].done():  # its own error, not that of the wait
                raise
        else:
            waiting.popleft()
            return tag


def _complete(
    place: dict[str, str], parts: dict[str, Any], attempting: Attempting, progress: Callable[[], None]
) -> None:
    """Make the object visible. An answer that got lost looks like an upload that does not exist any more."""
    try:
        attempting(
            "finish writing",
            lambda fs: fs.call_s3("complete_multipart_upload", MultipartUpload=parts, **place),
            progress,
        )
    except FileNotFoundError:
        tag = attempting(
            "look at", lambda fs: fs.call_s3("head_object", Bucket=place["Bucket"], Key=place["Key"]), progress
        )
        if not str(tag["ETag"]).strip('"').endswith(f"-{len(parts['Parts'])}"):
            raise
