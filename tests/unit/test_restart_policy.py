"""What is done about a fault: decided from values alone."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_resilience.errors import ArenaError, ConfigurationError, ShardingError
from lightning_resilience.restart.policy import (
    Fault,
    GiveUp,
    RespawnRank,
    RestartInProcess,
    RestartPolicy,
    exception_fault,
)


class Flaky(OSError):
    """A user's own exception."""


def fault(step: int = 5, error: BaseException | None = None, *, rank: int = 1, at_s: float = 0.0) -> Fault:
    return exception_fault(error or RuntimeError(f"boom in {step}"), rank=rank, step=step, at_s=at_s)


def hang(step: int = 5, *, rank: int = 1, message: str = "no progress for 30 s") -> Fault:
    return Fault(kind="hang", rank=rank, step=step, message=message)


def test_a_rank_that_is_not_healthy_needs_a_new_process() -> None:
    fault = Fault(kind="unhealthy", rank=1, step=3, message="FreeSpace: less than 64 MiB are free in /logs")
    action = RestartPolicy().decide(fault, [])
    assert isinstance(action, GiveUp)
    assert "rank 1 is not fit to go on (FreeSpace: less than 64 MiB are free in /logs;" in action.reason
    assert isinstance(RestartPolicy().decide(fault, [], can_respawn=True), RespawnRank)


def test_first_fault_is_recovered_from() -> None:
    assert RestartPolicy().decide(fault(), []) == RestartInProcess()
    assert RestartPolicy().decide(hang(), []) == RestartInProcess()


def test_same_exception_at_same_step_is_not_transient() -> None:
    first = fault(7, ValueError("bad token at 0x7f12, offset 12"))
    again = fault(7, ValueError("bad token at 0x7e98, offset 15"), rank=0)
    answer = RestartPolicy().decide(again, [first])
    assert answer == GiveUp("this fault repeats at step 7; it is not transient")


@pytest.mark.parametrize(
    "other",
    [fault(8, ValueError("bad token")), fault(7, KeyError("bad token")), fault(7, ValueError("short read")), hang(7)],
)
def test_another_fault_or_step_is_no_repetition(other: Fault) -> None:
    assert RestartPolicy().decide(other, [fault(7, ValueError("bad token"))]) == RestartInProcess()


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        MisconfigurationException("no"),
        ShardingError("no"),
        ArenaError("no"),
        GeneratorExit(),
    ],
)
def test_never_retried_whatever_the_user_says(error: BaseException) -> None:
    policy = RestartPolicy(retry_on=[Exception, KeyboardInterrupt, SystemExit])
    answer = policy.decide(fault(error=error), [])
    assert isinstance(answer, GiveUp)
    assert "not to be retried" in answer.reason


def test_user_lists_take_classes_and_names_and_cover_subclasses() -> None:
    flaky, other = fault(error=Flaky("disk")), fault(error=ValueError("shape"))
    for named in (OSError, "OSError", "builtins.OSError", Flaky, "Flaky", f"{Flaky.__module__}.Flaky"):
        only = RestartPolicy(retry_on=[named])
        assert only.decide(flaky, []) == RestartInProcess()
        assert isinstance(only.decide(other, []), GiveUp)
        never = RestartPolicy(never_retry=[named])
        assert isinstance(never.decide(flaky, []), GiveUp)
        assert never.decide(other, []) == RestartInProcess()


def test_a_full_name_means_only_that_class() -> None:
    assert isinstance(RestartPolicy(retry_on=["torch.OSError"]).decide(fault(error=OSError("x")), []), GiveUp)


def test_restarts_are_counted() -> None:
    policy = RestartPolicy(max_restarts=2)
    earlier = [fault(1), fault(2)]
    assert policy.decide(fault(2), earlier[:1]) == RestartInProcess()
    answer = policy.decide(fault(3), earlier)
    assert answer == GiveUp("2 restarts so far, and max_restarts=2")
    assert isinstance(RestartPolicy(max_restarts=0).decide(fault(), []), GiveUp)
    assert RestartPolicy(max_restarts=None).decide(fault(900), [fault(i) for i in range(900)]) == RestartInProcess()


