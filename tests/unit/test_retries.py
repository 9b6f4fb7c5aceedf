"""What is tried again, how often, and what an error may say."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

import pytest

from lightning_resilience.checkpoint.storage.protocol import GivenUp, no_progress
from lightning_resilience.checkpoint.storage.retries import Patience, Retries, is_transient


class NoCredentialsError(Exception):
    """As botocore's."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "input/output error"),
        OSError(errno.EBUSY, "reduce your request rate"),
        ConnectionResetError("reset"),
        TimeoutError("slow"),
        EOFError(),
        RuntimeError("of a library that nobody knows"),
    ],
)
def test_transient(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("no"),
        PermissionError("no"),
        OSError(errno.ENOSPC, "full"),
        NoCredentialsError(),
        ValueError("wrong option"),
        TypeError("wrong option"),
    ],
)
def test_permanent(error: Exception) -> None:
    assert not is_transient(error)


def failing(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def act() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return act


def test_it_pauses_longer_each_time_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    slept: list[float] = []
    retries = Retries(Patience(tries=5, first_pause_s=1.0, longest_pause_s=3.0), {}, slept.append)
    assert retries.run("read", "s3://b/x", failing(*[OSError(5, "no")] * 4), no_progress) == "done"
    assert slept == [1.0, 2.0, 3.0, 3.0]
    assert retries.count == 4
    assert "could not read s3://b/x: no; trying again in 1.00 s (2 of 5)" in caplog.text


def test_what_the_file_system_tells_of_is_counted_once() -> None:
    """It tries again by itself, and says so; what it says nothing of is counted as ever."""
    retries = Retries(Patience(first_pause_s=0.0), {})
    retries.told = True
    left = [3, 0, 0]

    def act() -> str:
        for _ in range(left[0]):
            retries.note()
        if left.pop(0) or left:
            raise ConnectionResetError("reset")
        return "done"

    assert retries.run("read", "s3://b/x", act, no_progress) == "done"
    assert retries.count == 4


def test_it_gives_up_and_says_how_often_it_tried() -> None:
    slept: list[float] = []
    retries = Retries(Patience(tries=3, first_pause_s=1.0), {}, slept.append)
    with pytest.raises(OSError, match="could not write it, tried 3 times: no") as caught:
        retries.run("write", "s3://b/x", failing(*[RuntimeError("no")] * 9), no_progress)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "s3://b/x")
    assert len(slept) == 2


def test_by_default_it_is_patient_for_a_quarter_of_a_minute() -> None:
    slept: list[float] = []
    with pytest.raises(OSError, match="tried 7 times"):
        Retries(Patience(), {}, slept.append).run("read", "x", failing(*[OSError(5, "no")] * 9), no_progress)
    assert sum(slept) == 15.75


def test_a_permanent_error_keeps_its_type() -> None:
    for kind in (FileNotFoundError, PermissionError, IsADirectoryError):
        with pytest.raises(kind):
            Retries(Patience(), {}).run("read", "x", failing(kind("as s3fs raises it, without a number")), no_progress)


def test_giving_up_is_never_tried_again() -> None:
    retries = Retries(Patience(), {})
    with pytest.raises(GivenUp):
        retries.run("write", "x", failing(GivenUp("time is up")), no_progress)

    def time_is_up() -> None:
        raise GivenUp("between two tries")

    with pytest.raises(GivenUp, match="between two tries"):
        Retries(Patience(first_pause_s=0.0), {}).run("write", "x", failing(OSError(5, "no")), time_is_up)


def test_no_error_and_no_log_line_shows_an_option(caplog: pytest.LogCaptureFixture) -> None:
    options = {
        "key": "AKIA0001",
        "client_kwargs": {"aws_session_token": "token-of-today", "region_name": "eu-west-1"},
        "secrets": ["hunter2!"],
        "endpoint_url": "http://minio:9000",
    }
    caplog.set_level(logging.DEBUG)
    text = "AKIA0001 with token-of-today and hunter2! at http://minio:9000 in eu-west-1"
    retries = Retries(Patience(tries=2, first_pause_s=0.0), options)
    with pytest.raises(OSError, match=r"\*\*\* with \*\*\* and \*\*\* at http://minio:9000 in eu-west-1") as caught:
        retries.run("read", "s3://b/x", failing(*[RuntimeError(text)] * 2), no_progress)
    assert "AKIA0001" not in caplog.text
    assert "trying again" in caplog.text
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
