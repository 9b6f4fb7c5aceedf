"""The plugin's own part: options, paths, and when its errors are raised."""

from __future__ import annotations

import errno
import logging
import os
import statistics
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resilience import AsyncCheckpointIO
from lightning_resilience.checkpoint.storage import Place
from lightning_resilience.errors import ConfigurationError, MismatchedCheckpointError, SaveError
from lightning_resilience.events import read_events


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"slots": 0}, "1 or more"),
        ({"slots": True}, "1 or more"),
        ({"on_busy": "later"}, '"latest", "skip" or "wait"'),
        ({"max_consecutive_failures": 0}, "1 or more"),
        ({"timeout": -1}, "more than 0"),
        ({"timeout": timedelta(0)}, "more than 0"),
        ({"timeout": "soon"}, "seconds or a timedelta"),
        ({"timeout": float("nan")}, "more than 0"),
        ({"timeout": float("inf")}, "more than 0"),
        ({"on_damage": "ignore"}, '"previous" or "raise"'),
        ({"shm_dir": 3}, r"shm_dir=3\): a path"),
        ({"events": True}, r"events=True\): a path"),
        ({"trust": "no"}, "True or False"),
        ({"storage_options": "key=x"}, "storage_options is a str: a dictionary"),
    ],
)
def test_an_option_that_cannot_work_is_refused_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        AsyncCheckpointIO(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"session": object()}, r"storage_options\['session'\] holds a object"),
        ({"nested": {"key": {1: "secret"}}}, r"storage_options\['nested'\] holds a dict"),
        ({"numbers": (1, 2)}, "holds a tuple"),
    ],
)
def test_options_that_cannot_travel_are_refused_and_not_shown(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        AsyncCheckpointIO(storage_options=options)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=says):
        AsyncCheckpointIO().save_checkpoint({}, "s3://bucket/a.ckpt", storage_options=options)


def test_storage_options_for_a_local_path_are_refused_rather_than_dropped(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Leave them out"):
        AsyncCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"key": "x"})


@pytest.fixture
def plugin(tmp_path: Path) -> AsyncCheckpointIO:
    (tmp_path / "shm").mkdir()
    return AsyncCheckpointIO(shm_dir=str(tmp_path / "shm"))


def test_save_wait_load_remove(plugin: AsyncCheckpointIO, tmp_path: Path) -> None:
    checkpoint = {"global_step": 3, "state_dict": {"w": torch.ones(5)}}
    plugin.save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    checkpoint["state_dict"] = {}
    found = plugin.load_checkpoint(tmp_path / "a.ckpt")  # waits for the pending save
    assert torch.equal(found["state_dict"]["w"], torch.ones(5))
    plugin.save_checkpoint(checkpoint, tmp_path / "b.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    plugin.teardown()
    assert not (tmp_path / "a.ckpt").exists()
    assert [report.step for report in plugin.history] == [3, 3]


def test_after_the_teardown_a_save_is_durable_when_it_returns(plugin: AsyncCheckpointIO, tmp_path: Path) -> None:
    plugin.teardown()
    plugin.save_checkpoint({"global_step": 3}, tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").is_file()
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="was not saved"):
        plugin.save_checkpoint({"global_step": 3}, tmp_path / "file" / "a.ckpt")


def test_a_failed_save_is_raised_at_the_end_of_fit(plugin: AsyncCheckpointIO, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plugin.save_checkpoint({"global_step": 3}, tmp_path / "file" / "a.ckpt")
    with pytest.raises(SaveError, match=r"file/a\.ckpt, was not saved"):
        plugin.teardown()


def test_a_failed_save_does_not_hide_the_exception_that_ends_fit(
    plugin: AsyncCheckpointIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    (tmp_path / "file").write_text("")
    plugin.save_checkpoint({"global_step": 3}, tmp_path / "file" / "a.ckpt")
    try:
        raise KeyError("the user's own")
    except KeyError:
        plugin.teardown()  # as Lightning does; raises nothing
    assert "was not saved" in caplog.text


def test_what_cannot_be_deleted_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = AsyncCheckpointIO()

    def refuse(place: Place) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(place))

    monkeypatch.setattr(Place, "delete", refuse)
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert f"the checkpoint {tmp_path}/a.ckpt could not be deleted: Read-only file system" in caplog.text


def test_a_sharded_checkpoint_for_a_strategy_that_reads_files_says_what_to_do(
    plugin: AsyncCheckpointIO, tmp_path: Path
) -> None:
    (tmp_path / "a.ckpt").mkdir()
    for name in (".metadata", "meta.pt"):
        (tmp_path / "a.ckpt" / name).write_bytes(b"x")
    with pytest.raises(MismatchedCheckpointError, match="lightning-resilience checkpoints consolidate"):
        plugin.load_checkpoint(tmp_path / "a.ckpt")


def test_weights_only_of_the_call_wins(plugin: AsyncCheckpointIO) -> None:
    assert not plugin.trusts(None)
    assert plugin.trusts(False)
    assert not AsyncCheckpointIO(trust=True).trusts(True)
    assert AsyncCheckpointIO(trust=True).trusts(None)


def test_a_strategy_that_never_calls_it_is_pointed_out(
    plugin: AsyncCheckpointIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "old.ckpt").mkdir()
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    assert "Use ResilientFSDPStrategy for asynchronous ones" in caplog.text
    assert not (tmp_path / "old.ckpt").exists()


def test_advice_comes_with_the_first_durable_save_and_is_logged(
    plugin: AsyncCheckpointIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_resilience")
    assert plugin.advice() is None
    for step in (10, 20, 30, 40):
        assert "loses least" not in caplog.text
        plugin.save_checkpoint({"global_step": step}, tmp_path / f"{step}.ckpt")
        plugin.wait()
    often, seldom = plugin.advice(mean_time_between_faults=timedelta(hours=1)), plugin.advice()
    assert often is not None
    assert seldom is not None
    assert 0.0 < often.interval_s < seldom.interval_s
    assert seldom.cost_s == statistics.median(report.stall_s for report in plugin.history)
    plugin.teardown()
    (line,) = [record.message for record in caplog.records if "loses least" in record.message]
    assert "(10 steps) apart" in line


def test_no_save_is_on_its_way_when_all_are_durable(plugin: AsyncCheckpointIO, tmp_path: Path) -> None:
    assert not plugin.is_busy
    plugin.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
    plugin.wait()
    assert not plugin.is_busy
    plugin.teardown()


class Preference:
    """A class of the user's own among the hyper-parameters."""


def test_a_save_that_will_need_trust_says_so_at_once_and_only_once(
    plugin: AsyncCheckpointIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        plugin.save_checkpoint({"global_step": 1, "hyper_parameters": {"x": Preference()}}, tmp_path / f"{name}.ckpt")
    plugin.teardown()
    assert caplog.text.count("resuming will need AsyncCheckpointIO(trust=True)") == 1
    assert "Preference" in caplog.text


def test_what_happens_is_appended_to_the_event_file(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    plugin = AsyncCheckpointIO(shm_dir=str(tmp_path / "shm"), events=str(tmp_path / "events.jsonl"))
    plugin.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
    plugin.teardown()
    assert [event["kind"] for event in read_events(tmp_path / "events.jsonl")] == [
        "checkpoint_staged",
        "checkpoint_saved",
    ]
    assert plugin.counts.saved == 1
