"""The device mesh: which ranks hold replicas, which hold shards, which compute one layer together.

`plan_mesh` decides the sizes and touches nothing; `build_mesh` makes the process groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_resilience._torch import flatten_mesh
from lightning_resilience.errors import ConfigurationError
from lightning_resilience.sharding.options import ShardingOptions

DATA_PARALLEL = "data_parallel"
TENSOR_PARALLEL = "tensor_parallel"
_REPLICATE = "replicate"
_SHARD = "shard"


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """Sizes of the device mesh. `replicas` is None when every data-parallel rank holds another shard."""

    replicas: int | None
    shards: int
    tensor_parallel: int


def plan_mesh(options: ShardingOptions, *, world_size: int, num_nodes: int) -> MeshPlan:
    """Divide the ranks among replicas, shards and tensor parallelism.

    Raises:
        ConfigurationError: The sizes asked for do not multiply to `world_size`.
    """
    tensor_parallel = options.tensor_parallel_size
    if world_size % tensor_parallel:
        raise ConfigurationError(
            f"tensor_parallel_size={tensor_parallel} does not divide the {world_size} processes of this job. "
            f"Change it or the number of devices."
        )
    data_parallel = world_size // tensor_parallel
    if options.sharding_strategy == "NO_SHARD":
        return MeshPlan(replicas=data_parallel, shards=1, tensor_parallel=tensor_parallel)
    if options.sharding_strategy != "HYBRID_SHARD":
        return MeshPlan(replicas=None, shards=data_parallel, tensor_parallel=tensor_parallel)
    replicas, shards = options.device_mesh or (num_nodes, data_parallel // num_nodes)
    if replicas * shards != data_parallel:
        raise ConfigurationError(
            f"device_mesh=({replicas}, {shards}) needs {replicas * shards} data-parallel processes, "
            f"this job has {data_parallel}. Pass device_mesh=(replicas, shards) whose product is {data_parallel}."
        )
    return MeshPlan(replicas=replicas, shards=shards, tensor_parallel=tensor_parallel)


def build_mesh(plan: MeshPlan, device_type: str) -> DeviceMesh:
    """The mesh of the whole job. It always answers to "data_parallel" and "tensor_parallel"."""
    if plan.replicas is None:
        names = (DATA_PARALLEL, TENSOR_PARALLEL)
        return init_device_mesh(device_type, (plan.shards, plan.tensor_parallel), mesh_dim_names=names)
    sizes = (plan.replicas, plan.shards, plan.tensor_parallel)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=(_REPLICATE, _SHARD, TENSOR_PARALLEL))
    flatten_mesh(mesh[_REPLICATE, _SHARD], DATA_PARALLEL)
    return mesh


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of a mesh from `build_mesh` that `fully_shard` works on."""
    hybrid = _REPLICATE in (mesh.mesh_dim_names or ())
    return mesh[_REPLICATE, _SHARD] if hybrid else mesh[DATA_PARALLEL]
