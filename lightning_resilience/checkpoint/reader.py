"""Reading the files of a checkpoint: metadata without arbitrary unpickling, and pieces of tensors.

Reads what ``torch.distributed.checkpoint`` and stock Lightning write as well as our own.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_resilience._torch import METADATA_CLASSES, local_chunk
from lightning_resilience.checkpoint.candidates import METADATA
from lightning_resilience.checkpoint.manifest import files_of
from lightning_resilience.checkpoint.storage import LocalStorage, Place
from lightning_resilience.errors import DamagedCheckpointError, UntrustedCheckpointError

_HARMLESS: list[Any] = [pathlib.PosixPath, pathlib.PurePosixPath, pathlib.Path, timedelta]


class Overlap(NamedTuple):
    """The region that a saved piece and a wanted piece share, as slices of either."""

    saved: tuple[slice, ...]
    wanted: tuple[slice, ...]


def overlap(
    saved_offsets: Sequence[int], saved_shape: Sequence[int], offsets: Sequence[int], shape: Sequence[int]
) -> Overlap | None:
    """Where two pieces of the same tensor meet; None where they do not."""
    saved, wanted = [], []
    for saved_start, saved_size, start, size in zip(saved_offsets, saved_shape, offsets, shape, strict=True):
        low, high = max(saved_start, start), min(saved_start + saved_size, start + size)
        if low >= high:
            return None
        saved.append(slice(low - saved_start, high - saved_start))
        wanted.append(slice(low - start, high - start))
    return Overlap(tuple(saved), tuple(wanted))


class PieceReader(Protocol):
    """What ``restore`` needs of something that holds a state in pieces. Called by the training thread."""

    @property
    def names(self) -> list[str]:
        """Flat names of everything in it."""
        ...

    def path_of(self, name: str) -> tuple[str | int, ...]:
        """Way of a value through the nested state it was saved from."""
        ...

    def tensor_shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a whole tensor; None for a value that is not a tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        ...

    def value(self, name: str, trust: bool) -> Any:
        """A value that is not a tensor."""
        ...

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill the pieces of tensors that this rank holds, in place."""
        ...


class ShardReader:
    """The tensors and values of a sharded checkpoint directory.

    Args:
        directory: The checkpoint.

    Raises:
        DamagedCheckpointError: Its metadata cannot be read.
        UntrustedCheckpointError: Its metadata holds something else than metadata.
    """

    def __init__(self, directory: Place) -> None:
        self._directory = files_of(directory)
        self.metadata = _read_metadata(self._directory / METADATA)

    @property
    def names(self) -> list[str]:
        """Flat names of everything in the checkpoint, in the order in which they were saved."""
        return list(self.metadata.state_dict_metadata)

    def path_of(self, name: str) -> tuple[str | int, ...]:
        """Way of a value through the nested state it was saved from."""
        return tuple((self.metadata.planner_data or {}).get(name, (name,)))

    def tensor_shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a whole tensor; None for a value that is not a tensor."""
        entry = self.metadata.state_dict_metadata[name]
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    def value(self, name: str, trust: bool) -> Any:
        """A value that is not a tensor."""
        return load_archive(io.BytesIO(self._bytes(MetadataIndex(name))), f"{self._directory} ({name})", trust)

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill the pieces of tensors that this rank holds, in place.

        Args:
            targets: Tensors and ``DTensor`` by flat name; of the shapes that were saved.
        """
        for name, target in targets.items():
            local = target.to_local() if hasattr(target, "to_local") else target
            offsets, shape = local_chunk(target)
            for index, region in self._overlaps(name, offsets, shape):
                piece = torch.load(io.BytesIO(self._bytes(index)), map_location="cpu", weights_only=True)
                local[region.wanted].copy_(piece[region.saved])

    def _overlaps(
        self, name: str, offsets: Sequence[int], shape: Sequence[int]
    ) -> Iterator[tuple[MetadataIndex, Overlap]]:
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            region = overlap(chunk.offsets, chunk.sizes, offsets, shape)
            if region is not None:
                yield MetadataIndex(name, chunk.offsets), region

    def _bytes(self, index: MetadataIndex) -> bytearray:
        info = self.metadata.storage_data[index]
        file = self._directory / info.relative_path.rpartition("/")[2]  # never outside the checkpoint
        data = bytearray(info.length)
        if file.read_into(info.offset, memoryview(data)) != info.length:
            raise DamagedCheckpointError(f"{file} ends before {index.fqn!r} is complete")
        return data


def load_archive(
    source: io.BytesIO | Place, label: str, trust: bool, *, mmap: bool = False, map_location: Any = "cpu"
) -> Any:
    """``torch.load`` that unpickles only plain data, unless told to trust the file.

    Args:
        source: The archive.
        label: What to call it in an error.
        trust: Allow any object; it can run any code.
        mmap: Map a file instead of reading it, where it is local.
        map_location: Where tensors go.

    Raises:
        UntrustedCheckpointError: It holds other objects, and is not trusted.
        DamagedCheckpointError: It is not an archive.
    """
    archive = _opened(source)
    mapped = mmap and isinstance(archive, str)
    arguments: dict[str, Any] = {"map_location": map_location, "mmap": mapped or None}
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            return torch.load(archive, weights_only=True, **arguments)
    except pickle.UnpicklingError as error:
        if not trust:
            raise UntrustedCheckpointError(
                f"{label} holds objects that are not plain data: {_first_line(error)} If you trust where it came"
                " from, pass AsyncCheckpointIO(trust=True); loading it can run any code."
            ) from error
    except (RuntimeError, EOFError) as error:
        raise DamagedCheckpointError(f"{label} cannot be read: {_first_line(error)}") from error
    if isinstance(archive, io.BytesIO):
        archive.seek(0)
    return torch.load(archive, weights_only=False, **arguments)


def _opened(source: io.BytesIO | Place) -> io.BytesIO | str:
    """What ``torch.load`` takes: the name of a local file, or bytes."""
    if isinstance(source, io.BytesIO):
        return source
    return source.path if isinstance(source.storage, LocalStorage) else io.BytesIO(source.read())


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return (lines or str(error).splitlines() or [type(error).__name__])[0].strip()


def _read_metadata(path: Place) -> Metadata:
    try:
        metadata = _MetadataUnpickler(io.BytesIO(path.read())).load()
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing: the save was not finished") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, IndexError, KeyError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise UntrustedCheckpointError(f"{path} holds a {type(metadata).__name__} instead of checkpoint metadata")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of checkpoint metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = METADATA_CLASSES.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise UntrustedCheckpointError(
                f"the checkpoint's metadata refers to {module}.{name}, which has no business there: it was not"
                " written by torch.distributed.checkpoint, or somebody tampered with it"
            )
        return found
