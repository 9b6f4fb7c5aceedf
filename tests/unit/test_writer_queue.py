"""The writer's queue, as histories."""

from __future__ import annotations

from lightning_resilience.checkpoint.messages import Begin, Drop, Link, Release, Remove, Save
from lightning_resilience.checkpoint.writer_queue import WriterQueue


def save(number: int) -> Save:
    return Save(number, f"/c/{number}.ckpt", f"at{number}", number, 0, 1, (), 60.0)


def written(queue: WriterQueue, *, alone: bool = False) -> int | None:
    found = queue.next_save(alone)
    return None if found is None else found.id


def test_a_save_waits_for_its_turn() -> None:
    queue = WriterQueue()
    queue.take(save(1))
    queue.take(save(2))
    assert written(queue) is None
    queue.take(Begin(1))
    assert queue.has_turn
    assert written(queue) == 1
    assert written(queue) is None
    assert queue


def test_when_the_rank_is_gone_what_waits_is_written_oldest_first() -> None:
    queue = WriterQueue()
    for number in (1, 2, 3):
        queue.take(save(number))
    queue.take(Begin(2))
    queue.take(Drop(3))
    assert [written(queue, alone=True) for _ in range(3)] == [2, 1, None]
    queue.settle(1, committed=True)
    queue.settle(2, committed=False)
    assert not queue


def test_a_removal_waits_until_its_save_is_committed() -> None:
    queue = WriterQueue()
    queue.take(save(1))
    removal = Remove(2, "/c/0.ckpt", after=1)
    queue.take(removal)
    assert queue.take_ready(alone=False) == []
    queue.take(Begin(1))
    written(queue)
    assert queue.take_ready(alone=False) == []
    queue.settle(1, committed=True)
    assert queue.take_ready(alone=False) == [(removal, True)]
    assert not queue


def test_what_should_come_after_a_failed_save_is_void() -> None:
    queue = WriterQueue()
    queue.take(save(1))
    link = Link(2, "/c/1.ckpt", "/c/last.ckpt", after=1)
    queue.take(link)
    queue.take(Begin(1))
    written(queue)
    queue.settle(1, committed=False)
    assert queue.take_ready(alone=False) == [(link, False)]


def test_a_dropped_save_takes_along_what_should_have_come_after_it() -> None:
    queue = WriterQueue()
    queue.take(save(1))
    queue.take(save(2))
    queue.take(Remove(3, "/c/0.ckpt", after=2))
    queue.take(Drop(2))
    assert [written(queue, alone=True) for _ in range(2)] == [1, None]
    queue.settle(1, committed=True)
    assert queue.take_ready(alone=False) == []
    assert not queue


def test_a_removal_that_follows_nothing_is_ready_at_once() -> None:
    queue = WriterQueue()
    queue.take(Remove(1, "/c/0.ckpt"))
    assert queue.take_ready(alone=False) == [(Remove(1, "/c/0.ckpt"), True)]


def test_a_held_removal_waits_for_its_release_or_for_the_end_of_the_rank() -> None:
    queue = WriterQueue()
    first, second, third = (Remove(number, f"/c/{number}.ckpt", held=True) for number in (1, 2, 3))
    for removal in (first, second, third):
        queue.take(removal)
    assert queue.take_ready(alone=False) == []
    queue.take(Release(1))
    assert queue.take_ready(alone=False) == [(first, True)]
    queue.take(Drop(2))
    assert queue.take_ready(alone=True) == [(third, True)]
    assert not queue
