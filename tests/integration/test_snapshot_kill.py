"""SIGKILL at many instants while snapshots are taken: a successor finds a whole one, the newest or the one before."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.integration.ranks import Stem

LOOP = "tests.integration.snapshot_loop:main"
KILLS = 20


@pytest.mark.timeout(200)
def test_kills_leave_a_whole_snapshot(stem: Stem, tmp_path: Path) -> None:
    stem.load("tests.integration.snapshot_loop")
    (tmp_path / "shm").mkdir()
    dice = random.Random(7)
    least = 0
    for kill in range(KILLS):
        with stem.start(
            "tests.integration.snapshot_loop:main", str(tmp_path), str(kill), ranks=1, folder=tmp_path
        ) as job:
            job.wait_for(tmp_path / f"running-{kill}")
            time.sleep(dice.uniform(0.0, 0.02))
            job.kill()
        found = int((tmp_path / f"found-{kill}").read_text())
        assert found >= least, f"start {kill} lost a snapshot that was complete"
        text = (tmp_path / f"taken-{kill}").read_text()
        least = int(text) if text else found + 3  # the kill may have hit the writing of the number
        assert len(os.listdir(tmp_path / "shm")) == 1
    assert least > 3 * KILLS
