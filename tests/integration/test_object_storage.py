"""Training whose checkpoints lie in a bucket: a server that speaks S3, one request in ten of which fails."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_resilience.checkpoint.exchange import Alone
from lightning_resilience.checkpoint.reader import ShardReader
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.checkpoint.verify import choose
from tests.integration.bucket_fits import ALL, FIRST
from tests.integration.ranks import Stem
from tests.servers.s3 import BUCKET, SECRET, Fault, S3Server

SCENARIOS = ("uninterrupted", "stopped", "resumed_from_last", "resumed_from_newest", "root_directory")


def one_in_ten(dice: random.Random) -> Callable[[str, str], Fault | None]:
    """What Lightning itself asks, s3fs alone asks again, and only after a connection that was dropped.

    The first file of ours that is written fails three times in a row, whatever the dice say.
    """
    written: list[str] = []

    def decide(method: str, path: str) -> Fault | None:
        ours = ".ckpt" in path and method not in ("GET", "HEAD")
        written.extend([path] * ours)
        if ours and path == written[0] and written.count(path) <= 3:
            return "reset"
        faults: list[Fault] = ["reset", 500, 503] if ours else ["drop"]
        return dice.choice(faults) if dice.random() < 0.1 else None

    return decide


@pytest.fixture(scope="module")
def trained(stem: Stem, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All scenarios in one job on two ranks; what they found, printed, and left."""
    folder = tmp_path_factory.mktemp("bucket")
    s3_server.reset()
    s3_server.proxy.decide = one_in_ten(random.Random(1))
    options = {**s3_server.options, "config_kwargs": {"retries": {"max_attempts": 0}}}  # ours are tested
    stem.load("tests.integration.bucket_fits")
    output = stem.run(
        "tests.integration.bucket_fits:main",
        str(folder),
        f"s3://{BUCKET}",
        json.dumps(options),
        *SCENARIOS,
        ranks=2,
        folder=folder,
        timeout=250.0,
    )
    results = json.loads((folder / "results.json").read_text())
    left = {key: s3_server.get(key) for key in s3_server.keys()}
    return {**results, "output": output, "left": left, "failed": s3_server.proxy.failed, "uploads": s3_server.uploads()}


def scenario(trained: Any, name: str) -> Any:
    assert "error" not in trained[name], trained[name]["error"] + trained["output"][-5000:]
    return trained[name]


def losses(result: Any) -> dict[int, float]:
    return {int(step): loss for step, loss in result["losses"].items()}


def test_requests_did_fail(trained: Any) -> None:
    assert trained["failed"] > 20
    assert "Traceback" not in trained["output"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_ends(trained: Any, name: str) -> None:
    scenario(trained, name)


def test_last_on_a_bucket_goes_on_exactly(trained: Any) -> None:
    whole, first, second = (scenario(trained, name) for name in ("uninterrupted", "stopped", "resumed_from_last"))
    assert second["resumed"] == f"s3://{BUCKET}/run/last.ckpt" == first["last"]
    together = {**losses(first), **losses(second)}
    assert sorted(losses(second)) == list(range(FIRST, ALL + 1))
    assert together == losses(whole)
    assert second["weights"] == whole["weights"]


def test_newest_on_a_bucket(trained: Any) -> None:
    third = scenario(trained, "resumed_from_newest")
    assert third["resumed"].startswith(f"s3://{BUCKET}/run/")
    assert sorted(losses(third)) == list(range(ALL, ALL + 3))


def test_the_best_on_a_bucket_is_tested(trained: Any) -> None:
    """Not the weights that training has ended with, a step later."""
    third = scenario(trained, "resumed_from_newest")
    assert third["best"] == f"s3://{BUCKET}/run/step={ALL + 1}.ckpt"
    batch = (ALL + 1) % 3  # of the step after it
    assert third["tested"][batch] == losses(third)[ALL + 2]


def test_the_root_directory_may_be_a_bucket(trained: Any) -> None:
    found = scenario(trained, "root_directory")
    assert found["first"]["best"].startswith(f"s3://{BUCKET}/root/")
    assert found["last"]["resumed"].startswith(f"s3://{BUCKET}/root/")
    assert found["last"]["weights"] == scenario(trained, "uninterrupted")["weights"]


def test_nothing_local_is_made_of_a_url(trained: Any) -> None:
    assert not Path("s3:").exists()


def test_only_what_is_kept_is_left(trained: Any) -> None:
    """Two best and the last; no scaffolding, no files of a checkpoint that was replaced, no unfinished upload."""
    keys = [key.split("/") for key in trained["left"] if key.startswith("run/")]
    checkpoints = {parts[1] for parts in keys}
    assert checkpoints == {"last.ckpt", f"step={ALL - 1}.ckpt", f"step={ALL + 1}.ckpt"}
    for name in checkpoints:
        inside = {parts[2] for parts in keys if parts[1] == name}
        (folder,) = inside - {".metadata", "meta.pt", "manifest.json"}
        files = {parts[3] for parts in keys if parts[1:3] == [name, folder]}
        assert files == {"__0_0.distcp", "__1_0.distcp", ".metadata", "meta.pt", "rank_0.pt", "rank_1.pt"}
    assert trained["uploads"] == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what we want of stock dcp.load
def test_a_copy_on_a_disk_is_a_checkpoint_for_us_and_for_torch(trained: Any, tmp_path: Path) -> None:
    for key, data in trained["left"].items():
        if key.startswith("run/last.ckpt/"):
            path = tmp_path / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    copy = tmp_path / "run" / "last.ckpt"
    assert choose(place_for(copy), Alone(), fall_back=False) == place_for(copy)
    reader = ShardReader(place_for(copy))
    name = "state_dict.net.0.weight"
    ours, theirs = torch.empty(reader.tensor_shape(name) or ()), torch.empty(reader.tensor_shape(name) or ())
    reader.read_into({name: ours})
    load({name: theirs}, checkpoint_id=copy, no_dist=True)
    assert torch.equal(ours, theirs)
    assert ours.abs().sum() > 0


def test_nobody_saw_the_secret(trained: Any) -> None:
    assert "trying again" in trained["output"]
    assert SECRET not in trained["output"]
    assert not [key for key, data in trained["left"].items() if SECRET.encode() in data]
