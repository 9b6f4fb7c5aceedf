"""The state of a module and its optimizers, by name and without a copy.

The names are those of ``torch.distributed.checkpoint.state_dict``. Unlike that module, nothing here runs an
optimizer step to find out what its state would look like (pytorch#164929), gathers anything or copies anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_resilience.checkpoint.layout import is_staged
from lightning_resilience.errors import ConfigurationError

_ENVELOPE = 2048  # about what an archive adds to the data of a tensor
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    """The name without what ``torch.compile``, activation checkpointing and FSDP insert."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_state(module: nn.Module) -> dict[str, Any]:
    """References to everything in ``module.state_dict()``; its FSDP2 modules must be sharded."""
    return {clean_name(name): value for name, value in module.state_dict().items()}


def parameter_names(module: nn.Module) -> dict[torch.Tensor, str]:
    """Name of each parameter; of a tied one the first."""
    names: dict[torch.Tensor, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, clean_name(name))
    return names


def group_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Names of the parameters of each parameter group.

    Raises:
        ConfigurationError: The optimizer holds a parameter that the module does not have.
    """
    names = parameter_names(module)
    try:
        return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    except KeyError:
        raise ConfigurationError(
            f"{type(optimizer).__name__} holds a parameter that is not in the module, so it has no name in a"
            " checkpoint. Create the optimizer in `configure_optimizers` from `self.parameters()`."
        ) from None


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """References to the optimizer's state by parameter name; ``state`` is empty before the first step."""
    groups = group_names(module, optimizer)
    state: dict[str, Any] = {}
    for names, group in zip(groups, optimizer.param_groups, strict=True):
        for name, parameter in zip(names, group["params"], strict=True):
            if parameter in optimizer.state:
                state[name] = dict(optimizer.state[parameter])
    return {
        "state": state,
        "param_groups": [
            {**group, "params": names} for names, group in zip(groups, optimizer.param_groups, strict=True)
        ],
    }


def by_number(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """An optimizer state by parameter name, as one by the parameter's place in ``module.parameters()``.

    Those are the numbers that stock Lightning writes; ``torch.optim.Optimizer.load_state_dict`` takes any.
    """
    number = {name: index for index, name in enumerate(parameter_names(module).values())}
    return {
        "state": {number[name]: value for name, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def expected_bytes(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """About how many bytes this rank will stage: its shards, and optimizer state that may not exist yet."""
    total = sum(_staged_bytes(value) for value in model_state(module).values())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            copies = _state_copies(group)
            for parameter in group["params"]:
                state: Mapping[str, Any] = optimizer.state.get(parameter, {})
                have = sum(_staged_bytes(value) for value in state.values())
                total += have or copies * _staged_bytes(parameter) + _ENVELOPE
    return total


def _staged_bytes(value: Any) -> int:
    return local_bytes(value) + _ENVELOPE


def local_bytes(value: Any) -> int:
    """Bytes of the piece of a tensor that this rank holds; 0 for what is pickled instead of copied."""
    if not is_staged(value):
        return 0
    with torch.no_grad():
        local = value.to_local() if hasattr(value, "to_local") else value
    return local.numel() * local.element_size()


def _state_copies(group: Mapping[str, Any]) -> int:
    """How many tensors of a parameter's size its optimizer will keep, told by the options it has."""
    if "betas" in group:
        return 3 if group.get("amsgrad") else 2
    if "momentum" in group:
        return 1 if group["momentum"] else 0
    return 2
