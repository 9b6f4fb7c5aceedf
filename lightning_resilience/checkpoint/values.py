"""Values of a state that are not tensors, as the archives in which they lie in a checkpoint."""

from __future__ import annotations

from typing import Any

from lightning_resilience.checkpoint.envelope import archive

_REMEMBERED = 1000


def archived(value: Any) -> bytes:
    """``archive(value)``, remembered for values that cannot change; NumPy's scalars as Python's own."""
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, (bool, int, float, str, type(None))):
        return _remembered(type(value), repr(value), value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return _remembered(list, "\0".join(value), value)
    return archive(value)


_memory: dict[tuple[type, str], bytes] = {}


def _remembered(kind: type, text: str, value: object) -> bytes:
    key = (kind, text)
    if key not in _memory:
        if len(_memory) > _REMEMBERED:
            _memory.clear()
        _memory[key] = archive(value)
    return _memory[key]
