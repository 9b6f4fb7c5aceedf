"""`load_weights`: the weights of a checkpoint, or some of them, into a module that is sharded or not."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.nn import Module

from lightning_resilience.checkpoint.restore import Target, restore
from lightning_resilience.checkpoint.state import model_state
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.errors import ConfigurationError, MismatchedCheckpointError
from lightning_resilience.sharding.shard import reshard_all


class LoadedWeights(NamedTuple):
    """What `load_weights` did.

    Attributes:
        path: The checkpoint that was used.
        loaded: Names of the module's parameters and buffers that have values of the checkpoint now.
        missing: Those that were asked for and are not in the checkpoint; they are as they were.
        unused: What the checkpoint has besides, under its own names.
    """

    path: str
    loaded: list[str]
    missing: list[str]
    unused: list[str]


def load_weights(
    module: Module,
    path: str | os.PathLike[str],
    *,
    only: str | Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    trust: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadedWeights:
    """Load the weights of a checkpoint into a module, in place, and verify every byte that is read.

    For evaluating outside a Trainer and as a start of fine-tuning; to go on with a run, use
    ``trainer.fit(ckpt_path=...)``. Each rank calls it and reads just what it holds, without communication. A sharded
    model is filled when it is sharded: in ``on_fit_start`` or later. Before ``fit`` a module that is not sharded yet,
    in ``configure_model`` or ``__init__``, works as well.

    Args:
        module: Any module, a LightningModule or a part of one.
        path: A checkpoint of any kind that can be resumed from, whole or with weights only; a directory of checkpoints
            means the newest. May be a URL.
        only: Names of the module's entries to load, with ``*`` and ``?`` as in file names; all by default. The others
            stay as they are: ``only="backbone.*"``.
        rename: Beginnings of names, in the module and in the checkpoint: ``{"backbone.": "model.encoder."}`` loads
            ``backbone.0.weight`` from what was saved as ``model.encoder.0.weight``.
        strict: Refuse a checkpoint that lacks something that was asked for and, unless ``only`` or ``rename`` is given,
            one that has more.
        trust: Unpickle any object, follow any link. It can run any code: only for checkpoints you trust.
        storage_options: For the file system of a URL.

    Returns:
        What was loaded, and what was not.

    Raises:
        ConfigurationError: The module has parameters without memory, or ``only`` matches nothing.
        MismatchedCheckpointError: Names or shapes do not fit.
        DamagedCheckpointError: The checkpoint is damaged; what was touched of the module is NaN then.
        UntrustedCheckpointError: It holds what only ``trust`` allows.
        LoadError: There is no checkpoint.
    """
    reshard_all(module)
    names = _names(module, only, rename or {})
    partial = only is not None or bool(rename)
    target = Target(module, strict=strict, trust=trust, name_of=names.get, partial=partial)
    restored = restore(place_for(path, storage_options), target, fall_back=False)
    if not restored.loaded:
        raise MismatchedCheckpointError(
            f"the checkpoint {restored.place} has nothing under the names that {type(module).__name__} asks for:"
            f" {', '.join(list(names.values())[:4])}, ... Does `rename` say what the names begin with there?"
        )
    return LoadedWeights(
        str(restored.place), sorted(restored.loaded), sorted(names.keys() - restored.loaded), sorted(restored.unused)
    )


def _names(module: Module, only: str | Sequence[str] | None, rename: Mapping[str, str]) -> dict[str, str]:
    """The module's entries that are asked for, with their names in the checkpoint."""
    state = model_state(module)
    patterns = ["*"] if only is None else [only] if isinstance(only, str) else list(only)
    names = {name: _renamed(name, rename) for name in state if any(fnmatch.fnmatchcase(name, p) for p in patterns)}
    if not names:
        raise ConfigurationError(f"load_weights(only={only!r}) matches nothing in {type(module).__name__}")
    empty = [name for name in names if getattr(state[name], "is_meta", False)]
    if empty:
        raise ConfigurationError(
            f"load_weights: {empty[0]} and {len(empty) - 1} more of {type(module).__name__} are on the meta device and"
            " have no memory yet. Load them later, in `on_fit_start`, when the strategy has allocated them."
        )
    return names


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    for ours, theirs in sorted(rename.items(), key=lambda item: -len(item[0])):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name
