"""Saves to remote storages through the whole path: plugin, arena, writer process, commit, load."""

from __future__ import annotations

import logging
import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_resilience import AsyncCheckpointIO, newest_checkpoint
from lightning_resilience.checkpoint.attempts import INCOMPLETE, sweep
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.errors import ConfigurationError, LoadError, NoValidCheckpointError, SaveError
from lightning_resilience.events import read_events
from tests.servers.s3 import BUCKET, SECRET, Fault, S3Server
from tests.servers.sftp import PASSWORD, SftpServer

BIG = 10 << 20  # floats: 40 MB, more than what is uploaded in one piece


@pytest.fixture
def shm(tmp_path: Path) -> str:
    (tmp_path / "shm").mkdir()
    return str(tmp_path / "shm")


def state(step: int, size: int = 1000) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"w": torch.full((size,), float(step))}}


def holds(plugin: AsyncCheckpointIO, path: str, step: int) -> bool:
    found = plugin.load_checkpoint(path)
    return found["global_step"] == step and bool(found["state_dict"]["w"].eq(step).all())


# --- in memory -------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.mark.filterwarnings("ignore:.*exists and is not empty", "ignore:.*does not have many workers")
def test_a_trainer_in_memory(memory: str, shm: str) -> None:
    def fit(steps: int, ckpt_path: str | None) -> Trainer:
        trainer = Trainer(
            accelerator="cpu",
            default_root_dir=memory,
            plugins=[AsyncCheckpointIO(shm_dir=shm)],
            callbacks=[
                ModelCheckpoint(every_n_train_steps=2, save_top_k=2, monitor="step", mode="max", save_last=True)
            ],
            max_steps=steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(BoringModel(), ckpt_path=ckpt_path)
        return trainer

    fit(4, "last")  # there is none yet
    newest = newest_checkpoint(memory)
    assert newest is not None
    assert newest.startswith(f"{memory}/checkpoints/")
    second = fit(8, "last")
    assert second.global_step == 8
    assert str(second.ckpt_path) == f"{memory}/checkpoints/last.ckpt"
    names = {Path(path).name for path in fsspec.filesystem("memory").ls(f"{memory}/checkpoints", detail=False)}
    assert names == {"epoch=0-step=6.ckpt", "epoch=0-step=8.ckpt", "last.ckpt"}
    second.test(ckpt_path="best", verbose=False)


def test_memory_of_one_process_is_no_place_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_resilience.checkpoint_io._world_size", lambda: 2)
    with pytest.raises(ConfigurationError, match="the memory of one process, and this job has several"):
        AsyncCheckpointIO().save_checkpoint(state(1), "memory://a.ckpt")


def test_what_is_removed_from_memory_is_gone_and_a_failure_is_reported(memory: str, shm: str) -> None:
    plugin = AsyncCheckpointIO(shm_dir=shm)
    for step in (1, 2):
        plugin.save_checkpoint(state(step), f"{memory}/{step}.ckpt")
    plugin.remove_checkpoint(f"{memory}/1.ckpt")
    assert newest_checkpoint(memory) == f"{memory}/2.ckpt"
    assert holds(plugin, f"{memory}/2.ckpt", 2)
    fsspec.filesystem("memory").pipe_file(f"{memory}/3.ckpt/meta.pt", b"")
    plugin.save_checkpoint(state(3), f"{memory}/3.ckpt")
    with pytest.raises(SaveError, match="a sharded checkpoint of this name is there"):
        plugin.teardown()


# --- S3 --------------------------------------------------------------------------------------------------------


def test_big_files_go_in_parts_and_failing_parts_go_again(s3: S3Server, shm: str) -> None:
    plugin = AsyncCheckpointIO(shm_dir=shm, storage_options=s3.options)
    s3.proxy.fail_next(3, "PUT .*partNumber=2", "reset")
    path = f"s3://{BUCKET}/run/a.ckpt"
    plugin.save_checkpoint(state(1, BIG), path)
    assert holds(plugin, path, 1)
    assert s3.proxy.seen["PUT part"] == 3
    assert s3.proxy.failed == 3
    plugin.teardown()
    assert s3.keys() == ["run/a.ckpt"]


@pytest.mark.parametrize(
    ("fault", "own_retries"),
    [(503, 0), (500, 0), (500, 4)],
    ids=["s3fs tries again", "we try again", "botocore tries again"],
)
def test_whoever_tries_again_it_is_counted(
    s3: S3Server, shm: str, fault: Fault, own_retries: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**s3.options, "config_kwargs": {"retries": {"max_attempts": own_retries}}}
    plugin = AsyncCheckpointIO(shm_dir=shm, storage_options=options, events=str(tmp_path / "events.jsonl"))
    s3.proxy.fail_next(2, "PUT", fault)
    caplog.set_level(logging.INFO)
    plugin.save_checkpoint(state(1), f"s3://{BUCKET}/run/a.ckpt")
    plugin.save_checkpoint(state(2), f"s3://{BUCKET}/run/b.ckpt")
    plugin.teardown()
    assert [report.retried for report in plugin.history] == [s3.proxy.failed, 0] == [2, 0]
    saved = [event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "checkpoint_saved"]
    assert [event["retried"] for event in saved] == [2, 0]
    assert "2 request(s) tried again" in caplog.text


def test_a_writer_killed_while_it_uploads_shows_nothing_and_is_succeeded(s3: S3Server, shm: str) -> None:
    plugin = AsyncCheckpointIO(shm_dir=shm, storage_options=s3.options)
    path = f"s3://{BUCKET}/run/a.ckpt"
    killed: list[int] = []

    def kill_at_the_third_part(method: str, target: str) -> None:
        if "partNumber=3" in target and not killed:
            assert plugin._engine is not None
            killed.append(plugin._engine.writer_pid)
            os.kill(killed[0], signal.SIGKILL)

    s3.proxy.decide = kill_at_the_third_part
    plugin.save_checkpoint(state(1, BIG), path)
    deadline = time.monotonic() + 60.0
    while not killed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert killed
    plugin.wait(path)
    assert holds(plugin, path, 1)
    assert s3.uploads() == []  # also that of the first writer
    plugin.teardown()
    assert s3.keys() == ["run/a.ckpt"]


def test_the_next_run_sweeps_what_killed_ones_left(s3: S3Server) -> None:
    place = place_for(f"s3://{BUCKET}/run", s3.options)
    fs = fsspec.filesystem("s3", **s3.options)
    for key in ("run/a.ckpt", "run/b.ckpt/attempt-1/__0_0.distcp", "run/a.ckpt2"):
        fs.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)
    for name in ("a.ckpt", "b.ckpt"):
        owner = b'{"host": "gone", "pid": 1, "target": "%s", "attempt": "1"}' % name.encode()
        (place / f".{name}.1{INCOMPLETE}" / "rank_0.owner").put(owner)
    (place / "b.ckpt" / "attempt-1" / "__1_0.distcp").put(b"data")
    sweep(place, now=time.time() + 7200, before=time.time() - 3600)  # begun since: not ours to judge
    assert len(s3.uploads()) == 3
    sweep(place, now=time.time() + 7200, before=time.time() + 60)
    assert s3.keys() == []
    assert s3.uploads() == ["run/a.ckpt2"]  # nobody's that we know of
    place.storage.forget_uploads(f"s3://{BUCKET}/run", float("inf"))


