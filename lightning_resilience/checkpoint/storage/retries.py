"""Trying again: which errors may pass by themselves, how often and how long they are waited for.

The decision is a pure function; :class:`Retries` carries it out, counts and says so.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_resilience.checkpoint.storage.protocol import GivenUp

T = TypeVar("T")

log = logging.getLogger(__name__)

_PERMANENT_TYPES = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ImportError,
    TypeError,
    ValueError,
    AttributeError,
)
_PERMANENT_NAMES = {  # of libraries that are not imported here
    "NoCredentialsError",
    "PartialCredentialsError",
    "ParamValidationError",
    "ProfileNotFound",
    "AuthenticationException",
    "BadAuthenticationType",
    "BadHostKeyException",
}
_PERMANENT_NUMBERS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ENOSYS, errno.ENOTSUP}
_NUMBER_OF: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    TimeoutError: errno.ETIMEDOUT,
}
_HARMLESS = {"endpoint_url", "host", "port", "region_name", "username", "user", "project", "account_name"}
_SHORTEST_SECRET = 4


@dataclass(frozen=True)
class Patience:
    """How often to try, and how long to pause before the second time; each pause is twice the one before.

    By default seven tries with 16 seconds of pauses between them, on top of what a file system does by itself.
    """

    tries: int = 7
    first_pause_s: float = 0.25
    longest_pause_s: float = 8.0

    def pause_s(self, failures: int) -> float | None:
        """How long to wait after this many failures; None to give up."""
        if failures >= self.tries:
            return None
        return min(self.first_pause_s * 2.0 ** (failures - 1), self.longest_pause_s)


def is_transient(error: Exception) -> bool:
    """Whether it may go better the next time. What nobody knows may: seven tries harm nobody."""
    if isinstance(error, _PERMANENT_TYPES) or type(error).__name__ in _PERMANENT_NAMES:
        return False
    return not (isinstance(error, OSError) and error.errno in _PERMANENT_NUMBERS)


class Retries:
    """Owned by one storage; used by several threads at once.

    Args:
        patience: When to give up.
        secrets: Options whose values no error may show.
        sleep: Waits that many seconds.

    Attributes:
        count: How often something was tried again.
        told: The file system tells of each request that failed, by :meth:`note`, as it tries again by itself as well.
    """

    def __init__(
        self, patience: Patience, secrets: Mapping[str, Any], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._patience = patience
        self._secrets = tuple(_secrets_in(secrets))
        self._sleep = sleep
        self.count = 0
        self.told = False
        self._counting = threading.Lock()

    def note(self) -> None:
        """Something is tried again. Called on any thread."""
        with self._counting:
            self.count += 1

    def run(self, what: str, path: str, act: Callable[[], T], before_again: Callable[[], None]) -> T:
        """What ``act`` returns, at the first try that succeeds.

        Args:
            what: What is done, for the log: "read", "write part 3 of".
            path: To what.
            act: Does it.
            before_again: Called before another try; what it raises ends the trying.

        Raises:
            OSError: The last error, in a form that shows no secret; of its own type where that is a kind of it.
        """
        failures = 0
        while True:
            known = self.count
            try:
                return act()
            except GivenUp:
                raise
            except Exception as error:  # of a library that may raise anything
                failures += 1
                pause_s = self._patience.pause_s(failures) if is_transient(error) else None
                number, text = _number_of(error), self.without_secrets(error)
                forget_frames(error)
            if pause_s is None:
                tried = f", tried {failures} times" if failures > 1 else ""
                # out here, so that the original, which may show a secret, is no part of it
                raise OSError(number, f"could not {what} it{tried}: {text}", path)
            if not self.told or self.count == known:
                self.note()
            log.warning(
                "could not %s %s: %s; trying again in %.2f s (%d of %d)",
                what,
                path,
                text,
                pause_s,
                failures + 1,
                self._patience.tries,
            )
            self._sleep(pause_s)
            before_again()

    def without_secrets(self, error: Exception) -> str:
        """The text of an error, with the values of options taken out."""
        text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _number_of(error: Exception) -> int:
    """Its ``errno``; of errors without one, what their type says."""
    number = next((number for kind, number in _NUMBER_OF.items() if isinstance(error, kind)), None)
    return number or (error.errno if isinstance(error, OSError) else None) or errno.EIO


def forget_frames(error: BaseException) -> None:
    """Let go of what the calls held that an error has ended: views of the arena, among others.

    fsspec and asyncio keep an error in a call that the error's own traceback names. Such a ring is only found by the
    next garbage collection, and until then nobody can give back the memory that any of these calls was looking at.
    """
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those before it, each once."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            left += [one.__cause__, one.__context__]
            yield one


def _secrets_in(value: Any, key: str = "") -> list[str]:
    """All texts in nested options except those that tell an error's reader where it happened."""
    if isinstance(value, Mapping):
        return [text for inner, item in value.items() for text in _secrets_in(item, str(inner))]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in _secrets_in(item, key)]
    if isinstance(value, str) and len(value) >= _SHORTEST_SECRET and key not in _HARMLESS:
        return [value]
    return []
