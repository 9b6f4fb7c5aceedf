"""What is in a checkpoint, whoever wrote it: tensors by their way through Lightning's dictionary, read one at a time.

Every way starts with ``state_dict`` or ``optimizer_states``, as in a file of stock Lightning; the names of the shards
of FSDP1 and FSDP2 are translated.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_resilience.checkpoint.archives import load_archive
from lightning_resilience.checkpoint.candidates import META, METADATA
from lightning_resilience.checkpoint.catalog import Listed
from lightning_resilience.checkpoint.files import CheckpointFiles
from lightning_resilience.checkpoint.manifest import Manifest
from lightning_resilience.checkpoint.metadata import decode_metadata
from lightning_resilience.checkpoint.proven import ProvenFile
from lightning_resilience.checkpoint.state import clean_name
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.errors import DamagedCheckpointError

Way: TypeAlias = tuple["str | int", ...]
"""Keys through nested dictionaries and lists."""

MODEL = "state_dict"
OPTIMIZERS = "optimizer_states"
_OPTIMIZER = "optimizer_"
_FSDP1_MODEL = "model"


class TensorEntry(NamedTuple):
    """Shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Contents(Protocol):
    """Of one checkpoint. Used by one thread."""

    @property
    def tensors(self) -> Mapping[Way, TensorEntry]:
        """All tensors of the model and the optimizers, in the order in which they are best read."""
        ...

    @property
    def others(self) -> list[Way]:
        """What else the state of the model and the optimizers has: values, and tensors that are not plain."""
        ...

    def values(self, trust: bool) -> dict[Way, Any]:
        """The others, loaded."""
        ...

    def rest(self, trust: bool) -> dict[str, Any]:
        """Everything but the state of the model and the optimizers: loops, callbacks, schedulers, hyper-parameters."""
        ...

    def read(self, way: Way) -> torch.Tensor:
        """One tensor, whole.

        Raises:
            DamagedCheckpointError: It is not there.
        """
        ...

    def finish(self) -> None:
        """Read what is left of the files and compare all with the checksums.

        Raises:
            DamagedCheckpointError: They do not hold what was written.
        """
        ...


class ShardedContents:
    """Of a directory of shards.

    Args:
        listed: The checkpoint.
        trust: Follow links.

    Raises:
        DamagedCheckpointError: Its metadata cannot be read.
        UntrustedCheckpointError: Its metadata holds something else than metadata, or makes no sense.
    """

    def __init__(self, listed: Listed, trust: bool = False) -> None:
        self._listed = listed
        self._checkpoint = CheckpointFiles(
            listed.folder, listed.proof if isinstance(listed.proof, Manifest) else None, trust
        )
        self._files: dict[str, ProvenFile] = {}
        self._metadata: Metadata = decode_metadata(self._whole(METADATA), str(listed.folder / METADATA))
        self._names = {self._way(name): name for name in self._metadata.state_dict_metadata}
        self.tensors: dict[Way, TensorEntry] = {
            way: TensorEntry(tuple(entry.size), entry.properties.dtype)
            for way, name in self._names.items()
            if isinstance(entry := self._metadata.state_dict_metadata[name], TensorStorageMetadata)
        }

    @property
    def others(self) -> list[Way]:
        """See :class:`Contents`."""
        return [way for way in self._names if way not in self.tensors]

    def values(self, trust: bool) -> dict[Way, Any]:
        """See :class:`Contents`."""
        label = f"{self._listed.place} ({{}})"
        return {
            way: load_archive(io.BytesIO(self._bytes(MetadataIndex(name))), label.format(name), trust)
            for way, name in ((way, self._names[way]) for way in self.others)
        }

    def rest(self, trust: bool) -> dict[str, Any]:
        """See :class:`Contents`."""
        rest: dict[str, Any] = load_archive(io.BytesIO(self._whole(META)), str(self._listed.folder / META), trust)
        return rest

    def read(self, way: Way) -> torch.Tensor:
        """See :class:`Contents`."""
        name, entry = self._names[way], self.tensors[way]
        saved = self._metadata.state_dict_metadata[name]
        assert isinstance(saved, TensorStorageMetadata)
        self._check_pieces(name, entry, saved)
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for chunk in saved.chunks:
            data = io.BytesIO(self._bytes(MetadataIndex(name, chunk.offsets)))
            region = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[region].copy_(load_archive(data, f"{self._listed.place} ({name})", trust=False))
        return whole

    def finish(self) -> None:
        """See :class:`Contents`."""
        if isinstance(self._listed.proof, Manifest):
            for name in self._listed.proof.files:
                self._file(name).finish()

    def _way(self, name: str) -> Way:
        way: Way = tuple((self._metadata.planner_data or {}).get(name, (name,)))
        root = str(way[0])
        if root.startswith(_OPTIMIZER) and root.removeprefix(_OPTIMIZER).isdigit():
            return (OPTIMIZERS, int(root.removeprefix(_OPTIMIZER)), *way[1:])
        if root in (MODEL, _FSDP1_MODEL) and len(way) > 1:
            return (MODEL, clean_name(".".join(map(str, way[1:]))))
        return way

    def _check_pieces(self, name: str, entry: TensorEntry, saved: TensorStorageMetadata) -> None:
        """Before memory is taken for it: a tampered size must not ask for more than the files have."""
        indices = [MetadataIndex(name, chunk.offsets) for chunk in saved.chunks]
        there = sum(self._where(index)[2] for index in indices)
        if sum(torch.Size(chunk.sizes).numel() for chunk in saved.chunks) != torch.Size(entry.shape).numel():
            raise DamagedCheckpointError(f"{self._listed.place}: the pieces of {name!r} do not make it whole")
        if entry.nbytes > there:
            raise DamagedCheckpointError(f"{self._listed.place}: {name!r} is said to be larger than what is there")

    def _bytes(self, index: MetadataIndex) -> bytes:
        name, start, length = self._where(index)
        return bytes(self._file(name).read(start, length))

    def _where(self, index: MetadataIndex) -> tuple[str, int, int]:
        info = self._metadata.storage_data.get(index)
        found: tuple[Any, ...] = () if info is None else (info.relative_path, info.offset, info.length)
        if tuple(map(type, found)) != (str, int, int):
            raise DamagedCheckpointError(f"{self._listed.place}: its metadata does not say where {index.fqn!r} lies")
        path, start, length = found
        return self._checkpoint.within(path), start, length

    def _whole(self, name: str) -> bytes:
        file = self._file(name)
        return bytes(file.read(0, file.size))

    def _file(self, name: str) -> ProvenFile:
        if name not in self._files:
            self._files[name] = ProvenFile(self._checkpoint, name)
        return self._files[name]