def test_a_failure_that_lasts_fails_the_save_and_shows_no_secret(
    s3: S3Server, shm: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    plugin = AsyncCheckpointIO(shm_dir=shm, storage_options={**s3.options, "key": "someone-else"})
    s3.proxy.decide = lambda method, path: 403 if method == "PUT" else None
    path = f"s3://{BUCKET}/run/a.ckpt"
    plugin.save_checkpoint(state(1), path)
    with pytest.raises(SaveError, match=r"injected AccessDenied: s3://bucket/run/.* \(check the credentials") as caught:
        plugin.teardown()
    shown = caplog.text + "".join(capfd.readouterr()) + str(caught.value) + repr(plugin.history) + repr(plugin)
    assert "NOT saved" in shown
    assert "Traceback" not in shown  # the writer ended well
    assert SECRET not in shown
    assert "someone-else" not in shown.replace("Credential=someone-else", "")  # botocore's own debug lines
    s3.proxy.calm()
    assert s3.keys() == []


def test_a_secret_that_is_wrong_is_no_first_start(s3: S3Server) -> None:
    s3.proxy.decide = lambda method, path: 403
    with pytest.raises(PermissionError, match="could not"):
        newest_checkpoint(f"s3://{BUCKET}/run", storage_options=s3.options)


def test_options_of_one_save_hold_for_its_path(s3: S3Server, shm: str) -> None:
    plugin = AsyncCheckpointIO(shm_dir=shm, storage_options={"anon": True, "endpoint_url": "http://127.0.0.1:9"})
    path = f"s3://{BUCKET}/run/a.ckpt"
    plugin.save_checkpoint(state(1), path, storage_options=s3.options)
    assert holds(plugin, path, 1)
    plugin.remove_checkpoint(path)
    plugin.teardown()
    assert s3.keys() == []


def test_damage_on_a_bucket_is_found_and_the_one_before_is_used(
    s3: S3Server, shm: str, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = AsyncCheckpointIO(shm_dir=shm, storage_options=s3.options)
    for step in (1, 2):
        plugin.save_checkpoint(state(step), f"s3://{BUCKET}/run/{step}.ckpt")
    plugin.wait()
    data = bytearray(s3.get("run/2.ckpt"))
    data[len(data) // 2] ^= 1
    s3.put("run/2.ckpt", bytes(data))
    assert holds(plugin, f"s3://{BUCKET}/run/2.ckpt", 2) is False
    assert "DAMAGED CHECKPOINT" in caplog.text
    s3.put("run/1.ckpt", bytes(data[:100]))
    with pytest.raises(NoValidCheckpointError):
        plugin.load_checkpoint(f"s3://{BUCKET}/run/2.ckpt")
    plugin.teardown()


def test_last_where_nothing_is_called_last_is_an_error(s3: S3Server, shm: str) -> None:
    plugin = AsyncCheckpointIO(shm_dir=shm, storage_options=s3.options)
    plugin.save_checkpoint(state(1), f"s3://{BUCKET}/run/1.ckpt")
    plugin.teardown()
    trainer = Trainer(
        accelerator="cpu",
        plugins=[AsyncCheckpointIO(shm_dir=shm, storage_options=s3.options)],
        callbacks=[ModelCheckpoint(f"s3://{BUCKET}/run")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=1,
    )
    with pytest.raises(LoadError, match=r"no checkpoint of that name in s3://bucket/run, but there is .*1\.ckpt"):
        trainer.fit(BoringModel(), ckpt_path="last")


def test_nothing_syncs_the_whole_machine(s3: S3Server, shm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's fsspec writer does for each of its files (pytorch 183878)."""

    def sync() -> None:
        raise AssertionError("os.sync")

    monkeypatch.setattr(os, "sync", sync)
    place_for(f"s3://{BUCKET}/a", s3.options).write(b"1")
    place_for(f"{shm}/a").write(b"1")


# --- SFTP ------------------------------------------------------------------------------------------------------


def test_a_file_server(sftp: SftpServer, shm: str) -> None:
    (sftp.root / "run").mkdir()
    plugin = AsyncCheckpointIO(shm_dir=shm, storage_options=sftp.options)
    for step in (1, 2):
        plugin.save_checkpoint(state(step), f"{sftp.url}/run/{step}.ckpt")
    plugin.save_checkpoint(state(3), f"{sftp.url}/run/2.ckpt")
    plugin.remove_checkpoint(f"{sftp.url}/run/1.ckpt")
    plugin.teardown()
    assert newest_checkpoint(f"{sftp.url}/run", storage_options=sftp.options) == f"{sftp.url}/run/2.ckpt"
    assert holds(plugin, f"{sftp.url}/run/2.ckpt", 3)
    assert os.listdir(sftp.root / "run") == ["2.ckpt"]


def test_a_connection_that_breaks_is_made_anew(sftp: SftpServer, caplog: pytest.LogCaptureFixture) -> None:
    place = place_for(sftp.url, sftp.options) / "a"
    place.put(b"1")
    before = sftp.connections
    sftp.drop_connections()
    assert place.read() == b"1"
    assert sftp.connections == before + 1
    assert "trying again" in caplog.text
    assert PASSWORD not in caplog.text


def test_a_password_in_a_url_is_refused_without_showing_it(sftp: SftpServer) -> None:
    with pytest.raises(ConfigurationError, match="holds a password") as caught:
        newest_checkpoint(f"sftp://someone:{PASSWORD}@127.0.0.1:{sftp.port}/run")
    assert PASSWORD not in str(caught.value)


def test_a_url_that_nothing_here_knows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot use nonsense://"):
        newest_checkpoint("nonsense://a/b")


@pytest.mark.parametrize(
    "url",
    [
        "simplecache::s3://bucket/run",
        "dir::memory://run",
        "https://host/run",
        "zip://run::s3://bucket/a.zip",
        "github://repository/run",
    ],
)
def test_what_cannot_hold_checkpoints_is_refused_before_training(url: str, shm: str) -> None:
    """Also where fsspec would take the bytes and lose them, or hide from a rank what another has written."""
    trainer = Trainer(
        accelerator="cpu",
        plugins=[AsyncCheckpointIO(shm_dir=shm)],
        callbacks=[ModelCheckpoint()],
        default_root_dir=url,
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = BoringModel()
    before = model.layer.weight.clone()
    with pytest.raises(ConfigurationError, match="Checkpoints go to local paths, s3://"):
        trainer.fit(model)
    assert model.layer.weight.equal(before)
