"""Random state goes out as a plain value and comes back exactly."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_resilience.data.rng import capture_rng, capture_rng_live, restore_rng


def draw() -> tuple[float, float, float, float]:
    """One number of each generator; the Gaussian ones keep half of a pair for later."""
    return random.random(), random.gauss(0, 1), float(np.random.randn()), float(torch.rand(()))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def test_restored_state_draws_the_same_numbers() -> None:
    state = through_a_file(capture_rng())
    expected = [draw() for _ in range(5)]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(123)
    restore_rng(state)
    assert [draw() for _ in range(5)] == expected


def test_half_used_gaussian_pair_is_restored() -> None:
    draw()
    state = through_a_file(capture_rng())
    expected = draw()
    draw()
    restore_rng(state)
    assert draw() == expected


def test_capture_draws_nothing() -> None:
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = draw()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    capture_rng()
    assert draw() == expected


def test_captured_state_does_not_follow_the_generators() -> None:
    state = capture_rng()
    expected = draw()
    restore_rng(state)
    restore_rng(state)
    assert draw() == expected


def test_other_numpy_generator_is_restored() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, not in its stubs
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]  # public, not in its stubs
    try:
        state = through_a_file(capture_rng())
        expected = draw()
        restore_rng(state)
        assert draw() == expected
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]  # public, not in its stubs


def test_named_generators_are_restored() -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    state = through_a_file(capture_rng(generators))
    expected = [torch.rand(3, generator=generator) for generator in generators]
    others = [torch.Generator() for _ in generators]
    restore_rng(state, others)
    for generator, numbers in zip(others, expected, strict=True):
        assert torch.equal(torch.rand(3, generator=generator), numbers)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests a machine without CUDA")
def test_cuda_state_is_ignored_without_cuda() -> None:
    assert "cuda" not in capture_rng()
    restore_rng({**capture_rng(), "cuda": torch.zeros(16, dtype=torch.uint8)})


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.rand(),
        lambda: np.random.randn(),  # the first gives one normal number of two, the second the other
        lambda: np.random.seed(7),
        lambda: np.random.rand(624),
    ],
)
def test_a_live_state_is_never_an_older_one(draw: Callable[[], object]) -> None:
    for _ in range(4):
        state = capture_rng_live()
        expected = np.random.randn(3)
        restore_rng(state)
        assert np.array_equal(np.random.randn(3), expected)
        restore_rng(state)
        capture_rng_live()
        draw()


def test_a_live_state_of_a_generator_that_was_exchanged() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        capture_rng_live()
        np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
        state = capture_rng_live()
        expected = np.random.rand()
        restore_rng(state)
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]
