"""Reading the shards of a checkpoint: which bytes of which files a rank needs, and where they go.

Reads what ``torch.distributed.checkpoint`` and stock Lightning write as well as our own. First everything that is
wanted is said, then it is fetched at once: each byte one time, verified, straight into the tensors where that is
possible.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_resilience._torch import local_chunk
from lightning_resilience.checkpoint.agreement import together
from lightning_resilience.checkpoint.archives import load_archive
from lightning_resilience.checkpoint.candidates import METADATA
from lightning_resilience.checkpoint.envelope import envelope
from lightning_resilience.checkpoint.exchange import Alone, Exchange
from lightning_resilience.checkpoint.files import CheckpointFiles, ends_early, files_at
from lightning_resilience.checkpoint.metadata import decode_metadata
from lightning_resilience.checkpoint.sharing import fetch
from lightning_resilience.checkpoint.storage import Place
from lightning_resilience.checkpoint.transfer import Flight, Landing, default_threads, transfer, uninitialized
from lightning_resilience.errors import DamagedCheckpointError, UntrustedCheckpointError

__all__ = ["AtHand", "Overlap", "PieceReader", "ShardReader", "ShardShelf", "Shelf", "load_archive", "overlap"]


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


class Run(NamedTuple):
    """A region of an array in memory order, as elements from ``start`` to ``stop``.

    Attributes:
        start: The first element of the region.
        stop: The element after its last.
        is_dense: Whether every element between belongs to it.
    """

    start: int
    stop: int
    is_dense: bool


def run_of(shape: Sequence[int], region: Sequence[slice]) -> Run:
    """Where a region of a contiguous array lies in it."""
    start, last, stride = 0, 0, 1
    for size, part in zip(reversed(shape), reversed(region), strict=True):
        start += part.start * stride
        last += (part.stop - 1) * stride
        stride *= size
    count = math.prod(part.stop - part.start for part in region)
    return Run(start, last + 1, last + 1 - start == count)


class PieceReader(Protocol):
    """Something that holds a state in pieces and has it at hand. Called by the training thread."""

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


class Shelf(Protocol):
    """What ``restore`` needs: first it says what it wants, then it gets everything at once.

    ``want``, ``want_value`` and ``room_for`` come before ``fetch``, ``value`` after it.
    """

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

    def room_for(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor for which memory will be taken."""
        ...

    def want(self, name: str, target: torch.Tensor) -> None:
        """Fill the piece of a tensor that this rank holds, in place."""
        ...

    def want_value(self, name: str) -> None:
        """Have :meth:`value` answer for it."""
        ...

    def fetch(self, exchange: Exchange) -> None:
        """Get everything that is wanted."""
        ...

    def value(self, name: str, trust: bool) -> Any:
        """A value that was wanted."""
        ...


