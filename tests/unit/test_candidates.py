"""Which checkpoint is the newest: names, manifests and sizes decide; nothing valid is an error, not a fresh start."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_resilience import load_weights, newest_checkpoint
from lightning_resilience.checkpoint import candidates, quarantine
from lightning_resilience.checkpoint.candidates import find, with_predecessors
from lightning_resilience.checkpoint.exchange import Alone
from lightning_resilience.checkpoint.manifest import MANIFEST, FileRecord, Manifest, seal_tail
from lightning_resilience.checkpoint.storage import Place, place_for
from lightning_resilience.checkpoint.storage import local as storage
from lightning_resilience.checkpoint.verify import choose
from lightning_resilience.cli.main import main
from lightning_resilience.errors import (
    ConfigurationError,
    DamagedCheckpointError,
    LoadError,
    NoValidCheckpointError,
)


def a_checkpoint(directory: Path, step: int, created: int | None = None, name: str | None = None) -> Path:
    path = directory / (name or f"step={step}.ckpt")
    path.mkdir(parents=True)
    files = {}
    for file in (".metadata", "meta.pt", "__0_0.distcp"):
        data = f"{file} {step}".encode() * 100
        digest = storage.write_durably(path / file, memoryview(data))
        files[file] = FileRecord(len(data), digest)
    manifest = Manifest(step, 1, f"attempt{step}", created if created is not None else step, files)
    (path / MANIFEST).write_bytes(manifest.encode())
    return path


def a_file(directory: Path, created: int) -> Path:
    path = directory / f"file={created}.ckpt"
    torch.save({"weight": torch.ones(10)}, path)
    data = path.read_bytes()
    storage.write_durably(
        path, memoryview(data), tail=lambda digest: seal_tail(len(data), 1, created, digest), held_back=2
    )
    return path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_first_start_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "does-not-exist") is None
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "steps.jsonl").write_text("")
    (tmp_path / "lightning_logs").mkdir()
    assert newest_checkpoint(tmp_path) is None


def test_a_home_directory_and_folders_made_by_a_slash_in_a_name_are_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = a_checkpoint(tmp_path / "ck" / "epoch=0-val", step=1, name="loss=0.63.ckpt")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert newest_checkpoint("~/ck") == str(path)
    monkeypatch.undo()


def test_a_file_is_refused_rather_than_a_first_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="that is a file"):
        newest_checkpoint(a_file(tmp_path, created=1))


def test_the_newest_is_the_last_committed_not_the_highest_step(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, step=60, created=1)  # of a run that diverged and was rolled back to 50
    newest = a_checkpoint(tmp_path, step=55, created=2)
    assert newest_checkpoint(tmp_path) == str(newest)


def test_unfinished_ones_and_links_do_not_count(tmp_path: Path) -> None:
    good = a_checkpoint(tmp_path, step=1)
    unfinished = a_checkpoint(tmp_path, step=2, name=".step=2.ckpt.abc.incomplete")
    for entry in (*unfinished.iterdir(), unfinished):
        os.utime(entry, (1, 1))
    a_checkpoint(tmp_path, step=3, name=".step=3.ckpt.abc.removed")
    (tmp_path / "last.ckpt").symlink_to("step=1.ckpt")
    (tmp_path / "dangling.ckpt").symlink_to("step=9.ckpt")
    assert newest_checkpoint(tmp_path) == str(good)


def test_one_that_was_about_to_be_replaced_counts(tmp_path: Path) -> None:
    """Where names cannot be exchanged, a kill may come between two renames; the old one is still whole."""
    aside = a_checkpoint(tmp_path, step=1, name=".last.ckpt.abc.replaced")
    assert newest_checkpoint(tmp_path) == str(aside)


@pytest.mark.parametrize("fault", ["missing", "short", "manifest", "no manifest", "torn stock save"])
def test_what_names_and_sizes_tell_is_passed_over_with_a_warning(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = a_checkpoint(tmp_path, step=1), a_checkpoint(tmp_path, step=2)
    if fault == "missing":
        (bad / "__0_0.distcp").unlink()
    elif fault == "short":
        os.truncate(bad / "__0_0.distcp", 5)
    elif fault == "manifest":
        flip(bad / MANIFEST)
    elif fault == "no manifest":
        (bad / MANIFEST).unlink()
        (bad / "rank_0.pt").touch()  # so it is one of ours
    else:
        (bad / MANIFEST).unlink()
        (bad / "meta.pt").unlink()
        os.utime(bad, ns=(10**18, 10**18))
    assert newest_checkpoint(tmp_path) == str(good)
    assert f"passing over {bad}" in caplog.text


def test_nothing_valid_is_an_error_that_names_every_fault(tmp_path: Path) -> None:
    for step in (1, 2):
        (a_checkpoint(tmp_path, step) / "meta.pt").unlink()
    with pytest.raises(
        NoValidCheckpointError, match=r"(?s)none of the 2.*step=2.*meta.pt is missing.*step=1.*not\s+start"
    ):
        newest_checkpoint(tmp_path)


def test_files_and_directories_are_ordered_together(tmp_path: Path) -> None:
    directory, file = a_checkpoint(tmp_path, step=5, created=5), a_file(tmp_path, created=9)
    assert [candidate.path for candidate in find(place_for(tmp_path))] == [str(file), str(directory)]


def test_predecessors_are_only_those_committed_before(tmp_path: Path) -> None:
    first, second, _third = (a_checkpoint(tmp_path, step) for step in (1, 2, 3))
    assert [candidate.path for candidate in with_predecessors(place_for(second))] == [str(second), str(first)]


def test_predecessors_are_never_those_of_another_run(tmp_path: Path) -> None:
    """A damaged checkpoint is replaced by an older one of its run, not by what lies in the next folder."""
    for other in ("lr=0.1", "version_0/checkpoints"):
        a_checkpoint(tmp_path / other, step=1)
    alone = a_checkpoint(tmp_path, step=2)
    sweep = a_checkpoint(tmp_path / "lr=0.2", step=3)
    assert [candidate.path for candidate in with_predecessors(place_for(alone))] == [str(alone)]
    assert [candidate.path for candidate in with_predecessors(place_for(sweep))] == [str(sweep)]


def test_predecessors_in_folders_made_by_a_slash_in_a_name_are_found(tmp_path: Path) -> None:
    first = a_checkpoint(tmp_path / "epoch=0-val", step=1, name="loss=0.6.ckpt")
    second = a_checkpoint(tmp_path / "epoch=1-val", step=2, name="loss=0.5.ckpt")
    last = a_checkpoint(tmp_path, step=3, name="last.ckpt")
    expected = [str(last), str(second), str(first)]
    assert [candidate.path for candidate in with_predecessors(place_for(last))] == expected
    assert [candidate.path for candidate in with_predecessors(place_for(second))] == expected[1:]


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="there is no checkpoint at"):
        with_predecessors(place_for(tmp_path / "nothing.ckpt"))
    with pytest.raises(LoadError, match="neither a checkpoint nor a directory that holds one"):
        with_predecessors(place_for(tmp_path))


@pytest.mark.parametrize("file", [".metadata", "meta.pt", "__0_0.distcp", MANIFEST])
def test_a_flipped_byte_is_found_named_and_the_previous_one_used(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = a_checkpoint(tmp_path, step=1), a_checkpoint(tmp_path, step=2)
    flip(bad / file)
    assert choose(place_for(tmp_path), Alone(), fall_back=True).path == str(good)
    assert "DAMAGED CHECKPOINT" in caplog.text
    assert str(bad / file) in caplog.text
    with pytest.raises(DamagedCheckpointError, match=file):
        choose(place_for(bad), Alone(), fall_back=False)


def test_a_flipped_byte_in_a_file_is_found(tmp_path: Path) -> None:
    good, bad = a_file(tmp_path, created=1), a_file(tmp_path, created=2)
    flip(bad)
    assert choose(place_for(bad), Alone(), fall_back=True).path == str(good)


def test_one_that_vanishes_while_we_look_is_no_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, gone = a_checkpoint(tmp_path, step=1), a_checkpoint(tmp_path, step=2)
    original = candidates.examine

    def late(place: Place) -> candidates.Candidate:
        if str(place) == str(gone):
            place.delete()
        return original(place)

    monkeypatch.setattr(candidates, "examine", late)
    assert [candidate.path for candidate in find(place_for(tmp_path))] == [str(good)]


def test_all_damaged_is_an_error(tmp_path: Path) -> None:
    for step in (1, 2):
        flip(a_checkpoint(tmp_path, step) / "__0_0.distcp")
    with pytest.raises(NoValidCheckpointError):
        choose(place_for(tmp_path / "step=2.ckpt"), Alone(), fall_back=True)


class TwoRanks:
    """Rank 0 of two, whose peer always gives the same answer."""

    rank = 0
    world_size = 2

    def __init__(self, peer: bytes) -> None:
        self.peer = peer

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data, self.peer]


def test_a_fault_that_only_another_rank_saw_counts(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, step=1)
    with pytest.raises(DamagedCheckpointError, match="rank 1 found it"):
        choose(
            place_for(tmp_path / "step=1.ckpt"),
            TwoRanks(b'["DamagedCheckpointError", "rank 1 found it"]'),
            fall_back=False,
        )


def test_a_writer_that_is_still_busy_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_resilience")
    answers = [[place_for(tmp_path / ".x.incomplete")]] * 2 + [[]]
    monkeypatch.setattr(candidates, "live_attempts", lambda directory, now, **_: answers.pop(0))
    slept: list[float] = []
    candidates._wait_for_writers(place_for(tmp_path), 10.0, slept.append)
    assert len(slept) == 2
    assert caplog.text.count("waiting for the writer") == 1


@pytest.mark.parametrize("path", ["", " ", "a\0b", "x" * 300, None, 3, b"bytes"])
def test_a_path_that_cannot_be_is_refused(path: Any) -> None:
    with pytest.raises(ConfigurationError, match="path"):
        newest_checkpoint(path)
    with pytest.raises(ConfigurationError, match="path"):
        load_weights(nn.Linear(1, 1), path)


def test_what_has_failed_to_load_three_times_is_passed_over_until_it_is_whole_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = a_checkpoint(tmp_path, step=1), a_checkpoint(tmp_path, step=2)
    flip(bad / "__0_0.distcp")
    for _ in range(3):
        assert newest_checkpoint(tmp_path) == str(bad), "names and sizes tell nothing"
        assert choose(place_for(bad), Alone(), fall_back=True).path == str(good)
    assert newest_checkpoint(tmp_path) == str(good)
    assert "has failed to load 3 times, the last time because" in caplog.text
    assert [one.path for one in with_predecessors(place_for(tmp_path))] == [str(good)]
    assert with_predecessors(place_for(bad))[0].path == str(bad), "who names it gets it"
    newer = a_checkpoint(tmp_path, step=3)
    caplog.clear()
    assert [one.path for one in with_predecessors(place_for(newer))] == [str(newer), str(good)]
    assert f"passing over {bad}" in caplog.text, "nothing is left out without a word"
    shutil.rmtree(newer)
    assert main(["checkpoints", "list", str(tmp_path)]) == 0
    assert "passed over: " in capsys.readouterr().out
    assert main(["checkpoints", "list", "--json", str(tmp_path)]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [one["path"] for one in listed if one["newest"]] == [str(good)], "what the next start goes on from"
    flip(bad / "__0_0.distcp")
    assert main(["checkpoints", "verify", str(tmp_path)]) == 0
    assert "it is whole now" in " ".join(capsys.readouterr().out.split())
    assert newest_checkpoint(tmp_path) == str(bad)
    assert not (tmp_path / quarantine.FILE).exists()


def test_one_that_is_written_again_has_not_failed(tmp_path: Path) -> None:
    bad = a_checkpoint(tmp_path, step=2)
    place = place_for(bad)
    for _ in range(quarantine.LIMIT):
        quarantine.note_failure(place, 5, "it was damaged")
    assert quarantine.Quarantine().why(place, 5)
    assert not quarantine.Quarantine().why(place, 6)
    quarantine.note_failure(place, 6, "it was damaged")
    assert not quarantine.Quarantine().why(place, 6)
    quarantine.forgive(place)
    assert not (tmp_path / quarantine.FILE).exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"step=2.ckpt": 3}',
        '{"step=2.ckpt": {"count": 9}}',
        '{"step=2.ckpt": {"count": "9", "created_ns": 1, "fault": "x"}}',
        '{"step=2.ckpt": {"count": null, "created_ns": 1, "fault": "x"}}',
        '{"step=2.ckpt": {"count": Infinity, "created_ns": 1, "fault": "x"}}',
        '{"step=2.ckpt": {"count": 9, "created_ns": 1, "fault": ["x"]}}',
    ],
)
def test_a_count_that_says_nothing_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / quarantine.FILE).write_text(text)
    assert newest_checkpoint(tmp_path) is None
    place = place_for(a_checkpoint(tmp_path, step=2))
    assert newest_checkpoint(tmp_path) == place.path
    quarantine.note_failure(place, 1, "it was damaged")
    assert "it was damaged" in (tmp_path / quarantine.FILE).read_text()
