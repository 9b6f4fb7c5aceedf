"""Putting a checkpoint back into a module and its optimizers, in place and piece by piece.

Loads what we write, what stock Lightning writes sharded (``ModelParallelStrategy``, ``FSDPStrategy``) and single
files (DDP, ``state_dict_type="full"``), into any world size. Every rank reads just the pieces it holds; there is
no collective here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_resilience._torch import local_chunk, overwrite
from lightning_resilience.checkpoint.candidates import META
from lightning_resilience.checkpoint.layout import is_staged
from lightning_resilience.checkpoint.manifest import files_of
from lightning_resilience.checkpoint.reader import PieceReader, ShardReader, load_archive
from lightning_resilience.checkpoint.state import clean_name, group_names, model_state
from lightning_resilience.checkpoint.storage import Place
from lightning_resilience.errors import MismatchedCheckpointError

_MODEL_KEYS = ("state_dict.", "model.")  # Lightning's name for FSDP2 and ours, and its name for FSDP1
_SHOWN = 8
_NO_STATE = "the checkpoint has no state for it (was it saved with save_weights_only=True?)"


@dataclass(frozen=True)
class Target:
    """What to restore into.

    Attributes:
        module: Sharded or not; filled in place.
        optimizers: In the order in which they were saved; empty to load weights only.
        strict: Refuse a checkpoint that has other names than the module.
        trust: Unpickle any object.
    """

    module: nn.Module
    optimizers: Sequence[torch.optim.Optimizer] = ()
    strict: bool = True
    trust: bool = False


def restore(path: Place, target: Target) -> dict[str, Any]:
    """Load the checkpoint at ``path``, a directory or a file.

    Returns:
        Everything in it but the model's and the optimizers' state: Lightning's loops, callbacks, schedulers.

    Raises:
        MismatchedCheckpointError: It belongs to another model or optimizer.
        UntrustedCheckpointError: It holds objects that only ``trust`` allows.
        DamagedCheckpointError: It cannot be read.
    """
    if path.is_dir():
        return _restore_sharded(path, target)
    return _restore_file(path, target)


# --- a directory of shards ---------------------------------------------------------------------------------


def _restore_sharded(path: Place, target: Target) -> dict[str, Any]:
    restore_pieces(ShardReader(path), path, target)
    meta = files_of(path) / META
    rest: dict[str, Any] = load_archive(meta, str(meta), target.trust)
    return rest


def restore_pieces(reader: PieceReader, path: Place, target: Target) -> None:
    """Load model and optimizers.

    Args:
        reader: Has their state in pieces.
        path: Where that lies, for errors.
        target: What to restore into.
    """
    _load_sharded_model(reader, path, target)
    for index, optimizer in enumerate(target.optimizers):
        _load_sharded_optimizer(reader, path, target, index, optimizer)


def _load_sharded_model(reader: PieceReader, path: Place, target: Target) -> None:
    prefix = next((key for key in _MODEL_KEYS if any(name.startswith(key) for name in reader.names)), "")
    flat = {name.removeprefix(prefix): name for name in reader.names if prefix and name.startswith(prefix)}
    wanted = model_state(target.module)
    if target.strict:
        _check_names(path, wanted.keys(), flat.keys(), "model")
    tensors = {name: value for name, value in wanted.items() if name in flat and is_staged(value)}
    _check_shapes(path, {name: (reader.tensor_shape(flat[name]), value) for name, value in tensors.items()})
    with torch.no_grad():
        reader.read_into({flat[name]: tensor for name, tensor in tensors.items()})
    values = [name for name in wanted if name in flat and name not in tensors]
    others = {name: _read_any(reader, flat[name], target.trust) for name in values}
    _load_through_module(target.module, tensors, others)


def _load_through_module(module: nn.Module, tensors: Mapping[str, torch.Tensor], others: dict[str, Any]) -> None:
    """What is neither parameter nor buffer (metric states, extra state) only the module can put back."""
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = {clean_name(name): buffer for name, buffer in module.named_buffers(remove_duplicate=False)}
    held = {clean_name(name) for name, _ in parameters} | buffers.keys()
    for name, tensor in tensors.items():
        if name not in held:
            others[name] = tensor
    for name in [name for name in others if name in buffers]:  # sparse ones cannot be copied into
        overwrite(buffers[name], others.pop(name))
    if others:
        original = {clean_name(name): name for name in module.state_dict()}
        module.load_state_dict({original[name]: value for name, value in others.items()}, strict=False)


def _load_sharded_optimizer(
    reader: PieceReader, path: Place, target: Target, index: int, optimizer: torch.optim.Optimizer
) -> None:
    root = f"optimizer_{index}"
    by_path = {reader.path_of(name): name for name in reader.names if name.startswith(f"{root}.")}
    if not by_path:
        raise _other_optimizer(path, index, _NO_STATE)
    groups = _read_groups(reader, by_path, root, target.trust)
    names = group_names(target.module, optimizer)
    _check_groups(path, index, [group["params"] for group in groups], names)
    state, tensors = _make_state(reader, by_path, root, _parameters(names, optimizer), target.trust)
    with torch.no_grad():
        reader.read_into(tensors)
    _load_optimizer(optimizer, names, state, groups)


def _read_groups(
    reader: PieceReader, by_path: Mapping[tuple[str | int, ...], str], root: str, trust: bool
) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for way, name in by_path.items():
        if way[:2] == (root, "param_groups") and len(way) > 3:  # no groups at all are one empty value
            index, key = int(way[2]), str(way[3])
            groups.setdefault(index, {})[key] = _read_any(reader, name, trust)
    return [groups[index] for index in sorted(groups)]


def _read_any(reader: PieceReader, name: str, trust: bool) -> Any:
    shape = reader.tensor_shape(name)
    if shape is None:
        return reader.value(name, trust)
    tensor = torch.empty(shape, dtype=reader.dtype(name))
    reader.read_into({name: tensor})
    return tensor


def _make_state(
    reader: PieceReader,
    by_path: Mapping[tuple[str | int, ...], str],
    root: str,
    parameters: Mapping[str, torch.Tensor],
    trust: bool,
) -> tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor]]:
    """State by parameter name with room for what is read next, and that room by flat name."""
    state: dict[str, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for way, name in by_path.items():
        if way[:2] != (root, "state") or len(way) < 4 or str(way[2]) not in parameters:
            continue
        shape = reader.tensor_shape(name)
        if shape is None:
            value = reader.value(name, trust)
        else:
            value = tensors[name] = _empty(shape, reader.dtype(name), like=parameters[str(way[2])])
        entry: dict[Any, Any] = state.setdefault(str(way[2]), {})
        for key in way[3:-1]:
            entry = entry.setdefault(key, {})
        entry[way[-1]] = value
    return state, tensors


def _empty(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Room for an optimizer's tensor: sharded as its parameter if it has the parameter's shape."""
    if not isinstance(like, DTensor):
        return torch.empty(shape, dtype=dtype, device=like.device if shape == tuple(like.shape) else "cpu")
    if shape != tuple(like.shape):
        return torch.empty(shape, dtype=dtype)
    with torch.no_grad():
        local = torch.empty_like(like.to_local(), dtype=dtype)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


