"""Wrap policies: which modules of a model become units of their own.

A unit is gathered, computed and freed as one (sharding) or recomputed as one (activation checkpointing).
A policy is what users write; `select_modules` applies it to a model and knows what FSDP2 cannot wrap.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

from torch.nn import Module, ModuleDict, ModuleList, Parameter, Sequential

from lightning_resilience.errors import ConfigurationError, ShardingError

WrapPolicy: TypeAlias = set[type[Module]] | list[str] | Callable[..., bool] | Literal["auto"] | None
"""What users write: layer classes, their dotted names, a function, "auto", or None for no units at all."""


def check_policy(argument: str, policy: WrapPolicy) -> WrapPolicy:
    """Check a policy when it is given and replace dotted names by the classes they name.

    Raises:
        ConfigurationError: `policy` is none of the accepted kinds, or a name in it leads nowhere.
    """
    if policy is None or policy == "auto":
        return policy
    if isinstance(policy, (set, frozenset, list, tuple)):
        if not policy:
            raise ConfigurationError(f"{argument}={policy!r} names no class. Use None for no units, or name one.")
        return {_layer_class(argument, item) for item in policy}
    if callable(policy) and not isinstance(policy, type):
        return policy
    raise ConfigurationError(
        f'{argument}={policy!r} is not a wrap policy. Use "auto", None, a set of layer classes, a list of their '
        f"dotted names, or a function that takes a module and returns a bool."
    )


def select_modules(argument: str, policy: WrapPolicy, root: Module) -> list[Module]:
    """The modules below `root` that `policy` chooses, parents before their children.

    `torch.compile`d modules stand for the module inside them, and nothing inside them is chosen again.

    Args:
        argument: Name of the policy in error messages.
        policy: A checked policy, see `check_policy`.
        root: The model. It is never chosen itself.

    Raises:
        ShardingError: A set of classes matches nothing, or a chosen module has no `forward` to hook into.
    """
    if policy is None:
        return []
    chosen = set(_choose(policy, root))
    if not chosen and isinstance(policy, set):
        names = ", ".join(sorted(layer.__qualname__ for layer in policy))
        raise ShardingError(
            f"{argument} names {names}, but {type(root).__name__} has no such module. "
            f'Name classes that print(model) shows, or use "auto".'
        )
    for name, module in root.named_modules():
        if module in chosen and _is_plain_container(module):
            raise ShardingError(
                f"{argument} chooses {name!r}, a {type(module).__name__}. It has no forward of its own, so FSDP2 "
                f"cannot tell when to gather its parameters. Choose the modules inside it."
            )
    return [module for module in _outer_modules(root) if module in chosen]


def without_split_ties(modules: list[Module], root: Module) -> list[Module]:
    """Leave out modules that share a parameter with the world outside them.

    Were such a module a unit of its own, FSDP2 would make two parameters of the shared one. Left out, the
    parameter belongs to the next unit up that holds all of its users, the root at the latest.
    """
    owners = _owners_of_shared_parameters(root)
    kept = []
    for module in modules:
        inside = set(module.modules())
        split = (0 < len(users & inside) < len(users) for users in owners)
        if not any(split):
            kept.append(module)
    return kept


def _layer_class(argument: str, item: object) -> type[Module]:
    layer = _import(argument, item) if isinstance(item, str) else item
    if not (isinstance(layer, type) and issubclass(layer, Module)):
        raise ConfigurationError(f"{argument} holds {item!r}, which is not a class derived from torch.nn.Module.")
    return layer


def _import(argument: str, name: str) -> object:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"{argument} holds {name!r}, which cannot be imported ({error}). "
            f'Write the class as "package.module.ClassName".'
        ) from error


def _choose(policy: WrapPolicy, root: Module) -> Iterator[Module]:
    if policy == "auto":
        return _repeated_blocks(root)
    if isinstance(policy, set):
        classes = tuple(policy)
        return (module for module in _below(root) if isinstance(_uncompiled(module), classes))
    assert callable(policy)
    if "recurse" in _parameter_names(policy):
        return iter(_ask_recursively(policy, root))
    predicate: Callable[..., bool] = policy
    return (module for module in _below(root) if predicate(_uncompiled(module)))


def _repeated_blocks(module: Module) -> Iterator[Module]:
    """Outermost modules of a class that occurs more than once in the same ModuleList or Sequential."""
    blocks: set[Module] = set()
    if isinstance(module, (ModuleList, Sequential)):
        weighted = [child for child in module if next(child.parameters(), None) is not None]
        classes = Counter(type(_uncompiled(child)) for child in weighted)
        blocks = {child for child in weighted if classes[type(_uncompiled(child))] > 1}
        blocks -= {block for block in blocks if _is_plain_container(block)}
    yield from blocks
    for child in module.children():
        if child not in blocks:
            yield from _repeated_blocks(child)


def _ask_recursively(policy: Callable[..., bool], root: Module) -> list[Module]:
    """Apply a policy with the signature of `torch.distributed.fsdp.wrap`: (module, recurse, nonwrapped_numel)."""
    chosen: list[Module] = []

    def visit(module: Module) -> int:
        inner = _uncompiled(module)
        numel = sum(parameter.numel() for parameter in inner.parameters())
        if not policy(module=inner, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = sum(visit(child) for child in inner.children())
        if module is root or not policy(module=inner, recurse=False, nonwrapped_numel=numel - wrapped):
            return wrapped
        chosen.append(module)
        return numel

    visit(root)
    return chosen


def _parameter_names(function: Callable[..., bool]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a callable written in C says nothing about its arguments
        return set()


def _below(root: Module) -> Iterator[Module]:
    return (module for module in _outer_modules(root) if module is not root)


def _outer_modules(root: Module) -> Iterator[Module]:
    """All modules, parents first, but of a compiled pair only the outer one."""
    inner = {_uncompiled(module) for module in root.modules() if _uncompiled(module) is not module}
    return (module for module in root.modules() if module not in inner)


def _uncompiled(module: Module) -> Module:
    inner: Any = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, Module) else module


def _is_plain_container(module: Module) -> bool:
    return isinstance(module, (ModuleList, ModuleDict)) and type(module).forward is Module.forward


def _owners_of_shared_parameters(root: Module) -> list[set[Module]]:
    owners: dict[Parameter, set[Module]] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    return [users for users in owners.values() if len(users) > 1]
