"""Remember plain values cheaply, so that they can be put back into the very objects that held them.

Numbers and strings are kept as they are. Of lists, dictionaries and sets the contents are kept, of tensors and modules
a copy; copies are shared between rememberings for as long as torch's version counter says that nothing was written.
Of a process group the name is kept: the group may have been made again since. Anything else is kept by reference only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_resilience._torch_groups import group_of_today

PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size))
"""Types of values that cannot change. Looked up by exact type: it is done some hundred times a step."""

PutBack = Callable[[], Any]
"""Puts a value back into its object and returns that object."""


Keeper: TypeAlias = "Callable[[Any, Copies], PutBack]"
"""Remembers a value of one kind."""


class Copies:
    """Copies of tensors. A copy lives as long as somebody asks for it at every round."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._now: dict[int, tuple[Tensor, int, Tensor]] = {}

    def of(self, tensor: Tensor) -> tuple[int, Tensor]:
        """The version of a tensor, and a copy of it at that version."""
        key = id(tensor)
        entry = self._now.get(key) or self._last.get(key)
        version = version_of(tensor)
        if entry is None or entry[0] is not tensor or entry[1] != version or version < 0:
            entry = (tensor, version, tensor.detach().clone())
        self._now[key] = entry
        return entry[1], entry[2]

    def next_round(self) -> None:
        """Forget what nobody has asked for since the last call."""
        self._last, self._now = self._now, {}


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; -1 if torch does not count."""
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode
        return -1


def keep(value: Any, copies: Copies) -> PutBack:
    """Remember `value` now."""
    keeper = _keeper_of(type(value))
    return (lambda: value) if keeper is None else keeper(value, copies)


def _keeper_of(kind: type) -> Keeper | None:
    """How values of a type are remembered; None if the reference is all."""
    if kind not in _KEEPERS:
        _KEEPERS[kind] = keep_tensor if issubclass(kind, Tensor) else None
        if issubclass(kind, nn.Module):
            _KEEPERS[kind] = _keep_module
        if issubclass(kind, dist.ProcessGroup):
            _KEEPERS[kind] = _keep_group
    return _KEEPERS[kind]


def keep_tensor(tensor: Tensor, copies: Copies, *, counted: bool = True) -> PutBack:
    """Remember the contents of a tensor.

    Args:
        tensor: May be written to later.
        copies: Where a copy comes from.
        counted: Whether torch counts what is written to it; kernels of batch normalization do not say that they write.
    """
    version, copy = copies.of(tensor) if counted else (-1, tensor.detach().clone())

    def put_back() -> Tensor:
        if version < 0 or version_of(tensor) != version:
            with torch.no_grad():
                tensor.copy_(copy)
        return tensor

    return put_back


def keep_dict(table: dict[Any, Any], copies: Copies, leave: Sequence[Any] = ()) -> PutBack:
    """Remember the contents of a dictionary, and of what is in it.

    Args:
        table: A dictionary, for instance an object's attributes.
        copies: Where copies of tensors come from.
        leave: Keys that are not touched.
    """
    kept = table.copy()
    for key in leave:
        kept.pop(key, None)
    entries = _entries(table, kept, copies)

    def put_back() -> dict[Any, Any]:
        for key in [key for key in table if key not in kept and key not in leave]:
            del table[key]
        return entries()

    return put_back


def keep_entries(table: dict[str, Any], names: Iterable[str], copies: Copies) -> PutBack:
    """Remember some entries of a dictionary, as far as they are there."""
    return _entries(table, {name: table[name] for name in names if name in table}, copies)


def _entries(table: dict[Any, Any], kept: dict[Any, Any], copies: Copies) -> Callable[[], dict[Any, Any]]:
    """Remember these entries of a dictionary; of some the reference is not all."""
    deep = [
        (key, keeper(value, copies))
        for key, value in kept.items()
        if type(value) not in PLAIN and (keeper := _keeper_of(type(value))) is not None
    ]

    def put_back() -> dict[Any, Any]:
        table.update(kept)
        for key, part in deep:
            table[key] = part()
        return table

    return put_back


def keep_uncounted(table: dict[str, Tensor | None]) -> PutBack:
    """Remember tensors that are written to without torch's counting it."""
    copies = Copies()
    parts = {
        name: (lambda: None) if tensor is None else keep_tensor(tensor, copies, counted=False)
        for name, tensor in table.items()
    }
    return lambda: table.update({name: part() for name, part in parts.items()})


def is_plain(value: Any) -> bool:
    """Whether `keep` remembers all of a value, rather than only which object it is."""
    if type(value) in (list, tuple, set):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, value.values()))
    return type(value) in PLAIN or isinstance(value, (Tensor, nn.Module))


def _keep_list(items: list[Any], copies: Copies) -> PutBack:
    parts = [keep(item, copies) for item in items]

    def put_back() -> list[Any]:
        items[:] = [part() for part in parts]
        return items

    return put_back


def _keep_set(items: set[Any], copies: Copies) -> PutBack:
    content = frozenset(items)

    def put_back() -> set[Any]:
        items.clear()
        items.update(content)
        return items

    return put_back


def _keep_tuple(items: tuple[Any, ...], copies: Copies) -> PutBack:
    if all(type(item) in PLAIN for item in items):
        return lambda: items
    parts = [keep(item, copies) for item in items]
    return lambda: _same_tuple(items, [part() for part in parts])


def _keep_module(module: nn.Module, copies: Copies) -> PutBack:
    parts = [keep_tensor(tensor, copies) for tensor in (*module.parameters(), *module.buffers())]

    def put_back() -> nn.Module:
        for part in parts:
            part()
        return module

    return put_back


def _keep_group(group: dist.ProcessGroup, copies: Copies) -> PutBack:
    return lambda: group_of_today(group)


def _same_tuple(original: Any, items: list[Any]) -> Any:
    """The tuple itself if its items are the ones it had, which they are unless it was made anew."""
    return original if all(a is b for a, b in zip(original, items, strict=True)) else tuple(items)


_KEEPERS: dict[type, Keeper | None] = {  # and every other type that was met: it is asked some hundred times a step
    list: _keep_list,
    dict: keep_dict,
    set: _keep_set,
    tuple: _keep_tuple,
}
