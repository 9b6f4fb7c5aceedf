"""The state of an optimizer out of a checkpoint, and into an optimizer: by name of the parameters, checked first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_resilience._torch import local_chunk
from lightning_resilience.checkpoint.reader import Shelf
from lightning_resilience.checkpoint.state import clean_name, group_names, parameter_names
from lightning_resilience.errors import MismatchedCheckpointError, UntrustedCheckpointError

_SHOWN = 8
_OF_SCHEDULERS = {
    "params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr",
}  # fmt: skip
"""Group options that no optimizer has by itself."""


class SavedOptimizer:
    """One optimizer's state on its way out of a sharded checkpoint.

    Args:
        reader: Reads the checkpoint.
        index: Which optimizer.
        module: Its parameters say how the state is sharded.
        trust: Unpickle any object.
    """

    def __init__(self, reader: Shelf, index: int, module: nn.Module, trust: bool) -> None:
        self._reader = reader
        self._trust = trust
        self._root = f"optimizer_{index}"
        self._tensors: dict[str, torch.Tensor] = {}
        self._values: set[str] = set()
        self._by_path = {reader.path_of(name): name for name in reader.names if name.startswith(f"{self._root}.")}
        parameters = {name: parameter for parameter, name in parameter_names(module).items()}
        for way, name in self._by_path.items():
            if _is_of(way, self._root, "param_groups"):
                self._want(name, None)
            elif _is_of(way, self._root, "state") and clean_name(str(way[2])) in parameters:
                self._want(name, parameters[clean_name(str(way[2]))])

    @property
    def is_there(self) -> bool:
        """Whether the checkpoint has anything of this optimizer."""
        return bool(self._by_path)

    def state(self) -> dict[str, Any]:
        """After the fetch: the state by parameter name, as ``optimizer_state`` gives it."""
        groups: dict[int, dict[str, Any]] = {}
        state: dict[str, dict[str, Any]] = {}
        for way, name in self._by_path.items():
            if _is_of(way, self._root, "param_groups"):
                groups.setdefault(int(way[2]), {})[str(way[3])] = self._got(name)
            elif name in self._tensors or name in self._values:
                entry: dict[Any, Any] = state.setdefault(clean_name(str(way[2])), {})
                for key in way[3:-1]:
                    entry = entry.setdefault(key, {})
                entry[way[-1]] = self._got(name)
        return {"state": state, "param_groups": [groups[index] for index in sorted(groups)]}

    def _want(self, name: str, like: torch.Tensor | None) -> None:
        if self._reader.tensor_shape(name) is None:
            self._reader.want_value(name)
            self._values.add(name)
            return
        shape, dtype = self._reader.room_for(name)
        self._tensors[name] = torch.empty(shape, dtype=dtype) if like is None else empty(shape, dtype, like)
        self._reader.want(name, self._tensors[name])

    def _got(self, name: str) -> Any:
        found = self._tensors.get(name)
        return self._reader.value(name, self._trust) if found is None else found


def _is_of(way: Sequence[str | int], root: str, part: str) -> bool:
    return len(way) >= 4 and way[:2] == (root, part)


def empty(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
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


def apply_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], label: str, *, whole: bool
) -> None:
    """Put a saved state into an optimizer.

    Args:
        module: The optimizer's parameters have their names from it.
        optimizer: Gets the state, through its own ``load_state_dict``, which knows where its tensors belong.
        saved: State and parameter groups; parameters by name, or numbered in the order of the groups.
        label: What to call checkpoint and optimizer in an error.
        whole: Whether the tensors are those of all ranks together, rather than what this rank holds.

    Raises:
        MismatchedCheckpointError: It is the state of other parameters, or of another kind of optimizer.
        UntrustedCheckpointError: It is not what an optimizer saves.
    """
    names = group_names(module, optimizer)
    groups = _groups_of(saved, label)
    _check_kind(optimizer, groups, label)
    key_of = _keys(groups, names, label)
    state: dict[str, dict[str, Any]] = {}
    for name, parameter in _parameters(names, optimizer).items():
        entries = saved["state"].get(key_of[name])
        if entries is not None:
            state[name] = {key: _cut(value, parameter, label) for key, value in entries.items()} if whole else entries
    index = {name: number for number, name in enumerate(_flat(names))}
    optimizer.load_state_dict(
        {
            "state": {index[name]: value for name, value in state.items()},
            "param_groups": [
                {**group, "params": [index[name] for name in ours]} for group, ours in zip(groups, names, strict=True)
            ],
        }
    )


def _groups_of(saved: Mapping[str, Any], label: str) -> list[dict[str, Any]]:
    try:
        groups = [dict(group) for group in saved["param_groups"]]
        if all(isinstance(group["params"], (list, tuple)) for group in groups) and isinstance(saved["state"], Mapping):
            return groups
    except (KeyError, TypeError, ValueError):
        pass
    raise UntrustedCheckpointError(f"{label}: that is not the state of an optimizer")


def _keys(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], label: str) -> dict[str, str | int]:
    """Under which key the state of each parameter was saved."""
    saved = [list(group["params"]) for group in groups]
    flat = [key for group in saved for key in group]
    if flat and isinstance(flat[0], str):
        _check_names(saved, names, label)
        return {clean_name(key): key for key in flat}
    sizes, ours = [len(group) for group in saved], [len(group) for group in names]
    if sizes != ours:
        raise other_optimizer(label, f"its groups have {sizes} parameters, yours have {ours}")
    return dict(zip(_flat(names), flat, strict=True))


def _check_names(saved: Sequence[Sequence[str]], names: Sequence[Sequence[str]], label: str) -> None:
    if [sorted(map(clean_name, group)) for group in saved] == [sorted(group) for group in names]:
        return
    here, there = set(_flat(names)), {clean_name(name) for name in _flat(saved)}
    raise other_optimizer(
        label,
        f"it has {len(saved)} parameter group(s), yours has {len(names)}."
        f"{some('Only in the checkpoint', sorted(there - here))}{some('Only in yours', sorted(here - there))}",
    )


def _check_kind(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], label: str) -> None:
    """Refuse the state of another kind of optimizer, which would fail in its first step or silently do nothing.

    Options tell kinds apart: each has some that the other lacks. If only one side has more, it is the same kind of
    another version.
    """
    ours, theirs = set(optimizer.defaults), set().union(*groups) - _OF_SCHEDULERS
    custom = set().union(*optimizer.param_groups) - ours  # options of the user's own
    missing, foreign = sorted(ours - theirs - _OF_SCHEDULERS), sorted(theirs - ours - custom)
    if missing and foreign:
        raise other_optimizer(
            label,
            f"it was saved by another kind of optimizer than {type(optimizer).__name__}: one with"
            f" {', '.join(foreign[:_SHOWN])} and without {', '.join(missing[:_SHOWN])}",
        )


def _cut(value: Any, parameter: torch.Tensor, label: str) -> Any:
    """What this rank holds of a whole tensor, in memory of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise UntrustedCheckpointError(f"{label}: a tensor of shape {tuple(value.shape)} is larger than its data")
    room = empty(tuple(value.shape), value.dtype, like=parameter)
    copy_piece(room, value)
    return room


def copy_piece(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy from a whole tensor the piece that this rank holds; of a mapped file only that piece is read."""
    with torch.no_grad():
        local = target.to_local() if isinstance(target, DTensor) else target
        offsets, shape = local_chunk(target)
        local.copy_(whole[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))])


def _parameters(names: Sequence[Sequence[str]], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for group, group_of_names in zip(optimizer.param_groups, names, strict=True):
        found.update(zip(group_of_names, group["params"], strict=True))
    return found


def _flat(names: Sequence[Sequence[str]]) -> Iterator[str]:
    for group in names:
        yield from group


def other_optimizer(label: str, why: str) -> MismatchedCheckpointError:
    """The error for a state that does not fit."""
    return MismatchedCheckpointError(
        f"{label} does not fit: {why}. Configure the optimizers as they were when it was saved, or load the weights"
        " only: `lightning_resilience.load_weights(model, path)`, and `fit` without `ckpt_path`."
    )


def some(label: str, items: Sequence[str]) -> str:
    """A few names for an error, or nothing."""
    if not items:
        return ""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f" {label}: {', '.join(items[:_SHOWN])}{more}."