# --- one file ----------------------------------------------------------------------------------------------


def _restore_file(path: Place, target: Target) -> dict[str, Any]:
    content: dict[str, Any] = load_archive(path, str(path), target.trust, mmap=True)
    if not isinstance(content, dict) or "state_dict" not in content:
        raise MismatchedCheckpointError(f"{path} is not a Lightning checkpoint: it has no 'state_dict'")
    _load_file_model(path, content.pop("state_dict"), target)
    states = content.pop("optimizer_states", [])
    for index, optimizer in enumerate(target.optimizers):
        if index >= len(states):
            raise _other_optimizer(path, index, _NO_STATE)
        _load_file_optimizer(path, states[index], target, index, optimizer)
    return content


def _load_file_model(path: Place, state: Mapping[str, Any], target: Target) -> None:
    saved = {clean_name(name): value for name, value in state.items()}
    wanted = model_state(target.module)
    if target.strict:
        _check_names(path, wanted.keys(), saved.keys(), "model")
    tensors = {name: value for name, value in wanted.items() if name in saved and is_staged(value)}
    _check_shapes(path, {name: (tuple(saved[name].shape), value) for name, value in tensors.items()})
    for name, tensor in tensors.items():
        _copy_piece(tensor, saved[name])
    others = {name: saved[name] for name in wanted if name in saved and name not in tensors}
    _load_through_module(target.module, tensors, others)


