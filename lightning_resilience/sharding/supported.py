"""What FSDP2 cannot train: refused before anything is sharded, or explained where only torch can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.nn import Embedding, EmbeddingBag, Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_resilience._torch import is_dense
from lightning_resilience.errors import ShardingError

_SHOWN = 5


def check_supported(model: Module) -> None:
    """Look through a model before it is sharded.

    Raises:
        ShardingError: It holds parameters that cannot be sharded.
    """
    kind = type(model).__name__
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise ShardingError(
            f"{_some(lazy)} of {kind} have no shape yet, as their modules are lazy. Run one batch through the model"
            f" at the end of __init__ or in configure_model, or give the layers their sizes."
        )
    if odd := [name for name, parameter in model.named_parameters() if not is_dense(parameter)]:
        raise ShardingError(
            f"the parameters {_some(odd)} of {kind} are sparse or quantized, and FSDP2 shards dense ones. Keep them"
            f" as buffers, or make them dense."
        )
    if sparse := [name for name, module in model.named_modules() if _has_sparse_gradients(module)]:
        raise ShardingError(
            f"the embeddings {_some(sparse)} of {kind} were made with sparse=True, and FSDP2 reduces dense gradients."
            f" Leave sparse=True out, or freeze them."
        )


class Update:
    """The closure of one optimizer step; knows whether an error came from it or from the optimizer.

    Args:
        optimizer: Who steps.
        closure: Computes loss and gradients.
    """

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        self._optimizer = optimizer
        self._closure = closure
        self._in_closure = False

    def __call__(self) -> Any:
        """Run the closure."""
        self._in_closure = True
        result = self._closure()
        self._in_closure = False
        return result

    @contextmanager
    def errors_explained(self) -> Iterator[None]:
        """Around the step. torch's error about an operation says nothing of the optimizer that needs it.

        Raises:
            ShardingError: The optimizer's arithmetic is not defined for sharded parameters.
        """
        try:
            yield
        except RuntimeError as error:
            if self._in_closure or not any(word in str(error) for word in ("DTensor", "Sharding propagation")):
                raise
            raise ShardingError(
                f"{type(self._optimizer).__name__} cannot update sharded parameters: this version of torch does not"
                f" define what it computes with them ({str(error).splitlines()[0][:200]}). Use an optimizer that works"
                f" element by element, such as AdamW or SGD."
            ) from error


def _has_sparse_gradients(module: Module) -> bool:
    return isinstance(module, (Embedding, EmbeddingBag)) and module.sparse and module.weight.requires_grad


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