class FileContents:
    """Of one file that ``torch.save`` wrote, mapped: only what is read comes into memory.

    Args:
        path: The file.
        trust: Unpickle any object.

    Raises:
        DamagedCheckpointError: It cannot be read, or is no checkpoint.
        UntrustedCheckpointError: It holds objects that only ``trust`` allows.
    """

    def __init__(self, path: Path, trust: bool) -> None:
        content = load_archive(place_for(path), str(path), trust, mmap=True)
        if not isinstance(content, Mapping) or MODEL not in content:
            raise DamagedCheckpointError(f"{path} holds no checkpoint of Lightning: there is no {MODEL!r} in it")
        self._rest = {str(key): value for key, value in content.items() if key not in (MODEL, OPTIMIZERS)}
        leaves = dict(leaves_of({key: content[key] for key in (MODEL, OPTIMIZERS) if key in content}))
        self._tensors: dict[Way, torch.Tensor] = {way: value for way, value in leaves.items() if is_plain(value)}
        self._values = {way: value for way, value in leaves.items() if way not in self._tensors}
        self.tensors: dict[Way, TensorEntry] = {
            way: TensorEntry(tuple(value.shape), value.dtype) for way, value in self._tensors.items()
        }

    @property
    def others(self) -> list[Way]:
        """See :class:`Contents`."""
        return list(self._values)

    def values(self, trust: bool) -> dict[Way, Any]:
        """See :class:`Contents`."""
        return self._values

    def rest(self, trust: bool) -> dict[str, Any]:
        """See :class:`Contents`."""
        return self._rest

    def read(self, way: Way) -> torch.Tensor:
        """See :class:`Contents`."""
        return self._tensors[way]

    def finish(self) -> None:
        """Nothing is left to compare: the file was checked as a whole before it was mapped."""


def is_plain(value: Any) -> bool:
    """Whether it is a tensor whose data is one row of numbers: not sparse, quantized or of a class of its own."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_quantized
    )


def leaves_of(value: Any, way: Way = ()) -> Iterator[tuple[Way, Any]]:
    """What is at the ends of nested dictionaries and lists; empty ones are ends too."""
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list, torch.Tensor)) for item in value):
        items = enumerate(value)
    if not items:
        yield way, value
    for key, item in items:
        yield from leaves_of(item, (*way, key))


def nested(leaves: Mapping[Way, Any]) -> dict[str, Any]:
    """The opposite of :func:`leaves_of`: what has the keys 0, 1, 2, ... is a list, but for optimizer states."""
    root: dict[Any, Any] = {}
    for way, value in leaves.items():
        branch = root
        for key in way[:-1]:
            branch = branch.setdefault(key, _Branch())
        branch[way[-1]] = value
    return {key: _listed(value, (key,)) for key, value in root.items()}


class _Branch(dict[Any, Any]):
    """Made on the way to a leaf, unlike a dictionary that is one."""


def _listed(value: Any, way: Way) -> Any:
    if not isinstance(value, _Branch):
        return value
    made = {key: _listed(item, (*way, key)) for key, item in value.items()}
    by_parameter = len(way) == 3 and way[0] == OPTIMIZERS and way[2] == "state"
    is_list = not by_parameter and all(isinstance(key, int) for key in made) and set(made) == set(range(len(made)))
    return [made[key] for key in range(len(made))] if is_list else made