def _load_file_optimizer(
    path: Place, saved: Mapping[str, Any], target: Target, index: int, optimizer: torch.optim.Optimizer
) -> None:
    names = group_names(target.module, optimizer)
    saved_groups = [list(group["params"]) for group in saved["param_groups"]]
    flat = [name for group in names for name in group]
    keys = [key for group in saved_groups for key in group]
    if keys and isinstance(keys[0], str):
        _check_groups(path, index, saved_groups, names)
        key_of = {name: name for name in flat}
    else:
        _check_sizes_of_groups(path, index, saved_groups, names)
        key_of = dict(zip(flat, keys, strict=True))
    state = {}
    for name, parameter in _parameters(names, optimizer).items():
        if key_of[name] in saved["state"]:
            entries = saved["state"][key_of[name]].items()
            state[name] = {key: _piece_like(value, parameter) for key, value in entries}
    _load_optimizer(optimizer, names, state, saved["param_groups"])


def _piece_like(value: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    room = _empty(tuple(value.shape), value.dtype, like=parameter)
    _copy_piece(room, value)
    return room


def _copy_piece(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy from a whole tensor the piece that this rank holds; of a mapped file only that piece is read."""
    with torch.no_grad():
        local = target.to_local() if isinstance(target, DTensor) else target
        offsets, shape = local_chunk(target)
        piece = whole[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))]
        local.copy_(piece)


# --- what both share ---------------------------------------------------------------------------------------


def _parameters(names: Sequence[Sequence[str]], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for group, group_of_names in zip(optimizer.param_groups, names, strict=True):
        found.update(zip(group_of_names, group["params"], strict=True))
    return found


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    state: Mapping[str, dict[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Through the optimizer's own ``load_state_dict``, which knows where its tensors belong."""
    index = {name: number for number, name in enumerate(_flat(names))}
    optimizer.load_state_dict(
        {
            "state": {index[name]: value for name, value in state.items()},
            "param_groups": [
                {**saved, "params": [index[name] for name in group]} for saved, group in zip(groups, names, strict=True)
            ],
        }
    )


def _flat(names: Sequence[Sequence[str]]) -> Iterator[str]:
    for group in names:
        yield from group


def _check_names(path: Place, wanted: Any, saved: Any, what: str) -> None:
    missing, unexpected = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
    if missing or unexpected:
        raise MismatchedCheckpointError(
            f"the checkpoint {path} belongs to another {what}.{_some('Missing in it', missing)}"
            f"{_some('Unknown to the model', unexpected)} Use the same model, or start this one in another"
            " directory; `strict_loading = False` on the LightningModule loads what fits."
        )


def _check_shapes(path: Place, pairs: Mapping[str, tuple[tuple[int, ...] | None, torch.Tensor]]) -> None:
    wrong = [
        f"{name} {shape} instead of {tuple(tensor.shape)}"
        for name, (shape, tensor) in pairs.items()
        if shape != tuple(tensor.shape)
    ]
    if wrong:
        raise MismatchedCheckpointError(
            f"the checkpoint {path} belongs to another model.{_some('Other shapes in it', wrong)} Use the"
            " hyper-parameters it was trained with."
        )


def _check_groups(path: Place, index: int, saved: Sequence[Sequence[str]], names: Sequence[Sequence[str]]) -> None:
    if [sorted(map(clean_name, group)) for group in saved] == [sorted(group) for group in names]:
        return
    here, there = set(_flat(names)), {clean_name(name) for name in _flat(saved)}
    raise _other_optimizer(
        path,
        index,
        f"it has {len(saved)} parameter group(s), yours has {len(names)}."
        f"{_some('Only in the checkpoint', sorted(there - here))}{_some('Only in yours', sorted(here - there))}",
    )


def _check_sizes_of_groups(
    path: Place, index: int, saved: Sequence[Sequence[Any]], names: Sequence[Sequence[str]]
) -> None:
    sizes, ours = [len(group) for group in saved], [len(group) for group in names]
    if sizes != ours:
        raise _other_optimizer(path, index, f"its groups have {sizes} parameters, yours have {ours}")


def _other_optimizer(path: Place, index: int, why: str) -> MismatchedCheckpointError:
    return MismatchedCheckpointError(
        f"the checkpoint {path} does not fit optimizer {index}: {why}. Configure the optimizers as they were when"
        " it was saved, or load the weights only: `load_from_checkpoint`, or `fit` without `ckpt_path`."
    )


def _some(label: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f" {label}: {', '.join(items[:_SHOWN])}{more}."
