"""Going on with fewer ranks: all of a strategy that depends on how many there are."""

from __future__ import annotations

import logging

from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_resilience import _lightning, _torch_groups
from lightning_resilience._torch_groups import Store
from lightning_resilience.checkpoint_io import AsyncCheckpointIO
from lightning_resilience.process_wide import process_wide_moved
from lightning_resilience.restart.world import World, accumulation
from lightning_resilience.strategy_restarts import RestartingStrategy

log = logging.getLogger(__name__)


class FewerRanksStrategy(RestartingStrategy):
    """What ``ResilientFSDPStrategy`` does when a rank is out for good; called on all that go on."""

    _began_with: tuple[int, int, list[dict[int, int]]] | None = None  # ranks; batches that each accumulates

    def move(self, world: World, store: Store) -> None:
        """See :class:`lightning_resilience.restart.engine.Workload`."""
        plugin, loop = self.checkpoint_io, self._loop
        if isinstance(plugin, AsyncCheckpointIO):
            plugin.leave_world()
        if loop.commits is not None:
            loop.commits.abandon()
        self._begin_groups(world, store)
        process_wide_moved()
        self._exchange = self._make_exchange(world.size)
        if isinstance(plugin, AsyncCheckpointIO):
            plugin.join_world(self._exchange)
        self._shard_again(world)
        self._prepared = self._snapshots_prepared = False
        loop.deal_anew(world.before)
        self._keep_global_batch(world)
        if self.is_global_zero:
            gone = sorted(set(range(world.before)) - set(world.ranks))
            log.warning("%d of %d ranks go on, without rank %s", world.size, world.before, ", ".join(map(str, gone)))

    def _begin_groups(self, world: World, store: Store) -> None:
        assert self.cluster_environment is not None
        _torch_groups.begin_again(
            store,
            backend=self._get_process_group_backend(),
            rank=world.rank,
            size=world.size,
            timeout=self._timeout,
            device=self.root_device if self.root_device.type != "cpu" else None,
        )
        _lightning.renumber(self.cluster_environment, world.rank, world.size)

    def _shard_again(self, world: World) -> None:
        """Make meshes for these ranks and shard the model over them; optimizers get the new parameters, no state."""
        raise NotImplementedError

    def _keep_global_batch(self, world: World) -> None:
        trainer, policy = self._trainer, self.restart
        assert policy is not None
        if not policy.keep_global_batch or not self._module.automatic_optimization:
            if self.is_global_zero:
                log.warning("an optimizer step sees the samples of %d in place of %d ranks", world.size, world.before)
            return
        schedulers = _lightning.accumulation_schedulers(trainer)
        if self._began_with is None:
            by_epoch = [dict(scheduler.scheduling) for scheduler in schedulers]
            self._began_with = world.before, trainer.accumulate_grad_batches, by_epoch
        ranks, batches, by_epoch = self._began_with
        for scheduler, scheduled in zip(schedulers, by_epoch, strict=True):
            scheduler.scheduling = {
                epoch: accumulation(number, ranks, world.size)[0] for epoch, number in scheduled.items()
            }
            batches = scheduled[max(epoch for epoch in scheduled if epoch <= trainer.current_epoch)]
        trainer.accumulate_grad_batches, exact = accumulation(batches, ranks, world.size)
        if self.is_global_zero:
            log.warning(
                "each rank accumulates %d batches in place of %d, so an optimizer step sees %s samples as before",
                trainer.accumulate_grad_batches,
                batches,
                "as many" if exact else f"{trainer.accumulate_grad_batches * world.size}/{batches * ranks} of the",
            )


def follow(optimizer: Optimizer, replaced: dict[Parameter, Parameter]) -> None:
    """Let an optimizer update the parameters that took the places of its own; its state is void."""
    for group in optimizer.param_groups:
        group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    optimizer.state.clear()
