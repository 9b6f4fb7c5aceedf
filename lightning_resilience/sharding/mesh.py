"""The device mesh: which ranks hold replicas, which hold shards, which compute one layer together.

`plan_mesh` decides the sizes and touches nothing; `build_meshes` makes the process groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_resilience._torch import split_mesh
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


def options_with_fewer(options: ShardingOptions, *, before: int, now: int, num_nodes: int) -> ShardingOptions:
    """The options with a mesh for fewer ranks: as many shards as before, and replicas as there are ranks for.

    Args:
        options: That `before` ranks train with.
        before: Number of ranks.
        now: How many there will be.
        num_nodes: Of the job as it was started.

    Raises:
        ConfigurationError: The ranks cannot be divided so.
    """
    if options.sharding_strategy == "HYBRID_SHARD":
        shards = plan_mesh(options, world_size=before, num_nodes=num_nodes).shards
        if now % shards:
            raise ConfigurationError(
                f"HYBRID_SHARD with {shards} shards a replica needs a multiple of {shards} ranks, and {now} are left."
            )
        options = replace(options, device_mesh=(now // shards, shards))
    plan_mesh(options, world_size=now, num_nodes=num_nodes)
    return options


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """`job` has all ranks, under Lightning's names; `sharding` is the part that `fully_shard` works on."""

    job: DeviceMesh
    sharding: DeviceMesh


def build_meshes(plan: MeshPlan, device_type: str) -> Meshes:
    """Make the process groups of a plan. Collective: every rank of the job takes part."""
    sizes = ((plan.replicas or 1) * plan.shards, plan.tensor_parallel)
    job = init_device_mesh(device_type, sizes, mesh_dim_names=(DATA_PARALLEL, TENSOR_PARALLEL))
    if plan.replicas is None:
        return Meshes(job=job, sharding=job[DATA_PARALLEL])
    split = split_mesh(job, 0, (plan.replicas, plan.shards), (_REPLICATE, _SHARD))
    return Meshes(job=job, sharding=split[_REPLICATE, _SHARD])
