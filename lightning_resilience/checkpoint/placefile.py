"""A file on any storage as Python's own file object, for code that wants to seek and read."""

from __future__ import annotations

import io
import os

from lightning_resilience.checkpoint.storage import Place

_BUFFER = 256 << 10


class _RawPlaceFile(io.RawIOBase):
    def __init__(self, place: Place, size: int) -> None:
        super().__init__()
        self._place = place
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed's Buffer needs Python 3.12
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        count = self._place.read_into(self._position, view) if len(view) else 0
        self._position += count
        return count


def open_place(place: Place) -> io.BufferedReader:
    """Open a file for reading.

    Raises:
        FileNotFoundError: Nothing is there.
    """
    found = place.stat()
    if found is None or found.is_directory:
        raise FileNotFoundError(f"there is no file {place}")
    return io.BufferedReader(_RawPlaceFile(place, found.size), _BUFFER)
