"""A save changes nothing in the training, nor training in the save; a failure is loud and loses nothing.

With each way of saving: shards of two ranks, one file from two ranks (sharded strategy and DDP), a single device.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_resilience import newest_checkpoint
from lightning_resilience.checkpoint.exchange import Alone
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.checkpoint.verify import choose
from tests.integration.fits import Fit, orders, result_of
from tests.integration.harmless import STRATEGIES, spoiled_dump
from tests.integration.ranks import Stem

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what we want of stock torch here

WIDE = 20_001  # about 3 MB of state


@pytest.fixture(scope="module")
def folder(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all scenarios have run."""
    folder = tmp_path_factory.mktemp("harmless")
    names = list(STRATEGIES)
    stem.run("tests.integration.harmless:main", str(folder), *names[:-1], ranks=2, folder=folder)
    stem.run("tests.integration.harmless:main", str(folder), names[-1], ranks=1, folder=folder)
    return folder


def found(folder: Path, strategy: str, scenario: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / strategy / "results.json").read_text())[scenario]
    assert "error" not in results, results["error"]
    return results


def contents(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint, as stock torch reads it."""
    if checkpoint.is_dir():
        whole = checkpoint.with_suffix(".whole")
        dcp_to_torch_save(checkpoint, whole)
        content: dict[str, Any] = torch.load(whole, weights_only=True)
        return {"state_dict": content["state_dict"], "optimizer": content["optimizer_0"].get("state", {})}
    content = torch.load(checkpoint, weights_only=True)
    return {"state_dict": content["state_dict"], "optimizer": content["optimizer_states"][0]["state"]}


# --- training and saves leave each other alone -------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_changes_after_the_call_is_not_in_the_checkpoint(folder: Path, strategy: str) -> None:
    assert found(folder, strategy, "changes_after_the_call") == {}
    expected = torch.load(spoiled_dump(folder, strategy), weights_only=True)
    saved = contents(folder / strategy / "spoiled.ckpt")
    assert saved["state_dict"].keys() == expected["model"].keys()
    for name, tensor in expected["model"].items():
        assert tensor.count_nonzero() > 0
        assert torch.equal(saved["state_dict"][name], tensor), name
    states = list(expected["optimizer"]["state"].values())
    assert len(states) == len(saved["optimizer"]) == 6
    for state in saved["optimizer"].values():
        assert any(
            all(state[key].shape == other[key].shape and torch.equal(state[key], other[key]) for key in other)
            for other in states
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_before_the_first_step_changes_nothing(folder: Path, strategy: str) -> None:
    result = found(folder, strategy, "before_the_first_step")
    assert len(set(result["losses"])) == 4
    assert result["losses_with_save"] == result["losses"]
    assert result["weights_equal"]
    assert result["optimizer_state"] == [0]
    assert result["saved"] == ["first.ckpt"]
    assert contents(folder / strategy / "first.ckpt")["optimizer"] == {}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_after_fit_is_durable_when_it_returns(folder: Path, strategy: str) -> None:
    assert found(folder, strategy, "after_fit") == {"found": "after.ckpt"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_top_two_and_last_are_exactly_what_is_there(folder: Path, strategy: str) -> None:
    result = found(folder, strategy, "top_two_and_last")
    assert result == {"names": ["last.ckpt", "step=2.ckpt", "step=4.ckpt"], "best": "step=2.ckpt", "last": "last.ckpt"}
    steps = {}
    for name in result["names"]:
        path = folder / strategy / "top" / name
        assert path.is_dir() == (strategy == "sharded")
        meta = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=True)
        steps[name] = meta["global_step"]
    assert steps == {"last.ckpt": 5, "step=2.ckpt": 2, "step=4.ckpt": 4}


def test_one_file_is_read_by_torch_and_resumed_from(stem: Stem, tmp_path: Path) -> None:
    for strategy, ranks in (("ddp", 2), ("single", 1)):
        whole = replace(STRATEGIES[strategy], folder=str(tmp_path / strategy), steps=6, every=3)
        saved = f"{whole.folder}/step=3.ckpt"
        again = replace(whole, name="again", every=0, resume=saved)
        stem.run("tests.integration.fits:main", orders(whole, again), ranks=ranks, folder=tmp_path)
        content = torch.load(saved, weights_only=True)
        assert content["global_step"] == 3
        assert len(content["optimizer_states"][0]["state"]) == 6
        first, second = result_of(whole).losses, result_of(again).losses
        assert sorted(second) == [4, 5, 6]
        assert second == {step: first[step] for step in (4, 5, 6)}


# --- failures ----------------------------------------------------------------------------------------------


class Failures(NamedTuple):
    """Fits whose saves fail, and what was printed."""

    sharded: Fit
    one_file: Fit
    read_only: Fit
    tiny: Fit
    output: str


@pytest.fixture(scope="module")
def failures(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failures]:
    """A disk that is full, as shards and as one file; one that is read-only; too little memory to stage in."""
    folder = tmp_path_factory.mktemp("failures")
    with ExitStack() as mounts:
        fit = Fit("", "", every=2, keep=1, width=WIDE, dump=str(folder))
        sharded = replace(fit, name="sharded", folder=mount(folder / "sharded", "size=5m", mounts))
        one_file = replace(fit, name="one_file", folder=mount(folder / "one_file", "size=5m", mounts), full=True)
        read_only = replace(fit, name="read_only", folder=mount(folder / "read_only", "size=5m,ro", mounts))
        shm = mount(folder / "shm", "size=1m", mounts)
        tiny = replace(fit, name="tiny", folder=str(folder / "tiny"), shm_dir=shm)
        fits = (sharded, one_file, read_only, tiny)
        output = stem.run("tests.integration.fits:main", orders(*fits), ranks=2, folder=folder)
        yield Failures(*fits, output)


def mount(path: Path, options: str, mounts: ExitStack) -> str:
    """A small memory file system."""
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    mounts.callback(lambda: subprocess.run(["umount", "--lazy", path], check=True))
    return str(path)


@pytest.mark.parametrize("kind", ["sharded", "one_file"])
def test_on_a_full_disk_training_ends_with_an_error_and_nothing_is_lost(failures: Failures, kind: str) -> None:
    fit = failures.sharded if kind == "sharded" else failures.one_file
    result = result_of(fit)
    assert sorted(result.losses) == [1, 2, 3, 4]
    assert result.error.startswith(f"SaveError: the last checkpoint, {fit.folder}/step=4.ckpt, was not saved: ")
    assert "the file system is full: free space" in result.error
    assert f"{fit.folder}/step=4.ckpt (step 4) was NOT saved: " in failures.output
    newest = newest_checkpoint(fit.folder)
    assert newest == f"{fit.folder}/step=2.ckpt"  # asked to be deleted, and kept because nothing took its place
    assert choose(place_for(newest), Alone(), fall_back=False).path == newest


@pytest.mark.parametrize("kind", ["sharded", "one_file"])
def test_a_save_that_failed_leaves_nothing_on_the_full_disk(failures: Failures, kind: str) -> None:
    fit = failures.sharded if kind == "sharded" else failures.one_file
    assert os.listdir(fit.folder) == ["step=2.ckpt"]


def test_a_directory_that_cannot_be_written_is_an_error_at_the_end(failures: Failures) -> None:
    result = result_of(failures.read_only)
    assert sorted(result.losses) == [1, 2, 3, 4]
    assert result.error.startswith(f"SaveError: the last checkpoint, {failures.read_only.folder}/step=4.ckpt, ")
    assert "the file system is mounted read-only" in result.error


def test_too_little_shared_memory_is_an_error_at_the_start_that_says_what_to_do(failures: Failures) -> None:
    result = result_of(failures.tiny)
    assert result.losses == {}
    assert result.error.startswith("ArenaError: staging checkpoints needs 0.0")
    for words in (failures.tiny.shm_dir, "--shm-size", "AsyncCheckpointIO(shm_dir=...)"):
        assert words in result.error
