"""Putting a checkpoint back into a module and its optimizers, in place and piece by piece.

Loads what we write, what stock Lightning writes sharded (``ModelParallelStrategy``, ``FSDPStrategy``) and single
files (DDP, ``state_dict_type="full"``), into any number of ranks and any mesh. Everything is verified while it is
read, and read once: a damaged checkpoint shows when its bytes are in the module already, and then the one before it
overwrites them all.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_resilience._torch import overwrite
from lightning_resilience.checkpoint.agreement import together
from lightning_resilience.checkpoint.archives import load_archive
from lightning_resilience.checkpoint.candidates import META, RANK_FILE, Candidate
from lightning_resilience.checkpoint.exchange import Alone, Exchange
from lightning_resilience.checkpoint.files import CheckpointFiles
from lightning_resilience.checkpoint.layout import is_staged
from lightning_resilience.checkpoint.manifest import Manifest
from lightning_resilience.checkpoint.optimizers import (
    SavedOptimizer,
    apply_state,
    copy_piece,
    other_optimizer,
    some,
)
from lightning_resilience.checkpoint.reader import AtHand, PieceReader, ShardShelf, Shelf
from lightning_resilience.checkpoint.state import clean_name, model_state
from lightning_resilience.checkpoint.storage import Place
from lightning_resilience.checkpoint.verify import check_share, examined, first_usable
from lightning_resilience.errors import (
    LoadError,
    MismatchedCheckpointError,
    UntrustedCheckpointError,
    WeightsOnlyCheckpointError,
)

log = logging.getLogger(__name__)

_MODEL_KEYS = ("state_dict.", "model.")  # Lightning's name for FSDP2 and ours, and its name for FSDP1
OPTIMIZERS = "optimizer_states"
RANK_STATES = "lightning_resilience.rank_states"  # in a single file: the archived states of all ranks


@dataclass(frozen=True)
class Target:
    """What to restore into.

    Attributes:
        module: Sharded or not; filled in place.
        optimizers: In the order in which they were saved; empty to load weights only.
        strict: Refuse a checkpoint that has other names than the module.
        trust: Unpickle any object, follow any link.
        name_of: The name that an entry of the module has in the checkpoint; None for one that is to stay as it is.
        partial: The checkpoint may have more, even if strict.
    """

    module: nn.Module
    optimizers: Sequence[torch.optim.Optimizer] = ()
    strict: bool = True
    trust: bool = False
    name_of: Callable[[str], str | None] = field(default=lambda name: name)
    partial: bool = False


class Restored(NamedTuple):
    """What came out of a checkpoint.

    Attributes:
        place: The checkpoint.
        content: Everything but the model's state: Lightning's loops, callbacks, schedulers; ``optimizer_states`` if
            they were asked for, to be put in place with :meth:`apply_optimizers`.
        rank_state: What this rank, or the rank of this number, had saved for itself; of more ranks than there were,
            any. None where nothing was.
        loaded: Names of the module's entries that have their values from the checkpoint.
        unused: Names of the model's entries in the checkpoint that the module does not have.
    """

    place: Place
    content: dict[str, Any]
    rank_state: Any
    loaded: frozenset[str]
    unused: frozenset[str]


def apply_optimizers(
    target: Target, states: Sequence[Mapping[str, Any]], label: object, *, whole: bool = False
) -> None:
    """Put states that :func:`restore` or :func:`restore_pieces` has read into the optimizers.

    Args:
        target: Has the optimizers.
        states: ``optimizer_states`` of the content.
        label: What to call in errors where they come from.
        whole: Whether the tensors are those of all ranks together, as in a checkpoint that is one file.

    Raises:
        MismatchedCheckpointError: They belong to other optimizers.
    """
    for index, (optimizer, state) in enumerate(zip(target.optimizers, states, strict=True)):
        apply_state(target.module, optimizer, state, _label(label, index), whole=whole)


def restore_pieces(reader: PieceReader, label: object, target: Target) -> list[dict[str, Any]]:
    """Load a model from where its state is at hand.

    Args:
        reader: Has it in pieces.
        label: What to call that in errors.
        target: What to restore into.

    Returns:
        The states of the optimizers, to be put in place with :func:`apply_optimizers`.
    """
    shelf = AtHand(reader)
    load = PiecesLoad(shelf, label, target)
    shelf.fetch(Alone())
    return load.finish()


def restore(place: Place, target: Target, exchange: Exchange | None = None, *, fall_back: bool) -> Restored:
    """Load the checkpoint at ``place``, or the newest usable one before it. Called on all ranks.

    Model and values are in place then; the optimizers' state is put there by :func:`apply_optimizers`.

    Args:
        place: A checkpoint, or a directory of them; rank 0's counts.
        target: What to fill. After an error that comes when bytes were read, its numbers are NaN.
        exchange: How the ranks agree; alone by default.
        fall_back: Whether an earlier checkpoint may take the place of one that is damaged, or has weights only where
            optimizers are to be restored.

    Raises:
        MismatchedCheckpointError: It belongs to another model or optimizer.
        UntrustedCheckpointError: It holds what only ``trust`` allows.
        DamagedCheckpointError: It is damaged and nothing else may be used.
        NoValidCheckpointError: None of them is valid.
        LoadError: There is none.
    """
    exchange = exchange or Alone()
    with _spoiled_on_error() as touched:
        return first_usable(
            place, exchange, lambda one: _restore_one(one, target, exchange, touched), fall_back=fall_back
        )


@contextmanager
def _spoiled_on_error() -> Iterator[dict[str, torch.Tensor]]:
    """What a failed load has touched is made useless, lest somebody goes on with half a checkpoint."""
    touched: dict[str, torch.Tensor] = {}
    try:
        yield touched
    except BaseException:
        with torch.no_grad():
            for tensor in touched.values():
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.fill_(float("nan"))
        raise


def _restore_one(place: Place, target: Target, exchange: Exchange, touched: dict[str, torch.Tensor]) -> Restored:
    candidate = together(exchange, lambda: examined(place))
    load = _restore_file if together(exchange, place.is_file) else _restore_sharded
    restored = load(candidate, target, exchange, touched)
    if stale := sorted(touched.keys() - restored.loaded):
        raise LoadError(
            f"a damaged checkpoint was half loaded, and {place}, which should replace it, lacks{some('', stale)} Load"
            " that checkpoint by itself, or none."
        )
    return restored


# --- a directory of shards ---------------------------------------------------------------------------------


def _restore_sharded(
    candidate: Candidate, target: Target, exchange: Exchange, touched: dict[str, torch.Tensor]
) -> Restored:
    small, reader, load = together(exchange, lambda: _begin(candidate, target, exchange.rank))
    touched.update(load.tensors)
    reader.fetch(exchange)
    states = together(exchange, load.finish)
    content = {**small.content, OPTIMIZERS: states} if target.optimizers else small.content
    return Restored(candidate.place, content, small.rank_state, frozenset(load.saved), load.unused)


def _begin(candidate: Candidate, target: Target, rank: int) -> tuple[_Small, ShardShelf, PiecesLoad]:
    """All that is small, and what there is to be read."""
    manifest = candidate.proof if isinstance(candidate.proof, Manifest) else None
    files = CheckpointFiles(candidate.folder, manifest, target.trust)
    reader = ShardShelf(files)
    try:
        load = PiecesLoad(reader, candidate.place, target)
    except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
        raise LoadError(f"there is no room in memory for what {candidate.place} says it has: {error}") from error
    return _Small.read(files, target.trust, rank), reader, load


class _Small(NamedTuple):
    """The small files of a checkpoint."""

    content: dict[str, Any]
    rank_state: Any

    @staticmethod
    def read(files: CheckpointFiles, trust: bool, rank: int) -> _Small:
        def load(name: str) -> Any:
            return load_archive(io.BytesIO(files.read(name)), str(files.place / name), trust)

        content = load(META)
        if not isinstance(content, dict):
            raise UntrustedCheckpointError(f"{files.place / META} is not what Lightning writes")
        own, any_other = RANK_FILE.format(rank), RANK_FILE.format(0)
        has_any = files.has(any_other)
        return _Small(content, load(own if files.has(own) else any_other) if has_any else None)


class PiecesLoad:
    """A state in pieces on its way into a target: says what it needs, and puts it together when it is there.

    Args:
        shelf: Where it comes from.
        label: What to call that in errors.
        target: Where it goes.

    Raises:
        MismatchedCheckpointError: It is the state of another model; nothing has been touched.
    """

    def __init__(self, shelf: Shelf, label: object, target: Target) -> None:
        self._shelf, self._target = shelf, target
        self._optimizers = [
            SavedOptimizer(shelf, index, target.module, target.trust) for index in range(len(target.optimizers))
        ]
        _check_optimizers(label, [optimizer.is_there for optimizer in self._optimizers])
        state = model_state(target.module)
        prefix = next((key for key in _MODEL_KEYS if any(name.startswith(key) for name in shelf.names)), "\0")
        flat = {clean_name(name.removeprefix(prefix)): name for name in shelf.names if name.startswith(prefix)}
        self.saved, self.unused = _match(label, target, state, flat)
        self.tensors = {name: state[name] for name in self.saved if is_staged(state[name])}
        self._rooms: dict[str, torch.Tensor] = {}
        shapes = {name: (shelf.tensor_shape(self.saved[name]), tensor) for name, tensor in self.tensors.items()}
        _check_shapes(label, shapes)
        for name, flat_name in self.saved.items():
            if name in self.tensors:
                shelf.want(flat_name, self.tensors[name])
            else:
                self._want_other(name, flat_name)

    def finish(self) -> list[dict[str, Any]]:
        """After the fetch; gives the states of the optimizers."""
        values = [name for name in self.saved if name not in self.tensors and name not in self._rooms]
        others = {name: self._shelf.value(self.saved[name], self._target.trust) for name in values}
        _load_through_module(self._target.module, self.tensors, others | self._rooms)
        return [optimizer.state() for optimizer in self._optimizers]

    def _want_other(self, name: str, flat_name: str) -> None:
        """What cannot be copied into: a value, or a tensor to be given to the module."""
        if self._shelf.tensor_shape(flat_name) is None:
            self._shelf.want_value(flat_name)
            return
        shape, dtype = self._shelf.room_for(flat_name)
        self._rooms[name] = torch.empty(shape, dtype=dtype)
        self._shelf.want(flat_name, self._rooms[name])


def _match(
    label: object, target: Target, state: Mapping[str, Any], saved: Mapping[str, Any]
) -> tuple[dict[str, Any], frozenset[str]]:
    """For each entry of the module that is loaded, what it is in the checkpoint; and what nobody asked for."""
    wanted = {name: target.name_of(name) for name in state}
    names = {name: other for name, other in wanted.items() if other is not None}
    unused = frozenset(saved) - set(names.values())
    missing = sorted(set(names.values()) - set(saved))
    if target.strict and (missing or (unused and not target.partial)):
        raise MismatchedCheckpointError(
            f"the checkpoint {label} belongs to another model.{some('Missing in it', missing)}"
            f"{some('Unknown to the model', sorted(unused))} Use the same model, or start this one in another"
            " directory; `strict_loading = False` on the LightningModule loads what fits."
        )
    return {name: saved[other] for name, other in names.items() if other in saved}, unused


def _check_optimizers(label: object, there: Sequence[bool]) -> None:
    if there and not any(there):
        raise weights_only_error(label)
    for index, is_there in enumerate(there):
        if not is_there:
            raise other_optimizer(_label(label, index), "the checkpoint has no state for it")


def weights_only_error(label: object) -> WeightsOnlyCheckpointError:
    """The error for a checkpoint from which training shall go on and cannot."""
    return WeightsOnlyCheckpointError(
        f"the checkpoint {label} has weights only (save_weights_only=True), so training cannot go on from it. Start a"
        " new run from its weights: `lightning_resilience.load_weights(model, path)`, and `fit` without `ckpt_path`."
    )


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


# --- one file ----------------------------------------------------------------------------------------------


def _restore_file(
    candidate: Candidate, target: Target, exchange: Exchange, touched: dict[str, torch.Tensor]
) -> Restored:
    """Verified by one rank before the others look at it; its pages are in memory then."""
    together(exchange, lambda: check_share(candidate, exchange.rank, exchange.world_size, target.trust))
    return together(exchange, lambda: _read_file(candidate.place, target, exchange.rank, touched))


def _read_file(place: Place, target: Target, rank: int, touched: dict[str, torch.Tensor]) -> Restored:
    content: dict[str, Any] = load_archive(place, str(place), target.trust, mmap=True)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), Mapping):
        raise MismatchedCheckpointError(f"{place} is not a Lightning checkpoint: it has no 'state_dict'")
    states = content.pop(OPTIMIZERS, [])
    _check_optimizers(place, [index < len(states) for index in range(len(target.optimizers))])
    if target.optimizers:
        content[OPTIMIZERS] = states[: len(target.optimizers)]
    ranks: list[bytes] | None = content.pop(RANK_STATES, None)
    rank_state = None
    if ranks:
        label = f"{place} (state of rank {rank})"
        rank_state = load_archive(io.BytesIO(ranks[rank % len(ranks)]), label, target.trust)
    loaded, unused = _load_file_model(place, content.pop("state_dict"), target, touched)
    return Restored(place, content, rank_state, loaded, unused)


def _load_file_model(
    label: object, saved: Mapping[str, Any], target: Target, touched: dict[str, torch.Tensor]
) -> tuple[frozenset[str], frozenset[str]]:
    state = model_state(target.module)
    found, unused = _match(label, target, state, {clean_name(name): value for name, value in saved.items()})
    tensors = {name: state[name] for name in found if is_staged(state[name])}
    _check_shapes(
        label, {name: (tuple(getattr(found[name], "shape", ("none",))), tensor) for name, tensor in tensors.items()}
    )
    touched.update(tensors)
    for name, tensor in tensors.items():
        copy_piece(tensor, found[name])
    others = {name: value for name, value in found.items() if name not in tensors}
    _load_through_module(target.module, tensors, others)
    return frozenset(found), unused


# --- what both share ---------------------------------------------------------------------------------------


def _check_shapes(label: object, pairs: Mapping[str, tuple[tuple[Any, ...] | None, torch.Tensor]]) -> None:
    wrong = [
        f"{name} {shape} instead of {tuple(tensor.shape)}"
        for name, (shape, tensor) in pairs.items()
        if shape != tuple(tensor.shape)
    ]
    if wrong:
        raise MismatchedCheckpointError(
            f"the checkpoint {label} belongs to another model.{some('Other shapes in it', wrong)} Use the"
            " hyper-parameters it was trained with."
        )


def _label(place: object, index: int) -> str:
    return f"the checkpoint {place}, optimizer {index},"
