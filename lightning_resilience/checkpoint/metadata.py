"""The ``.metadata`` file of a sharded checkpoint: read without running anything it says, and held to sense.

The format is that of ``torch.distributed.checkpoint``, a pickle.
"""

from __future__ import annotations

import gc
import io
import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from lightning_resilience._torch import METADATA_CLASSES
from lightning_resilience.checkpoint.pickles import PickleGuard
from lightning_resilience.errors import DamagedCheckpointError, LoadError, UntrustedCheckpointError

_MAX_DIMENSIONS = 64


def decode_metadata(data: bytes, label: str) -> Metadata:
    """The metadata in ``data``.

    Raises:
        DamagedCheckpointError: It is none.
        UntrustedCheckpointError: It holds something that has no business there.
    """
    try:
        PickleGuard(data).check()
        metadata = _unpickle(data)
    except LoadError as error:
        raise type(error)(f"{label}: {error}") from None
    except Exception as error:  # whatever it is, these bytes are what caused it
        raise DamagedCheckpointError(f"{label} cannot be read: {error or type(error).__name__}") from error
    if not isinstance(metadata, Metadata):
        raise UntrustedCheckpointError(f"{label} holds a {type(metadata).__name__} instead of checkpoint metadata")
    try:
        _check(metadata)
    except (AttributeError, TypeError, ValueError) as error:
        raise UntrustedCheckpointError(
            f"{label} makes no sense, somebody may have tampered with it: {error}"
        ) from error
    return metadata


def _unpickle(data: bytes) -> Any:
    """With the garbage collector off: it would look at a million new objects again and again, in vain."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return _Unpickler(io.BytesIO(data)).load()
    finally:
        if was_on:
            gc.enable()


class _Unpickler(pickle.Unpickler):
    """Makes the classes of checkpoint metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = METADATA_CLASSES.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise UntrustedCheckpointError(
                f"it refers to {module}.{name}, which has no business there: it was not written by"
                " torch.distributed.checkpoint, or somebody tampered with it"
            )
        return found


def _check(metadata: Metadata) -> None:
    """What the code that reads tensors relies on; the places in files are compared with the files when they are used.

    Raises:
        ValueError: Something is not what it should be; also ``TypeError`` or ``AttributeError``.
    """
    _expect(metadata.state_dict_metadata, dict)
    for name, entry in metadata.state_dict_metadata.items():
        _expect(name, str)
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry)
        else:
            _expect(entry, BytesStorageMetadata)
    _expect(metadata.storage_data, dict)
    for name, way in _expect(metadata.planner_data or {}, dict).items():
        _expect(name, str)
        for step in _expect(way, tuple):
            if type(step) is not str and type(step) is not int:
                raise ValueError(f"the path of {name!r} is {way!r}")


def _check_tensor(name: str, entry: TensorStorageMetadata) -> None:
    _expect(entry.properties.dtype, torch.dtype)
    shape = _expect(entry.size, torch.Size)
    if len(shape) > _MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise ValueError(f"{name!r} has the shape {tuple(shape)}")
    held = 0
    for chunk in _expect(entry.chunks, list):
        _expect(chunk, ChunkStorageMetadata)
        if not _is_inside(_expect(chunk.offsets, torch.Size), _expect(chunk.sizes, torch.Size), shape):
            raise ValueError(f"a piece of {name!r} lies outside of it")
        held += math.prod(chunk.sizes)
    if held < math.prod(shape):
        raise ValueError(f"the pieces of {name!r} have {held} of its {math.prod(shape)} elements")


def _is_inside(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    return len(offsets) == len(sizes) == len(shape) and all(
        0 <= start and 0 <= size and start + size <= whole
        for start, size, whole in zip(offsets, sizes, shape, strict=True)
    )


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value
