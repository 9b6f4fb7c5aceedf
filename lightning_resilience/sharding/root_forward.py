"""Run steps of an FSDP root as if they were its forward.

FSDP2 gathers the parameters of a module in a hook before `forward` and reduces its gradients in hooks after it.
A training step is a method of its own, so it is run in the place of `forward`. Two things need care:

* With manual optimization, backward and optimizer steps happen *inside* the step. FSDP2 then learns of the
  backward from us, the root stays gathered until the step ends, and is gathered anew after each update.
* A step usually calls `self(batch)`. FSDP2's hooks are off for it, or they would end the outer forward early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, Parameter

from lightning_resilience._torch import (
    forward_hooks_suspended,
    gathered_pairs,
    has_unreduced_gradients,
    pre_backward_hook,
)
from lightning_resilience.errors import ShardingError
from lightning_resilience.sharding.shard import reshard_all

_T = TypeVar("_T")


class RootForward:
    """Steps of one model. Owned by the strategy, used by the thread that trains."""

    def __init__(self) -> None:
        self._running: FSDPModule | None = None
        self._untracked: list[Parameter] = []

    def run(self, root: Module, step: Callable[[], _T]) -> _T:
        """Run `step` with the parameters of `root` gathered.

        The arguments of the step do not pass through FSDP2, which would copy, move and cast them.
        """
        assert isinstance(root, FSDPModule)

        def forward() -> _T:
            with forward_hooks_suspended(root):
                return step()

        with self._inside(root), _forward_replaced(root, forward):
            result: _T = root("step")  # torch 2.11 on CUDA fails in a root called without any argument
        return result

    def reset(self) -> None:
        """Forget a step that was interrupted."""
        self._running, self._untracked = None, []

    def before_backward(self, loss: Tensor) -> None:
        """Tell FSDP2 of a backward inside a step: only outputs of a finished forward would tell it.

        Parameters that `toggle_optimizer` has turned off in the meantime get no gradient. It turns off the
        sharded ones, which the optimizer knows; the gathered ones took part in the forward.
        """
        if self._running is None:
            return
        self._untracked = [
            gathered
            for sharded, gathered in gathered_pairs(self._running)
            if gathered.requires_grad and not sharded.requires_grad
        ]
        for gathered in self._untracked:
            gathered.requires_grad_(False)
        if loss.requires_grad:
            loss.register_hook(pre_backward_hook(self._running))  # type: ignore[no-untyped-call]  # torch

    def after_backward(self) -> None:
        """Let the next forward in the same step track all parameters again."""
        for gathered in self._untracked:
            gathered.requires_grad_(True)
        self._untracked = []

    def before_optimizer_step(self) -> None:
        """Refuse an update inside a step that would miss gradients.

        Raises:
            ShardingError: The backward did not go through the strategy.
        """
        if self._running is not None and has_unreduced_gradients(self._running):
            raise ShardingError(
                "An optimizer steps although gradients were not averaged over the ranks. In training_step, "
                "call self.manual_backward(loss) instead of loss.backward()."
            )

    def after_optimizer_step(self, model: Module) -> None:
        """Forget gathered copies of the old values; inside a step gather the new ones."""
        tracked = [] if self._running is None else _requires_grad(self._running)
        reshard_all(model)
        if self._running is not None:
            self._running.unshard()
        for gathered, flag in tracked:  # gathering takes the flag of the sharded parameter
            gathered.requires_grad_(flag)

    @contextmanager
    def _inside(self, root: FSDPModule) -> Iterator[None]:
        self._running = root
        root.set_reshard_after_backward(False, recurse=False)
        try:
            yield
        finally:
            root.set_reshard_after_backward(True, recurse=False)
            self._running, self._untracked = None, []


def _requires_grad(module: FSDPModule) -> list[tuple[Parameter, bool]]:
    return [(gathered, gathered.requires_grad) for _, gathered in gathered_pairs(module)]


@contextmanager
def _forward_replaced(module: Module, forward: Callable[[], object]) -> Iterator[None]:
    """Answer the next call of `module` by `forward`, later ones as before.

    The attribute is put back whatever happens, also when a hook before `forward` raises.
    """
    own = module.__dict__.get("forward")

    def put_back() -> None:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.__dict__["forward"] = own

    def once(*_: object) -> object:
        put_back()
        return forward()

    module.__dict__["forward"] = once
    try:
        yield
    finally:
        put_back()
