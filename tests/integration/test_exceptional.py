"""A rank that raises saves only together with all others, and never waits for them for long (Lightning 20187)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.ranks import JobFailed, Stem

CALL = "tests.integration.exceptional:main"


@pytest.mark.parametrize("kind", ["sharded", "full", "ddp"])
def test_when_all_raise_at_the_same_step_their_state_is_saved(stem: Stem, tmp_path: Path, kind: str) -> None:
    output = stem.run(CALL, str(tmp_path), kind, "all", ranks=2, folder=tmp_path)
    assert output.count(f"{tmp_path.name}: the user's own") == 2
    assert (tmp_path / "on_exception" / "on_exception.ckpt").exists()
    assert (tmp_path / "own.ckpt").exists() == (kind != "ddp")
    assert (tmp_path / "step=3.ckpt").exists()
    assert "no checkpoint is saved" not in output


@pytest.mark.parametrize("kind", ["sharded", "full", "ddp"])
def test_when_one_raises_nobody_hangs_and_nothing_is_saved(stem: Stem, tmp_path: Path, kind: str) -> None:
    """The other rank is in the middle of a collective and ends when the first one is gone."""
    with stem.start(CALL, str(tmp_path), kind, "one", ranks=2, folder=tmp_path) as job:
        with pytest.raises(JobFailed):  # rank 0 has lost its peer
            job.wait(timeout=60.0)
        assert not job.members(), job.output
        assert "the user's own" in job.output
        assert "within 2 s not every rank came to save step 3" in job.output
    assert not (tmp_path / "on_exception").exists()
    assert not (tmp_path / "own.ckpt").exists()
    assert not (tmp_path / "step=3.ckpt").exists()
    assert (tmp_path / "step=2.ckpt").exists()
    assert [path.name for path in tmp_path.glob(".*")] in ([], [".lightning-resilience-run.json"])
