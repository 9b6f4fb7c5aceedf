"""The bytes that ``torch.save`` puts around a tensor's data, without touching the data.

A ``.distcp`` file is a row of such archives, one per tensor. Knowing prefix and suffix beforehand, the arena
holds the finished file and staging is one plain copy per tensor into the hole between them.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Envelope:
    """Prefix and suffix of an archive whose data is ``nbytes`` long; the data starts 64-byte aligned."""

    prefix: bytes
    suffix: bytes
    nbytes: int

    @property
    def size(self) -> int:
        """Length of the whole archive."""
        return len(self.prefix) + self.nbytes + len(self.suffix)


@functools.lru_cache(maxsize=4096)
def envelope(dtype: torch.dtype, shape: tuple[int, ...], *, crc: bool = False) -> Envelope:
    """The envelope of a contiguous tensor; about 0.4 ms, so it is remembered.

    Args:
        dtype: Of the tensor.
        shape: Of the tensor.
        crc: With the zip checksums that ``torch.save`` writes unless told not to; right in the prefix only.
    """
    recorder = Recorder()
    tensor = torch.empty(shape, dtype=dtype)  # never touched, so no memory is used
    with torch.serialization.skip_data(), contextlib.nullcontext() if crc else without_crc():
        torch.save(tensor, recorder)  # type: ignore[arg-type]  # writes and seeks is all it does
    before, after = recorder.around_hole()
    return Envelope(before, after, tensor.numel() * tensor.element_size())


def archive(value: object) -> bytes:
    """``value`` as ``torch.save`` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@contextlib.contextmanager
def without_crc() -> Iterator[None]:
    """``torch.save`` without the zip checksum: torch never checks it, and it runs at a tenth of our digest."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class Recorder:
    """A file that remembers what is written and where a seek left a hole.

    Attributes:
        holes: Length of each hole in bytes; the bytes between two holes are the parts.
    """

    def __init__(self) -> None:
        self._parts: list[bytearray] = [bytearray()]
        self.holes: list[int] = []

    @property
    def parts(self) -> list[bytes]:
        """What was written, one more than there are holes."""
        return [bytes(part) for part in self._parts]

    def write(self, data: bytes) -> int:
        self._parts[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int) -> None:
        self._parts.append(bytearray())
        self.holes.append(offset)

    def flush(self) -> None:
        """Nothing is buffered."""

    def around_hole(self) -> tuple[bytes, bytes]:
        before, *after = self.parts
        return before, b"".join(after)
