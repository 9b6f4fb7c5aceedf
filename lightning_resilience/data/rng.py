"""All random number generators of this process as one plain value, and back.

Covered: Python ``random``, NumPy's global generator (if NumPy is imported), torch on CPU, torch on the
current CUDA device (if CUDA is in use), and any ``torch.Generator`` that the caller names. The value holds only
tensors, numbers, strings, lists, tuples and dicts, so ``torch.load(weights_only=True)`` reads it back.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

RngState = dict[str, Any]


def capture_rng(generators: Sequence[torch.Generator] = ()) -> RngState:
    """The state of every random number generator of this process. Draws nothing from any of them.

    Args:
        generators: further generators to include, such as those that data loaders were given.
    """
    return _capture(generators, _numpy_state)


def capture_rng_live(generators: Sequence[torch.Generator] = ()) -> RngState:
    """The same as :func:`capture_rng`, much faster, for this process only: it holds what NumPy gives."""
    return _capture(generators, _numpy.state)


def _capture(generators: Sequence[torch.Generator], numpy_state: Callable[[], dict[str, Any]]) -> RngState:
    state: RngState = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "generators": [generator.get_state() for generator in generators],
    }
    if "numpy" in sys.modules:
        state["numpy"] = numpy_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: RngState, generators: Sequence[torch.Generator] = ()) -> None:
    """Put every generator back to where :func:`capture_rng` found it.

    Args:
        state: a value from :func:`capture_rng`, in this process or another one.
        generators: the counterparts of those given to :func:`capture_rng`, in the same order.
    """
    random.setstate(_python_state(state["python"]))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        _set_numpy_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    for generator, saved in zip(generators, state["generators"], strict=False):
        generator.set_state(saved.cpu())


def _python_state(state: Sequence[Any]) -> tuple[Any, ...]:
    version, words, gauss = state
    return (
        version,
        words if type(words) is tuple else tuple(words),
        gauss,
    )  # ``random`` insists on tuples; a loader may have made lists


class _NumpyMemory:
    """The state of NumPy's global generator, asked for (40 us) only when it is another than the last time.

    Where the words of the Mersenne twister and the position in them lie is told by ``BitGenerator.ctypes``, and to
    compare those takes 1 us. Beside them there may be a normal number that was drawn and not yet given out; while
    there is one, nothing is compared.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._address = 0
        self._seen = b""
        self._state: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """As of now; not to be changed."""
        seen = self._look()
        if not seen or seen != self._seen or self._state["has_gauss"]:
            import numpy as np

            self._state = dict(np.random.get_state(legacy=False))
            self._seen = seen if seen and seen == self._expected() else b""
        return self._state

    def _look(self) -> bytes:
        """The memory of the generator; nothing if it is not the Mersenne twister, or NumPy is older than 1.24."""
        from numpy import random

        generator = getattr(random, "get_bit_generator", lambda: None)()
        if generator is not self._generator:
            self._generator, self._address = generator, 0
            if isinstance(generator, random.MT19937):
                self._address = generator.ctypes.state_address
        return ctypes.string_at(self._address, _TWISTER_BYTES) if self._address else b""

    def _expected(self) -> bytes:
        """What the memory must be if we understand it."""
        inner = self._state["state"]
        return bytes(inner["key"].tobytes() + inner["pos"].to_bytes(4, sys.byteorder))


_TWISTER_BYTES = 625 * 4
_numpy = _NumpyMemory()


def _numpy_state() -> dict[str, Any]:
    import numpy as np

    saved: dict[str, Any] = dict(np.random.get_state(legacy=False))
    inner = saved["state"]
    if isinstance(inner.get("key"), np.ndarray):  # the Mersenne twister; other generators hold plain integers
        saved["state"] = {**inner, "key": torch.from_numpy(inner["key"].astype(np.int64))}
    return saved


def _set_numpy_state(saved: dict[str, Any]) -> None:
    import numpy as np

    inner = saved["state"]
    if isinstance(inner.get("key"), torch.Tensor):
        saved = {**saved, "state": {**inner, "key": inner["key"].cpu().numpy().astype(np.uint32)}}
    np.random.set_state(saved)
