"""Loaders continue after n batches; the loop's counters tell where that is."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lightning_resilience.data.position import ResumedLoader, begin_next_epoch, generators_of, is_stateful
from lightning_resilience.data.resume_point import Counts, Remaining, ResumePoint, resume_point
from tests.unit.resume_runs import LOADERS, PER_EPOCH, SAMPLES, Samples, StatefulLoader, Stream

MAP_STYLE = ["sequential", "random", "generator", "workers", "persistent", "batch_sampler"]


def batches_of(loader: Any) -> list[list[list[float]]]:
    return [batch.tolist() for batch in loader]


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)


@pytest.mark.parametrize("name", MAP_STYLE)
@pytest.mark.parametrize("count", [0, 1, PER_EPOCH - 1, PER_EPOCH])
def test_map_style_loader_continues_after_count(name: str, count: int) -> None:
    seed()
    whole = batches_of(LOADERS[name]())
    seed()
    resumed = ResumedLoader(LOADERS[name](), count)
    assert len(resumed) == PER_EPOCH
    assert batches_of(resumed) == whole[count:]


@pytest.mark.parametrize("name", MAP_STYLE)
def test_later_passes_are_complete(name: str) -> None:
    loader = LOADERS[name]()
    resumed = ResumedLoader(loader, 4)
    assert len(batches_of(resumed)) == PER_EPOCH - 4
    assert len(batches_of(resumed)) == PER_EPOCH
    assert len(batches_of(loader)) == PER_EPOCH


def test_nothing_is_loaded_while_skipping() -> None:
    samples = Samples()
    resumed = ResumedLoader(DataLoader(samples, batch_size=2), 4)
    iterator = iter(resumed)
    resumed.skip()
    assert samples.loaded == []
    next(iterator)
    assert samples.loaded == [8, 9]


def test_skip_draws_the_order_at_once() -> None:
    resumed = ResumedLoader(LOADERS["random"](), 2)
    iterator = iter(resumed)
    torch.manual_seed(8)
    resumed.skip()
    torch.manual_seed(9)
    rest = batches_of(iterator)
    plain = iter(LOADERS["random"]())
    torch.manual_seed(8)
    assert rest == batches_of(plain)[2:]


def test_loader_without_batching_skips_samples() -> None:
    loader = DataLoader(Samples(), batch_size=None, sampler=SequentialSampler(range(SAMPLES)))
    assert batches_of(ResumedLoader(loader, 5)) == batches_of(loader)[5:]


def test_distributed_sampler_skips_within_the_rank() -> None:
    samples = Samples()
    sampler: DistributedSampler[int] = DistributedSampler(samples, num_replicas=2, rank=1, shuffle=True)
    sampler.set_epoch(4)
    loader = DataLoader(samples, batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    assert batches_of(ResumedLoader(loader, 1)) == batches_of(loader)[1:]


def test_the_loader_keeps_its_sampler() -> None:
    loader = LOADERS["random"]()
    before = loader.batch_sampler
    iter(ResumedLoader(loader, 2))
    assert loader.batch_sampler is before


def test_persistent_workers_draw_a_seed_only_once() -> None:
    loader = LOADERS["persistent"]()
    list(loader)
    torch.manual_seed(4)
    second_pass = batches_of(loader)

    fresh = LOADERS["persistent"]()
    resumed = ResumedLoader(fresh, 2)
    resumed.keep_workers_alive()
    torch.manual_seed(4)
    assert batches_of(resumed) == second_pass[2:]


def test_iterable_is_drawn_and_dropped_with_a_warning() -> None:
    loader = DataLoader(Stream(), batch_size=2)
    with pytest.warns(UserWarning, match=r"2 batches of DataLoader are loaded again and dropped.*as long as"):
        rest = batches_of(ResumedLoader(loader, 2))
    assert rest == batches_of(loader)[2:]


def test_overridden_iteration_is_not_trusted_to_use_the_sampler() -> None:
    class Doubled(DataLoader[torch.Tensor]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield from (batch, batch)

    loader = Doubled(Samples(), batch_size=2)
    with pytest.warns(UserWarning, match="Doubled"):
        rest = batches_of(ResumedLoader(loader, 3))
    assert rest == batches_of(loader)[3:]


def test_stateful_loader_is_used_as_it_is() -> None:
    whole = batches_of(StatefulLoader())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rest = batches_of(ResumedLoader(StatefulLoader(), 4, {"epoch": 0, "position": 4}))
    assert rest == whole[4:]
    assert is_stateful(StatefulLoader())
    assert not is_stateful(LOADERS["random"]())


@pytest.mark.parametrize("position", [4, PER_EPOCH])
def test_next_epoch_of_a_stateful_loader(position: int) -> None:
    uninterrupted = StatefulLoader()
    list(uninterrupted)
    fresh = StatefulLoader()
    begin_next_epoch(fresh, {"epoch": 0, "position": position}, exhausted=position == PER_EPOCH)
    assert batches_of(fresh) == batches_of(uninterrupted)


def test_next_epoch_of_a_loader_that_wraps_around() -> None:
    class Wrapping(StatefulLoader):
        def load_state_dict(self, state: dict[str, int]) -> None:
            super().load_state_dict(state)
            if self.position == PER_EPOCH:
                self.epoch, self.position = self.epoch + 1, 0

    uninterrupted = Wrapping()
    list(uninterrupted)
    fresh = Wrapping()
    begin_next_epoch(fresh, {"epoch": 0, "position": PER_EPOCH}, exhausted=True)
    assert batches_of(fresh) == batches_of(uninterrupted)


def test_generators_are_found_once() -> None:
    generator = torch.Generator()
    loader = DataLoader(Samples(), shuffle=True, generator=generator)
    assert generators_of([loader, loader, StatefulLoader(), iter(())]) == [generator]


def epochs(done: int, *, hook: str) -> Counts:
    """Epoch counts as a checkpoint has them that was written in ``hook``."""
    ready = {"before": done, "start": done + 1, "within": done + 1, "end": done + 1, "after": done}[hook]
    started = {"start": done}.get(hook, ready)
    processed = done + 1 if hook == "end" else done
    return Counts(ready, started, processed, done)


WHOLE, SECOND = Counts(4, 4, 4, 4), Counts(2, 2, 2, 2)
POINTS = {
    "before training": (epochs(0, hook="before"), Counts(0, 0, 0, 0), False, ResumePoint(0)),
    "on_train_epoch_start": (epochs(2, hook="start"), WHOLE, False, ResumePoint(2)),
    "training_step": (epochs(2, hook="within"), Counts(3, 3, 2, 2), False, ResumePoint(2, True, 2)),
    "on_train_batch_end": (
        epochs(2, hook="within"),
        Counts(2, 2, 2, 1),
        True,
        ResumePoint(2, True, 2, remaining=Remaining.BATCH_END),
    ),
    "on_train_batch_end of the last batch": (
        epochs(2, hook="within"),
        Counts(4, 4, 4, 3),
        False,
        ResumePoint(2, True, 4, exhausted=True, remaining=Remaining.BATCH_END),
    ),
    "within validation": (
        epochs(2, hook="within"),
        SECOND,
        False,
        ResumePoint(2, True, 2, remaining=Remaining.BATCH_END),
    ),
    "on_validation_end": (
        epochs(2, hook="within"),
        SECOND,
        True,
        ResumePoint(2, True, 2, remaining=Remaining.BATCH_END_VALIDATED),
    ),
    "on_train_epoch_end": (
        epochs(2, hook="end"),
        WHOLE,
        True,
        ResumePoint(3, remaining=Remaining.EPOCH_END),
    ),
    "after fit": (epochs(3, hook="after"), WHOLE, True, ResumePoint(3)),
    "epoch cut short by max_steps": (epochs(2, hook="end"), SECOND, True, ResumePoint(2, True, 2)),
    "after a fit that max_steps cut short": (epochs(3, hook="after"), SECOND, True, ResumePoint(2, True, 2)),
}


@pytest.mark.parametrize("hook", POINTS)
def test_counters_tell_the_hook(hook: str) -> None:
    epoch, batch, validated, expected = POINTS[hook]
    found = resume_point(epoch, batch, is_last_batch=False, validated=validated, max_batches=4)
    assert found == expected


def test_last_batch_of_a_loader_without_length() -> None:
    found = resume_point(
        epochs(0, hook="within"),
        Counts(2, 2, 2, 1),
        is_last_batch=True,
        validated=False,
        max_batches=float("inf"),
    )
    assert found.exhausted
