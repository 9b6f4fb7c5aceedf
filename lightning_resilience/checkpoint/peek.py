"""What Lightning wrote beside the tensors, as far as it can be told without torch and without unpickling anything."""

from __future__ import annotations

import pickletools
import zipfile
from dataclasses import dataclass

from lightning_resilience.checkpoint.placefile import open_place
from lightning_resilience.checkpoint.storage import Place

_FULL = {"callbacks", "lr_schedulers"}  # what Lightning leaves out with save_weights_only=True
_NUMBERS = {"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1"}  # not those of BINPUT and its like
_STEP = "global_step"
_HEADER = 30  # of an entry of a zip archive; name and extra field follow
_LIMIT = 256 << 20


@dataclass(frozen=True)
class Facts:
    """What the names in a pickle tell.

    Attributes:
        resumable: It holds more than weights.
        step: Optimizer steps done; None where it does not say.
    """

    resumable: bool
    step: int | None


def peek(place: Place) -> Facts | None:
    """Facts of a file that ``torch.save`` wrote; None where it is something else, or cannot be read."""
    try:
        return read_facts(_pickle_in(place))
    except (OSError, ValueError, OverflowError, zipfile.BadZipFile, NotImplementedError):
        return None


def read_facts(pickled: bytes) -> Facts:
    """Facts of a pickle, from its strings and the number after ``global_step``; nothing in it is run.

    Raises:
        ValueError: It is no pickle.
    """
    seen: set[str] = set()
    step, after_step = None, False
    for opcode, argument, _ in pickletools.genops(pickled):
        if isinstance(argument, str):
            seen.add(argument)
            after_step = argument == _STEP and step is None
        elif after_step and opcode.name in _NUMBERS and isinstance(argument, int):
            step, after_step = argument, False
    return Facts(seen >= _FULL, step)


def _pickle_in(place: Place) -> bytes:
    """By hand from the place that the archive's directory gives: ours have no zip checksums, and zipfile insists."""
    with open_place(place) as file:
        with zipfile.ZipFile(file) as archive:
            entry = next((item for item in archive.infolist() if item.filename.endswith("/data.pkl")), None)
        if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size > _LIMIT:
            raise ValueError(f"{place} is no archive of torch")
        file.seek(entry.header_offset)
        header = file.read(_HEADER)
        file.seek(entry.header_offset + _HEADER + int.from_bytes(header[26:28], "little") + _extra(header))
        return file.read(entry.file_size)


def _extra(header: bytes) -> int:
    return int.from_bytes(header[28:30], "little")
