"""Every private name of torch that this package relies on, each with its version and its reason.

A test in ``tests/unit/test_private_names*.py`` fails when one of them moves.
"""

from __future__ import annotations

import pathlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _composable_state, distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.serialization import _get_layout
from torch.utils import _pytree
from torch.utils.data import _utils

_T = TypeVar("_T")

_MOMENT_S = 0.2

# --- checkpoint format -------------------------------------------------------------------------------------


def sharding_spec(tensor: DTensor) -> Hashable:
    """Shape, dtype, placements and mesh of ``tensor``, as one value that knows its hash.

    ``DTensor._spec`` (torch 2.0 on). Asking for the four separately takes ten times as long, at every save.
    """
    return tensor._spec


def local_chunk(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and shape of the piece of ``tensor`` that this rank holds.

    ``DTensor.__create_chunk_list__`` is the hook that torch.distributed.checkpoint itself asks (torch 2.4 on);
    it is not documented outside its docstring. It takes a tenth of a millisecond, so answers are remembered: a
    model has few different specs.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    spec = sharding_spec(tensor)
    if spec not in _chunks:
        if len(_chunks) > 4096:
            _chunks.clear()
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        _chunks[spec] = tuple(chunk.offsets), tuple(chunk.sizes)
    return _chunks[spec]


_chunks: dict[Hashable, tuple[tuple[int, ...], tuple[int, ...]]] = {}


def replica_coordinates(tensor: DTensor) -> list[tuple[int, int]] | None:
    """For each mesh dimension over which ``tensor`` is replicated: this rank's coordinate and the size.

    None when this rank is not part of the mesh. Public API only; here because it belongs to ``local_chunk``.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    return [
        (coordinate[dim], tensor.device_mesh.size(dim))
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    ]


def storage_info(file: str, start: int, length: int) -> Any:
    """The value type of ``Metadata.storage_data`` that ``FileSystemReader`` understands.

    ``torch.distributed.checkpoint.filesystem._StorageInfo`` (torch 2.2 on) is pickled into every ``.metadata``
    file, so its name cannot move without breaking stock checkpoints too.
    """
    return _StorageInfo(file, start, length)


def foreach_copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool) -> None:
    """Copy many tensors with one call into C++.

    ``torch._foreach_copy_`` (torch 2.1 on) is what torch's own optimizers and FSDP2 use; there is no public name.
    """
    if destinations:
        torch._foreach_copy_(list(destinations), list(sources), non_blocking=non_blocking)


def hollow(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory that ``torch.save`` can write under ``skip_data(materialize_fake_tensors=True)``.

    ``FakeTensorMode`` (torch 2.0 on) is what the documentation of ``torch.serialization.skip_data`` tells to use; its
    module has a private name.
    """
    with FakeTensorMode():
        return torch.empty(tuple(shape), dtype=dtype)


def cuda_in_use() -> bool:
    """Whether this process has a CUDA context; asking does not make one. Public, but without types."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def memory_of_batches(model: Module | None, optimizers: Sequence[Any], device: torch.device) -> int:
    """Bytes in use on a CUDA device by all but what is there to stay: gradients and the state of optimizers."""
    kept = tensors_in([dict(optimizer.state) for optimizer in optimizers])
    gradients = [p.grad for p in (model.parameters() if model is not None else ()) if p.grad is not None]
    local = (t.to_local() if isinstance(t, DTensor) else t for t in (*kept, *gradients))
    steady = sum(t.numel() * t.element_size() for t in local if t.device == device)
    return torch.cuda.memory_allocated(device) - steady


def nvml_index(device: torch.device) -> int:
    """The number that the driver gives to a device, which `CUDA_VISIBLE_DEVICES` does not change.

    `torch.cuda._get_nvml_device_index` (torch 2.0 on) is what `torch.cuda.temperature` and its like use.
    """
    return int(torch.cuda._get_nvml_device_index(device))


def pin(memory: torch.Tensor) -> bool:
    """Tell CUDA that host memory stays where it is, so that copies from the device need no detour; True if it does.

    ``torch.cuda.cudart()`` (torch 1.8 on) is documented, the functions of the module it returns are not.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0


def unpin(memory: torch.Tensor) -> None:
    """Take back :func:`pin`."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(memory.data_ptr())


METADATA_CLASSES: dict[tuple[str, str], Any] = {
    (cls.__module__, cls.__name__): cls
    for cls in (
        _StorageInfo,
        _MEM_FORMAT_ENCODING,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        torch.Size,
        OrderedDict,
        pathlib.PosixPath,
    )
} | {("torch.serialization", "_get_layout"): _get_layout, ("pathlib._local", "PosixPath"): pathlib.PosixPath}
"""All that a ``.metadata`` file may refer to; enums and layouts are pickled by private names (torch 2.4 on)."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is nothing but its elements in memory: not sparse, nested or quantized.

    Public API only, but without types; every part that moves the bytes of a tensor asks this first.
    """
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in place, also between compressed sparse tensors with different numbers of elements.

    Public API only; ``copy_`` refuses those, and assigning ``.data`` leaves them silently as they were.
    """
    with torch.no_grad():
        if target.layout in _COMPRESSED:
            target.resize_as_sparse_(source)
        target.copy_(source)


# --- sharding ----------------------------------------------------------------------------------------------


def parameter_groups(module: FSDPModule) -> list[Any]:
    """The communication groups of one `fully_shard` call.

    torch keeps them in `FSDPState._fsdp_param_groups`; in 2.11 there was one, `_fsdp_param_group`, or none.
    """
    state = module._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def sharded_parameters(module: Module) -> set[Parameter]:
    """The sharded parameters FSDP2 looks after, also while their gathered copies are registered."""
    return {
        fsdp_param.sharded_param
        for submodule in module.modules()
        if isinstance(submodule, FSDPModule)
        for group in parameter_groups(submodule)
        for fsdp_param in group.fsdp_params
    }


def gathered_pairs(module: FSDPModule) -> list[tuple[Parameter, Parameter]]:
    """The sharded parameters of `module` (not of its children) with their gathered copies.

    The copies exist from the first all-gather on.
    """
    return [
        (fsdp_param.sharded_param, fsdp_param._unsharded_param)
        for group in parameter_groups(module)
        for fsdp_param in group.fsdp_params
        if hasattr(fsdp_param, "_unsharded_param")
    ]


def take_apart(module: FSDPModule) -> None:
    """Undo `fully_shard` for `module` (not its children), so that it can be called again; shards stay where they are.

    torch has no way back. What `fully_shard` leaves at a module: a class of its own in front of the module's
    (`_orig_cls_mro_index`: torch 2.13), its state in two tables, and hooks, for which it keeps the handles.
    """
    state = module._get_fsdp_state()
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in parameter_groups(module):
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [fsdp_param._post_load_hook_handle for fsdp_param in group.fsdp_params]
    for handle in handles:
        handle.remove()
    own: Any = module
    forget_composed(own)
    for table in (own.__dict__.get(STATE_KEY, {}), own.__dict__.get(REGISTRY_KEY, {})):
        for key in [key for key in table if getattr(key, "__name__", key) == fully_shard.__name__]:
            del table[key]
    own.__class__ = type(module).__mro__[getattr(type(module), "_orig_cls_mro_index", 2)]


def put_back_shards(module: FSDPModule) -> None:
    """Register the sharded parameters of `module` (not of its children) again.

    `FSDPModule.reshard` does the same but ignores the call between a module's pre- and post-forward hook.
    """
    for group in parameter_groups(module):
        group._to_sharded()


def is_gathered(module: FSDPModule) -> bool:
    """Whether a parameter of `module` is registered as its gathered copy now."""
    return any(not group.is_sharded for group in parameter_groups(module))


def has_unreduced_gradients(module: FSDPModule) -> bool:
    """Whether gradients sit in gathered copies although FSDP2 was asked to reduce them."""
    reducing = all(group.reduce_grads for group in parameter_groups(module))
    return reducing and any(gathered.grad is not None for _, gathered in gathered_pairs(module))


def forget_interrupted_batch(model: Module) -> None:
    """Bring FSDP2 to where it is before a forward, whatever it was doing. Local; parameters keep their values.

    `FSDPModule.reset_iter_state` (torch 2.13) does much of this, but waits for collectives that never end; in earlier
    versions there is nothing. Gradients that were not applied yet are dropped.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        _reset(state, _IDLE_STATE)
        _reset(state._state_ctx, _IDLE_CONTEXT)
        _reset(state._comm_ctx, _IDLE_COMMUNICATION)
        for name in ("_modules_to_run_forward",):
            getattr(state, name).clear()
        for group in parameter_groups(module):
            _reset(group, _IDLE_GROUP)
            group._post_forward_indices.clear()
            for fsdp_param in group.fsdp_params:
                fsdp_param.unsharded_accumulated_grad = None
                if hasattr(fsdp_param, "_unsharded_param"):
                    fsdp_param._unsharded_param.grad = None
            group._to_sharded()
        module.set_requires_gradient_sync(True, recurse=False)
        module.set_is_last_backward(True)
        module.set_reshard_after_backward(True, recurse=False)


def _reset(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(owner, name):
            setattr(owner, name, type(value)() if isinstance(value, (list, dict)) else value)


_IDLE_STATE: dict[str, Any] = {"_training_state": TrainingState.IDLE}
_IDLE_CONTEXT: dict[str, Any] = {"iter_forward_root": None, "post_backward_final_callback_queued": False}
_IDLE_COMMUNICATION: dict[str, Any] = {
    "all_gather_state": None,
    "reduce_scatter_state": None,  # until torch 2.12
    "reduce_scatter_states": [],
    "_last_post_reduce_events": {},
    "post_forward_order": [],
}
_IDLE_GROUP: dict[str, Any] = {
    "_training_state": TrainingState.IDLE,
    "_all_gather_result": None,
    "_post_reduce_event": None,
    "_reshard_after_forward_event": None,
    "_partial_reduce_output": None,
    "_all_reduce_state": None,
}


def is_composed(module: Module) -> bool:
    """Whether `fully_shard` and its like keep something about `module` outside of it.

    `_composable_state._module_state_mapping` (torch 2.1 on): what is in it cannot be sharded again.
    """
    return module in _composable_state._module_state_mapping


def forget_composed(module: Module) -> None:
    """Undo that."""
    _composable_state._module_state_mapping.pop(module, None)


def gradient_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """What `register_post_accumulate_grad_hook` has added; `Tensor._post_accumulate_grad_hooks` (torch 2.1 on)."""
    hooks: dict[int, Any] | None = tensor._post_accumulate_grad_hooks
    return hooks


def set_gradient_hooks(tensor: Tensor, hooks: dict[int, Any] | None) -> None:
    """Replace them; None for none."""
    tensor._post_accumulate_grad_hooks = hooks  # type: ignore[assignment]  # declared by what it returns


@contextmanager
def forward_hooks_suspended(module: FSDPModule) -> Iterator[None]:
    """Let calls of `module` run its plain forward: FSDP2's own hooks are off, all others stay.

    `FSDPState` keeps the handles of its two hooks; a handle knows its key in the module's dictionaries of hooks.
    """
    tables = _hook_tables(module)
    taken = [(table, key, first, table.pop(key)) for table, key, first in tables if key in table]
    try:
        yield
    finally:
        for table, key, first, hook in taken:
            table[key] = hook
            if first:  # FSDP2 gathers parameters before any other hook runs
                table.move_to_end(key, last=False)


def _hook_tables(module: Any) -> list[tuple[OrderedDict[int, Any], int, bool]]:
    state = module._get_fsdp_state()
    before, after = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
    return [
        (module._forward_pre_hooks, before, True),
        (module._forward_pre_hooks_with_kwargs, before, True),
        (module._forward_hooks, after, False),
    ]


def pre_backward_hook(module: FSDPModule) -> Callable[[Tensor], Tensor]:
    """What FSDP2 hangs on outputs of `module`: it gathers parameters and queues the gradient reduction."""
    hook: Callable[[Tensor], Tensor] = module._get_fsdp_state()._pre_backward
    return hook


def split_mesh(mesh: DeviceMesh, dim: int, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The same ranks with dimension `dim` cut into several, over new process groups.

    Described in torch's documentation of `DeviceMesh`, but the method still carries an underscore.
    """
    return mesh._unflatten(dim, sizes, names)


@contextmanager
def workers_end_quickly() -> Iterator[None]:
    """Workers of data loaders that are given up in here get a moment to end by themselves before SIGTERM.

    Otherwise it is five seconds (`torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL`, torch 1.0 on), one after the
    other, for each that hangs. Nothing else asks for the name while a loader is used: all others have copied it.
    """
    before = _utils.MP_STATUS_CHECK_INTERVAL
    _utils.MP_STATUS_CHECK_INTERVAL = min(before, _MOMENT_S)
    try:
        yield
    finally:
        _utils.MP_STATUS_CHECK_INTERVAL = before


def map_tensors(function: Callable[[Tensor], Tensor], tree: _T) -> _T:
    """Apply `function` to every tensor in nested containers. torch 2.11 has no public module for it."""
    mapped: _T = _pytree.tree_map_only(Tensor, function, tree)
    return mapped


def tensors_in(tree: object) -> list[Tensor]:
    """All tensors in nested containers; the same module, for the same reason."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


# --- exceptions on some ranks ------------------------------------------------------------------------------


def own_store(prefix: str, timeout_s: float) -> Store:
    """The store of the default process group under a prefix, through a connection of its own.

    Torch 2.13: `_get_default_store` is the only way to it; a client that waits keeps other threads from using it, and
    its time-out is everybody's, hence the `clone` (2.5 on).

    Args:
        prefix: Of all keys.
        timeout_s: How long an operation may take.
    """
    default: Any = distributed_c10d._get_default_store()
    store: Store = default.clone()
    store.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore(prefix, store)