@pytest.mark.parametrize("window", [60, timedelta(minutes=1)])
def test_old_restarts_are_forgiven(window: float | timedelta) -> None:
    policy = RestartPolicy(max_restarts=1, window=window)
    earlier = [fault(1, at_s=100.0)]
    assert isinstance(policy.decide(fault(2, at_s=159.0), earlier), GiveUp)
    assert policy.decide(fault(2, at_s=161.0), earlier) == RestartInProcess()


def test_no_progress_ends_the_run_even_if_the_faults_differ() -> None:
    kinds = [ValueError("a"), KeyError("b"), OSError("c"), TypeError("d")]
    faults = [fault(9, error) for error in kinds]
    policy = RestartPolicy(max_restarts_without_progress=3)
    assert policy.decide(faults[2], faults[:2]) == RestartInProcess()
    assert policy.decide(faults[3], faults[:3]) == GiveUp("3 restarts at step 9 brought no progress")
    moved = [*faults[:2], fault(10, OSError("c"))]
    assert policy.decide(fault(10, TypeError("d")), moved) == RestartInProcess()


def test_broken_device_context_needs_another_process() -> None:
    broken = fault(error=RuntimeError("CUDA error: device-side assert triggered\nCompile with ..."))
    answer = RestartPolicy().decide(broken, [], can_respawn=True)
    assert answer == RespawnRank(1, "the error leaves the device context of its process unusable")
    assert isinstance(RestartPolicy().decide(broken, []), GiveUp)
    memory = fault(error=RuntimeError("CUDA error: out of memory"))
    assert RestartPolicy().decide(memory, [], can_respawn=True) == RestartInProcess()
    talk = fault(error=ValueError("the text says: illegal memory access"))
    assert RestartPolicy().decide(talk, [], can_respawn=True) == RestartInProcess()


def test_fault_in_the_first_step_after_a_restart_escalates_where_it_can() -> None:
    earlier, now = [fault(4, ValueError("a"))], fault(4, KeyError("b"))
    answer = RestartPolicy().decide(now, earlier, can_respawn=True)
    assert answer == RespawnRank(1, "rank 1 failed again in the first step after a restart")
    assert RestartPolicy().decide(now, earlier) == RestartInProcess()
    relaxed = RestartPolicy(first_step_escalates=False)
    assert relaxed.decide(now, earlier, can_respawn=True) == RestartInProcess()


def test_a_rank_that_fails_again_and_again_is_replaced() -> None:
    policy = RestartPolicy(max_faults_per_rank=2)
    earlier = [fault(1), fault(2, rank=0), fault(3)]
    answer = policy.decide(fault(4), earlier, can_respawn=True)
    assert answer == RespawnRank(1, "3 faults of rank 1, and max_faults_per_rank=2")
    assert isinstance(policy.decide(fault(4), earlier), GiveUp)
    assert policy.decide(fault(4, rank=0), earlier, can_respawn=True) == RestartInProcess()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_restarts": -1},
        {"max_restarts": True},
        {"max_restarts": 2.5},
        {"max_restarts_without_progress": None},
        {"window": 0},
        {"window": "1h"},
        {"window": timedelta(0)},
        {"window": math.nan},
        {"window": math.inf},
        {"retry_on": OSError},
        {"retry_on": "OSError"},
        {"never_retry": [3]},
        {"never_retry": [int]},
        {"never_retry": [""]},
        {"max_faults_per_rank": 0},
        {"min_world_size": 0},
        {"first_step_escalates": 1},
        {"keep_global_batch": "yes"},
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigurationError, match=name):
        RestartPolicy(**wrong)


def test_policy_is_a_value() -> None:
    assert RestartPolicy(retry_on=[OSError]) == RestartPolicy(retry_on=("builtins.OSError",))
    assert replace(RestartPolicy(window=60), max_restarts=1) == RestartPolicy(window=60.0, max_restarts=1)
    assert len({RestartPolicy(), RestartPolicy()}) == 1


def test_faults_have_titles() -> None:
    assert fault(error=ValueError("first line\nsecond")).title == "ValueError: first line"
    assert fault(error=Flaky()).title.endswith("Flaky")
    assert hang().title == "no progress for 30 s"
    assert Fault(kind="lost", rank=0, step=1).title == "the process is gone"