class AtHand:
    """The shelf of a :class:`PieceReader`.

    Args:
        reader: Has everything at hand.
    """

    def __init__(self, reader: PieceReader) -> None:
        self._reader = reader
        self._targets: dict[str, torch.Tensor] = {}
        self.names = reader.names
        self.path_of = reader.path_of
        self.tensor_shape = reader.tensor_shape
        self.value = reader.value

    def room_for(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """See :class:`Shelf`."""
        return self._reader.tensor_shape(name) or (), self._reader.dtype(name)

    def want(self, name: str, target: torch.Tensor) -> None:
        """See :class:`Shelf`."""
        self._targets[name] = target

    def want_value(self, name: str) -> None:
        """It is there."""

    def fetch(self, exchange: Exchange) -> None:
        """See :class:`Shelf`."""
        self._reader.read_into(self._targets)


class _Archived(NamedTuple):
    """A piece of a tensor, or a value, as it lies in a file."""

    file: str
    start: int
    length: int


class ShardShelf:
    """The tensors and values of a sharded checkpoint directory.

    Say what is wanted with :meth:`want` and :meth:`want_value`, then :meth:`fetch` it, once.

    Args:
        files: Those of the checkpoint.

    Raises:
        DamagedCheckpointError: Its metadata cannot be read.
        UntrustedCheckpointError: Its metadata holds something else than metadata, or makes no sense.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files
        self.metadata = decode_metadata(files.read(METADATA), str(files.place / METADATA))
        self._landings: list[Landing] = []
        self._odd: list[Callable[[], Landing]] = []
        self._values: dict[str, bytes] = {}
        self._room_left = sum(map(files.size, self._referenced()))

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
        return self._tensor(name).properties.dtype

    def room_for(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor for which memory will be taken.

        Raises:
            UntrustedCheckpointError: All that was asked for is larger than the files it shall come from.
        """
        entry = self._tensor(name)
        self._room_left -= math.prod(entry.size) * entry.properties.dtype.itemsize
        if self._room_left < 0:
            raise UntrustedCheckpointError(
                f"{self._files.place}: with {name!r} of shape {tuple(entry.size)} its tensors would be larger than its"
                " files; it was tampered with"
            )
        return tuple(entry.size), entry.properties.dtype

    def want(self, name: str, target: torch.Tensor) -> None:
        """Fill the piece of a tensor that this rank holds, in place.

        Args:
            name: Flat name in the checkpoint.
            target: A tensor or ``DTensor`` of the shape that was saved.

        Raises:
            DamagedCheckpointError: A file does not have what the metadata says.
            UntrustedCheckpointError: The metadata leads out of the checkpoint, or lies about sizes.
        """
        entry = self._tensor(name)
        with torch.no_grad():  # otherwise each would become part of a graph
            local = target.to_local().detach() if isinstance(target, DTensor) else target.detach()
        offsets, shape = local_chunk(target)
        for chunk in entry.chunks:
            region = overlap(chunk.offsets, chunk.sizes, offsets, shape)
            if region is not None:
                self._want_piece(name, entry.properties.dtype, chunk, region, local)

    def want_value(self, name: str) -> None:
        """Have :meth:`value` answer for it after the fetch."""
        archived = self._find(MetadataIndex(name), name)
        self._landings.append(_staged(archived, functools.partial(self._keep, name)))

    def fetch(self, exchange: Exchange) -> None:
        """Get everything that is wanted. Called on all ranks.

        Raises:
            DamagedCheckpointError: Some of the bytes are not those that were written; then nothing in the targets is
                proven. Raised on all ranks.
        """
        flight = together(exchange, lambda: Flight.plan(self._files, self._landings))
        self._landings = []
        fetch(flight, exchange)
        together(exchange, self._fetch_odd)

    def value(self, name: str, trust: bool) -> Any:
        """A value that is not a tensor, fetched before."""
        return load_archive(io.BytesIO(self._values[name]), f"{self._files.place} ({name})", trust)

    def _keep(self, name: str, data: memoryview) -> None:
        self._values[name] = bytes(data)

    def _fetch_odd(self) -> None:
        """Archives that are not as ours: of another version of torch, or of a view. Read once more, as a whole."""
        flight = Flight.plan(self._files, [make() for make in self._odd])
        self._odd = []
        transfer(flight, list(flight.landings), default_threads(self._files, 1))

    def _referenced(self) -> set[str]:
        """Names of the files that the metadata refers to."""
        infos = (self.metadata.storage_data or {}).values()
        names = {getattr(info, "relative_path", None) for info in infos}
        return {self._files.within(name) for name in names if isinstance(name, str)}

    def _tensor(self, name: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise UntrustedCheckpointError(
                f"{self._files.place}: {name!r} is not a tensor, as everything else says it is"
            )
        return entry

    def _find(self, index: MetadataIndex, name: str) -> _Archived:
        """Where an archive lies.

        Raises:
            DamagedCheckpointError: The file is too short for it.
            UntrustedCheckpointError: The metadata makes no sense.
        """
        info = (self.metadata.storage_data or {}).get(index)
        numbers = [getattr(info, key, None) for key in ("offset", "length")]
        if info is None or type(info.relative_path) is not str or any(type(n) is not int or n < 0 for n in numbers):
            raise UntrustedCheckpointError(f"{self._files.place}: {METADATA} does not say where {name!r} is")
        if getattr(info, "transform_descriptors", None):
            raise UntrustedCheckpointError(
                f"{self._files.place}: {name!r} was changed by {info.transform_descriptors} on its way to storage,"
                " which only torch.distributed.checkpoint can undo"
            )
        file = self._files.within(info.relative_path)
        if info.offset + info.length > self._files.size(file):
            raise ends_early(self._files.place / file)
        return _Archived(file, info.offset, info.length)

    def _want_piece(
        self, name: str, dtype: torch.dtype, chunk: ChunkStorageMetadata, region: Overlap, local: torch.Tensor
    ) -> None:
        archived = self._find(MetadataIndex(name, chunk.offsets), name)
        shape = tuple(chunk.sizes)
        size = math.prod(shape) * dtype.itemsize
        if size > archived.length:
            raise UntrustedCheckpointError(
                f"{self._files.place}: a piece of {name!r} shall have {size} bytes, and {archived.length} were saved"
            )
        label = f"{self._files.place} ({name})"
        whole = functools.partial(_whole_archive, archived, shape, region, local, label)
        plain = envelope(dtype, shape)
        if plain.size != archived.length:
            self._odd.append(whole)
            return
        head = functools.partial(self._check_head, dtype, shape, whole)
        self._landings.append(_staged(archived._replace(length=len(plain.prefix)), head))
        data = archived._replace(start=archived.start + len(plain.prefix), length=size)
        self._landings.append(_data_landing(data, dtype, shape, region, local))

    def _check_head(
        self, dtype: torch.dtype, shape: tuple[int, ...], whole: Callable[[], Landing], head: memoryview
    ) -> None:
        """Whether the data lies where it was looked for."""
        found = bytes(head)
        is_ours = found == envelope(dtype, shape).prefix
        if not is_ours and found != envelope(dtype, shape, crc=True).prefix:  # made for stock checkpoints only
            self._odd.append(whole)


class ShardReader:
    """The tensors and values of a sharded checkpoint directory, each read when it is asked for; verified.

    For a few of them, on one rank. What fills a whole model is quicker with a :class:`ShardShelf`.

    Args:
        place: The checkpoint.
        trust: Follow links, unpickle any object.

    Raises:
        DamagedCheckpointError: Its metadata cannot be read.
        UntrustedCheckpointError: Its metadata holds something else than metadata, or makes no sense.
    """

    def __init__(self, place: Place, trust: bool = False) -> None:
        self._shelf = ShardShelf(files_at(place, trust))
        self.metadata = self._shelf.metadata
        self.names = self._shelf.names
        self.path_of = self._shelf.path_of
        self.tensor_shape = self._shelf.tensor_shape
        self.dtype = self._shelf.dtype

    def value(self, name: str, trust: bool) -> Any:
        """A value that is not a tensor."""
        self._shelf.want_value(name)
        self._shelf.fetch(Alone())
        return self._shelf.value(name, trust)

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill the pieces of tensors that this rank holds, in place.

        Args:
            targets: Tensors and ``DTensor`` by flat name; of the shapes that were saved.
        """
        for name, target in targets.items():
            self._shelf.want(name, target)
        self._shelf.fetch(Alone())


def _staged(archived: _Archived, then: Callable[[memoryview], None]) -> Landing:
    return Landing(archived.file, archived.start, archived.length, lambda: uninitialized(archived.length), then)


def _data_landing(
    data: _Archived, dtype: torch.dtype, shape: tuple[int, ...], region: Overlap, local: torch.Tensor
) -> Landing:
    """Straight into the tensor if the region is one run of bytes in both, else by way of a buffer."""
    run = run_of(shape, region.saved)
    start, length = data.start + run.start * dtype.itemsize, (run.stop - run.start) * dtype.itemsize
    inner = run_of(tuple(local.shape), region.wanted)
    if (
        run.is_dense
        and inner.is_dense
        and local.dtype == dtype
        and local.is_contiguous()
        and local.device.type == "cpu"
    ):
        first = inner.start * dtype.itemsize
        return Landing(data.file, start, length, lambda: _bytes_of(local)[first : first + length])

    def copy(buffer: memoryview) -> None:
        flat = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype)
        sizes = [part.stop - part.start for part in region.saved]
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        with torch.no_grad():
            local[region.wanted].copy_(flat.as_strided(sizes, strides))

    return Landing(data.file, start, length, lambda: uninitialized(length), copy)


def _whole_archive(
    archived: _Archived, shape: tuple[int, ...], region: Overlap, local: torch.Tensor, label: str
) -> Landing:
    def copy(buffer: memoryview) -> None:
        piece = load_archive(io.BytesIO(buffer), label, trust=False)
        if not isinstance(piece, torch.Tensor) or tuple(piece.shape) != shape:
            raise DamagedCheckpointError(f"{label} is not the piece of a tensor that the metadata says it is")
        with torch.no_grad():
            local[region.wanted].copy_(piece[region.saved])

    return _staged(archived, copy)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
