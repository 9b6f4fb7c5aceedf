"""One plain file out of a checkpoint, tensor by tensor: a ``.ckpt`` for Lightning and torch, or ``.safetensors``.

Never more than one tensor is in memory. The file appears under its name when every byte of the checkpoint has been
verified and every byte of the file is durable.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from lightning_resilience._torch import hollow
from lightning_resilience.checkpoint.contents import MODEL, OPTIMIZERS, Contents, TensorEntry, Way, is_plain, nested
from lightning_resilience.checkpoint.envelope import Recorder, without_crc
from lightning_resilience.checkpoint.manifest import seal_tail
from lightning_resilience.errors import ConfigurationError, MismatchedCheckpointError, SaveError

_COMMENT_LENGTH = 2  # the last bytes of a zip archive; the seal takes their place
_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}

Advance = Callable[[int], None]
"""Told how many bytes more have been written."""


def selected(contents: Contents, prefix: str, *, optimizers: bool) -> dict[Way, tuple[Way, TensorEntry]]:
    """The tensors to write: new way to old way and what it is.

    Args:
        contents: Of the checkpoint.
        prefix: Only what is below this name in the model, and without it.
        optimizers: Take the state of the optimizers too.

    Raises:
        MismatchedCheckpointError: There is nothing of that name.
    """
    found: dict[Way, tuple[Way, TensorEntry]] = {}
    for way, entry in contents.tensors.items():
        if way[0] == MODEL and str(way[1]).startswith(prefix):
            found[(MODEL, str(way[1]).removeprefix(prefix))] = way, entry
        elif way[0] == OPTIMIZERS and optimizers:
            found[way] = way, entry
    if not any(way[0] == MODEL for way in found):
        names = sorted({str(way[1]).partition(".")[0] + "." for way in contents.tensors if way[0] == MODEL})
        raise MismatchedCheckpointError(
            f"no tensor of the model has a name that starts with {prefix!r}; these are there: {', '.join(names)}"
        )
    return found


def bytes_to_write(tensors: Mapping[Way, tuple[Way, TensorEntry]]) -> int:
    """About the size of the file."""
    return sum(entry.nbytes for _, entry in tensors.values())


def write_safetensors(
    target: Path, contents: Contents, prefix: str = "", *, force: bool = False, advance: Advance = lambda count: None
) -> None:
    """Write the model's tensors as one file that ``safetensors`` and ``transformers`` read.

    The format: https://github.com/huggingface/safetensors#format

    Raises:
        ConfigurationError: The file exists and ``force`` does not allow to replace it.
        MismatchedCheckpointError: There is no tensor of that prefix, or one of a dtype that the format does not know.
        DamagedCheckpointError: The checkpoint does not hold what was written.
    """
    tensors = selected(contents, prefix, optimizers=False)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for way, (_, entry) in tensors.items():
        name, dtype = str(way[1]), str(entry.dtype).removeprefix("torch.")
        if dtype not in _SAFETENSORS:
            raise MismatchedCheckpointError(f"safetensors has no dtype {dtype} ({name}): write a .ckpt file")
        offsets = [end, end + entry.nbytes]
        header[name] = {"dtype": _SAFETENSORS[dtype], "shape": list(entry.shape), "data_offsets": offsets}
        end += entry.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with appearing(target, 8 + len(encoded) + end, force=force) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for old, entry in tensors.values():
            file.write(_data(contents, old, entry))
            advance(entry.nbytes)
        contents.finish()


def write_checkpoint(
    target: Path,
    contents: Contents,
    prefix: str = "",
    *,
    weights_only: bool = False,
    trust: bool = False,
    step: int = 0,
    created_ns: int = 0,
    force: bool = False,
    advance: Advance = lambda count: None,
) -> None:
    """Write one file as stock Lightning writes it, sealed with its checksum.

    Args:
        target: The file.
        contents: Of the checkpoint.
        prefix: See :func:`selected`.
        weights_only: Leave out optimizers, schedulers and callbacks.
        trust: Unpickle any object.
        step: Optimizer steps done, for the seal.
        created_ns: When the checkpoint was committed, for the seal: a copy beside newer ones must not be the newest.
        force: Replace an existing file.
        advance: Told of the progress.

    Raises:
        ConfigurationError: The file exists.
        MismatchedCheckpointError: There is no tensor of that prefix.
        UntrustedCheckpointError: The checkpoint holds objects that only ``trust`` allows.
        DamagedCheckpointError: The checkpoint does not hold what was written.
    """
    tensors = selected(contents, prefix, optimizers=not weights_only)
    rest = contents.rest(trust)
    if weights_only:
        rest = {key: value for key, value in rest.items() if key not in ("callbacks", "lr_schedulers")}
    values: dict[Way, Any] = {way: entry for way, (_, entry) in tensors.items()}
    for way, value in contents.values(trust).items():
        if way[0] == MODEL and str(way[1]).startswith(prefix):
            values[(MODEL, str(way[1]).removeprefix(prefix))] = value
        elif way[0] == OPTIMIZERS and not weights_only:
            values[way] = value
    content = {**rest, **nested(values)}
    if OPTIMIZERS in content:
        content[OPTIMIZERS] = [numbered(state) for state in content[OPTIMIZERS]]
    where = {id(entry): old for old, entry in tensors.values()}
    parts, leaves = _archive_around(content)
    size = sum(map(len, parts)) + sum(leaf.nbytes for leaf in leaves)
    with appearing(target, size, force=force) as file:
        digest = xxhash.xxh3_64()
        for part, leaf in zip(parts, [*leaves, None], strict=True):
            body = part if leaf is not None else part[:-_COMMENT_LENGTH]
            digest.update(body)
            file.write(body)
            if leaf is not None:
                data = _data(contents, where[id(leaf)], leaf) if isinstance(leaf, TensorEntry) else _bytes_of(leaf)
                digest.update(data)
                file.write(data)
                advance(len(data))
        contents.finish()
        just_before = max(0, created_ns - 1)  # beside its source the copy, which knows less, is never the newest
        file.write(seal_tail(size, step, just_before, digest.hexdigest()))


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by parameter name, as one by number, in the order of its groups, as torch writes it."""
    groups = [dict(group) for group in state.get("param_groups", [])]
    names = [name for group in groups for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    for group in groups:
        group["params"] = [number[name] for name in group["params"]]
    return {"state": {number[name]: value for name, value in state.get("state", {}).items()}, "param_groups": groups}


def _archive_around(content: Mapping[str, Any]) -> tuple[list[bytes], list[Any]]:
    """What ``torch.save`` writes around the data of the tensors, and the tensors in the order of their data.

    Raises:
        SaveError: A tensor is hidden in an object.
    """
    leaves: list[Any] = []
    hollow_content = _hollowed(content, leaves)
    recorder = Recorder()
    with torch.serialization.skip_data(materialize_fake_tensors=True), without_crc():
        torch.save(hollow_content, recorder)  # type: ignore[arg-type]  # writes and seeks is all it does
    filled = [leaf for leaf in leaves if leaf.nbytes]
    if [leaf.nbytes for leaf in filled] != recorder.holes:
        raise SaveError(
            "the checkpoint has tensors that cannot be copied one by one: sparse, quantized, or inside of objects that"
            " are not dictionaries or lists. Write .safetensors, which takes the others"
        )
    return recorder.parts, filled


def _hollowed(value: Any, leaves: list[Any]) -> Any:
    """The same structure with tensors that have no memory, each of its own; in the order in which pickle walks."""
    if isinstance(value, TensorEntry) or is_plain(value):
        leaves.append(value)
        return hollow(value.shape, value.dtype)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _hollowed(item, leaves)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_hollowed(item, leaves) for item in value)
    return value


def _data(contents: Contents, way: Way, entry: TensorEntry) -> memoryview:
    tensor = contents.read(way)
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
        raise MismatchedCheckpointError(f"{way} is {tuple(tensor.shape)} {tensor.dtype} instead of {entry}")
    return _bytes_of(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


@contextlib.contextmanager
def appearing(target: Path, size: int, *, force: bool) -> Iterator[BinaryIO]:
    """A new file that gets its name, durably, when the block ends well, and leaves nothing otherwise.

    Raises:
        ConfigurationError: It exists and ``force`` does not allow to replace it.
        OSError: There is no room for ``size`` bytes.
    """
    if target.is_dir():
        raise ConfigurationError(f"{target} is a directory: name the file to write")
    if target.exists() and not force:
        raise ConfigurationError(f"{target} exists: pass --force to replace it")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.draft")
    try:
        with open(draft, "xb") as file:
            _reserve(file.fileno(), max(1, size))
            yield file
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _reserve(fd: int, size: int) -> None:
    """Fail for want of room before an hour of copying rather than after."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
