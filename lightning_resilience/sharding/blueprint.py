"""Remember how a tree of modules is put together, and put it together like that again, in place.

Of each module its class and its attributes are kept, of the dictionaries among these the contents. So sharding, wrapped
forwards, hooks and modules that were added or replaced vanish, while the objects stay the same. Values of tensors are
not copied: memory that a tensor had is held until the blueprint is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from lightning_resilience._torch import forget_composed, gradient_hooks, is_composed, set_gradient_hooks


class _Plan(NamedTuple):
    module: Module
    kind: type[Module]
    composed: bool
    attributes: dict[str, Any]
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]]


class _Memory(NamedTuple):
    tensor: Tensor
    data: Tensor
    attributes: dict[str, Any]
    hooks: dict[int, Any] | None


class Blueprint:
    """Of a model as it is now.

    Args:
        model: The tree.
        with_memory: Whether tensors get back the memory they have now. Leave it out for what is sharded: FSDP2 says
            which memory its parameters have.
    """

    def __init__(self, model: Module, *, with_memory: bool) -> None:
        self._plans = [_plan(module) for module in model.modules()]
        self._memory = [_memory(tensor) for tensor in _tensors(model)] if with_memory else []

    def put_back(self) -> None:
        """Let the modules be as they were. Local."""
        for plan in self._plans:
            if not plan.composed:
                forget_composed(plan.module)
            plan.module.__class__ = plan.kind
            for table, content in plan.tables:
                table.clear()
                table.update(content)
            own = vars(plan.module)
            own.clear()
            own.update(plan.attributes)
        for tensor, data, attributes, hooks in self._memory:
            tensor.data = data
            tensor.__dict__.clear()
            tensor.__dict__.update(attributes)
            set_gradient_hooks(tensor, hooks)


def _plan(module: Module) -> _Plan:
    own = dict(vars(module))
    tables = [(value, dict(value)) for value in own.values() if type(value) in (dict, OrderedDict)]
    return _Plan(module, type(module), is_composed(module), own, tables)


def _memory(tensor: Tensor) -> _Memory:
    hooks = gradient_hooks(tensor)
    return _Memory(tensor, tensor.data, dict(tensor.__dict__), None if hooks is None else dict(hooks))


def _tensors(model: Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
