"""The flight recorder's files, and that they never stand in the way of a restart."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lightning_resilience.restart import flight_recorder
from lightning_resilience.restart.flight_recorder import keep_flight_record


def _recorder(recorder: mock.Mock) -> Any:
    return mock.patch.object(flight_recorder, "flight_record", recorder)


def test_each_rank_has_a_file_with_a_prefix_for_each_hang(tmp_path: Path) -> None:
    with _recorder(mock.Mock(return_value=b"record")):
        kept = keep_flight_record(tmp_path / "new", generation=2, rank=13)
    assert kept == tmp_path / "new" / "hang_2_rank_13"
    assert kept.read_bytes() == b"record"


def test_nothing_is_made_when_it_is_off(tmp_path: Path) -> None:
    with _recorder(mock.Mock(return_value=None)):
        assert keep_flight_record(tmp_path / "new", generation=0, rank=0) is None
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("no recorder")])
def test_a_failure_is_told_and_nothing_else(tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with _recorder(mock.Mock(side_effect=error)), caplog.at_level(logging.WARNING):
        assert keep_flight_record(tmp_path, generation=0, rank=1) is None
    assert "hang_0_rank_1" in caplog.text
    assert str(error) in caplog.text
