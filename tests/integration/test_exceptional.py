"""A rank that raises saves only together with all others, and never waits for them for long (Lightning 20187)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.ranks import JobFailed, Stem

CALL = "tests.integration.exceptional:main"
KINDS = ["sharded", "full", "ddp"]


@dataclass(frozen=True)
class Ended:
    """A job that has failed."""

    folder: Path
    output: str
    left: set[int]


@pytest.fixture(scope="module")
def failed(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Of each kind a job in which one rank raises. All at once: what they do is to wait."""
    found = {}
    with contextlib.ExitStack() as stack:
        folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
        jobs = {
            kind: stack.enter_context(stem.start(CALL, str(folder), kind, "one", ranks=2, folder=folder))
            for kind, folder in folders.items()
        }
        for kind, job in jobs.items():
            with pytest.raises(JobFailed):  # rank 0 has lost its peer
                job.wait(timeout=60.0)
            found[kind] = Ended(folders[kind], job.output, job.members())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_when_all_raise_at_the_same_step_their_state_is_saved(stem: Stem, tmp_path: Path, kind: str) -> None:
    output = stem.run(CALL, str(tmp_path), kind, "all", ranks=2, folder=tmp_path)
    assert output.count(f"{tmp_path.name}: the user's own") == 2
    assert (tmp_path / "on_exception" / "on_exception.ckpt").exists()
    assert (tmp_path / "own.ckpt").exists() == (kind != "ddp")
    assert (tmp_path / "step=3.ckpt").exists()
    assert "no checkpoint is saved" not in output


@pytest.mark.parametrize("kind", KINDS)
def test_when_one_raises_nobody_hangs_and_nothing_is_saved(failed: dict[str, Ended], kind: str) -> None:
    """The other rank is in the middle of a collective and ends when the first one is gone."""
    job = failed[kind]
    assert not job.left, job.output
    assert "the user's own" in job.output
    assert "within 2 s not every rank came to save step 3" in job.output
    assert not (job.folder / "on_exception").exists()
    assert not (job.folder / "own.ckpt").exists()
    assert not (job.folder / "step=3.ckpt").exists()
    assert (job.folder / "step=2.ckpt").exists()
    assert [path.name for path in job.folder.glob(".*")] in ([], [".lightning-resilience-run.json"])
