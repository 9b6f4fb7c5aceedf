"""The command line on an object store: the same answers, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_resilience import KeepLatest
from lightning_resilience.checkpoint.engine import CheckpointEngine, EngineOptions
from lightning_resilience.checkpoint.envelope import archive
from lightning_resilience.checkpoint.reader import ShardReader
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.cli.main import main
from tests.servers.s3 import S3Server
from tests.unit.test_cli_checkpoints import meta, state

FOLDER = "s3://bucket/run"


@pytest.fixture(scope="module")
def written(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The objects of three checkpoints, the oldest of them one file."""
    s3_server.reset()
    shm, options = tmp_path_factory.mktemp("shm"), s3_server.options
    engine = CheckpointEngine(EngineOptions(shm_dir=str(shm), on_busy="wait"))
    content = {**meta(10), "state_dict": state(10)["state_dict"]}
    engine.save_file(f"{FOLDER}/step=10.ckpt", 10, content, storage_options=options)
    for step in (20, 30):
        files = {"meta.pt": archive(meta(step))}
        engine.save_sharded(f"{FOLDER}/step={step}.ckpt", step, state(step), files, storage_options=options)
    engine.close()
    return {key: s3_server.get(key) for key in s3_server.keys()}


@pytest.fixture
def bucket(s3: S3Server, written: dict[str, bytes]) -> str:
    """The three checkpoints, as they were written."""
    for key, data in written.items():
        s3.put(key, data)
    return FOLDER


def options(s3: S3Server) -> list[str]:
    return [f"--storage-option={key}={json.dumps(value)}" for key, value in s3.options.items()]


def run(capsys: pytest.CaptureFixture[str], s3: S3Server, command: str, *arguments: str | Path) -> tuple[int, Any]:
    code = main(["checkpoints", command, *map(str, arguments), *options(s3), "--json"])
    text = capsys.readouterr().out
    return code, json.loads(text) if text else None


def test_the_questions_are_answered(
    s3: S3Server, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(capsys, s3, "list", bucket)
    assert code == 0
    assert [(item["step"], item["state"], item["newest"]) for item in found["checkpoints"]] == [
        (30, "committed", True),
        (20, "committed", False),
        (10, "committed", False),
    ]
    assert all(item["bytes"] > 5000 for item in found["checkpoints"])
    code, found = run(capsys, s3, "verify", bucket)
    assert code == 0
    assert all(item["whole"] and item["checksums"] for item in found["checkpoints"])
    code, facts = run(capsys, s3, "show", bucket)
    assert (code, facts["step"], facts["parts"]["model"]["tensors"]) == (0, 30, 2)
    assert run(capsys, s3, "show", f"{bucket}/step=10.ckpt")[1]["step"] == 10


def test_plain_weights_come_out(s3: S3Server, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, s3, "consolidate", bucket, tmp_path / "a.ckpt")[0] == 0
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]["model.weight"].eq(30).all()
    one_file = f"{bucket}/step=10.ckpt"
    assert run(capsys, s3, "consolidate", one_file, tmp_path / "b.safetensors")[0] == 0
    assert load_file(tmp_path / "b.safetensors")["model.weight"].eq(10).all()


def test_damage_is_named(s3: S3Server, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = next(key for key in s3.keys() if "step=30" in key and key.endswith("__0_0.distcp"))
    data = bytearray(s3.get(key))
    data[len(data) // 2] ^= 1
    s3.put(key, bytes(data))
    code, found = run(capsys, s3, "verify", bucket)
    assert code == 1
    assert "__0_0.distcp does not hold what was written" in found["checkpoints"][0]["faults"][0]
    assert run(capsys, s3, "consolidate", bucket, tmp_path / "a.ckpt")[0] == 1
    assert not (tmp_path / "a.ckpt").exists()
    assert run(capsys, s3, "prune", bucket, "--keep-latest", "1", "--yes")[0] == 1
    assert run(capsys, s3, "list", bucket)[1]["checkpoints"][2]["step"] == 10


def test_prune_and_retention_leave_nothing_of_what_they_delete(
    s3: S3Server, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, done = run(capsys, s3, "prune", bucket, "--keep-latest", "2", "--yes")
    assert (code, done["deleted"]) == (0, [f"{bucket}/step=10.ckpt"])
    (tmp_path / "shm").mkdir()
    engine = CheckpointEngine(EngineOptions(shm_dir=str(tmp_path / "shm"), on_busy="wait"))
    engine.save_sharded(
        f"{bucket}/step=40.ckpt", 40, state(40), {"meta.pt": archive(meta(40))}, storage_options=s3.options
    )
    engine.retain(bucket, [KeepLatest(2)], storage_options=s3.options)
    engine.close()
    assert {key.split("/")[1] for key in s3.keys()} == {"step=30.ckpt", "step=40.ckpt"}


def test_a_load_finds_the_shards_in_their_folder(s3: S3Server, bucket: str) -> None:
    reader = ShardReader(place_for(f"{bucket}/step=30.ckpt", s3.options))
    weight = torch.zeros(40, 30)
    reader.read_into({"state_dict.model.weight": weight})
    assert weight.eq(30).all()
    assert reader.value("optimizer_0.param_groups.0.lr", trust=False) == 0.1
