"""A callback that makes planned faults happen, in hooks of Lightning and of torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_resilience.faults.plan import Place, Plan, PlannedFault


class PlannedError(RuntimeError):
    """The exception of a planned fault."""


class FaultInjector(L.Callback):
    """Give it to all ranks; it acts on those that the plan names.

    Args:
        faults: What is to happen.
        tell: Called with each fault right before it happens, on its rank.
    """

    def __init__(
        self, faults: Iterable[PlannedFault], tell: Callable[[PlannedFault], None] = lambda fault: None
    ) -> None:
        self._plan = Plan(faults)
        self._tell = tell
        self._watched: set[int] = set()
        self._group: dist.ProcessGroup | None = None

    def pass_by(self, trainer: L.Trainer, place: Place) -> None:
        """For places in the user's own code, which callbacks do not see.

        Raises:
            PlannedError: That is what was planned.
        """
        self._pass(trainer, place)

    def _pass(self, trainer: L.Trainer, place: Place) -> None:
        fault = self._plan.due(place, trainer.global_step, trainer.global_rank)
        if fault is not None:
            self._tell(fault)
            if fault.kind == "skip":
                self._wait_without(fault.rank, trainer.global_rank)
            else:
                strike(fault)

    def _wait_without(self, absent: int, rank: int) -> None:
        """In a group of its own: in one that has other uses the barrier would meet another collective."""
        if rank != absent:
            dist.barrier(self._group)

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._pass(trainer, "setup")

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pass(trainer, "fit_start")

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._watch(trainer, pl_module)
        if self._group is None and self._plan.includes("skip"):
            self._group = dist.new_group()
        self._pass(trainer, "train_start")

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pass(trainer, "epoch_start")

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._pass(trainer, "batch_start")

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        loss.register_hook(lambda gradient: self._pass(trainer, "backward"))  # type: ignore[no-untyped-call]  # torch

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._pass(trainer, "before_update")

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._pass(trainer, "batch_end")

    @override
    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._pass(trainer, "sanity_check" if trainer.sanity_checking else "validation")

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pass(trainer, "sanity_check_end" if trainer.sanity_checking else "validation_end")

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Any) -> None:
        self._pass(trainer, "save")

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pass(trainer, "epoch_end")

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pass(trainer, "train_end")

    def on_restart(self, trainer: L.Trainer, pl_module: L.LightningModule, incident: object) -> None:
        """Called after each restart."""
        self._pass(trainer, "restart")

    def _watch(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Forward is watched in the middle of the model, updates in the optimizers."""
        if id(module) in self._watched:
            return
        self._watched.add(id(module))
        last = [child for child in module.modules() if isinstance(child, nn.Linear)][-1]
        last.register_forward_pre_hook(lambda *_: self._in_training(trainer, "forward"))
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(lambda *_: self._pass(trainer, "update"))

    def _in_training(self, trainer: L.Trainer, place: Place) -> None:
        if trainer.training:
            self._pass(trainer, place)


def strike(fault: PlannedFault) -> None:
    """Let a fault happen to this process.

    Raises:
        PlannedError: That is the fault.
    """
    if fault.kind == "raise":
        raise PlannedError(fault.message)
    if fault.kind == "hang":
        while True:
            time.sleep(3600)
    if fault.kind == "hold":
        ctypes.PyDLL(None).sleep(3600)  # unlike CDLL it keeps the lock
    if fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "interrupt":
        raise KeyboardInterrupt
    if fault.kind == "terminate":  # it is the handler's to say what comes of it
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        return
    sys.exit(3)
