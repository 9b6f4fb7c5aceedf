"""From a sharded run to plain weights, by the commands of the README: Lightning, torch and transformers load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import LlamaForCausalLM

from lightning_resilience.cli.main import main
from tests.integration.plain_job import TinyLlama, config, loader
from tests.integration.ranks import Stem

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # what stock torch's own tool says
    pytest.mark.filterwarnings("ignore:.*(does not have many workers|exists and is not empty).*"),
]


@pytest.fixture(scope="module")
def folder(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have trained."""
    folder = tmp_path_factory.mktemp("plain")
    stem.run("tests.integration.plain_job:main", str(folder), ranks=2, folder=folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """The newest checkpoint, as torch's own tool reads it."""
    dcp_to_torch_save(newest(folder), folder / "torch.pt")
    content: dict[str, Any] = torch.load(folder / "torch.pt", weights_only=True)
    return content


def newest(folder: Path) -> Path:
    (only,) = (folder / "runs").iterdir()  # retention keeps one
    return only


def checkpoints(*arguments: str | Path) -> int:
    return main(["checkpoints", *map(str, arguments)])


def test_all_ranks_have_the_same_interval_and_one_checkpoint_stays(folder: Path) -> None:
    intervals = [int((folder / f"interval-{rank}").read_text()) for rank in range(2)]
    assert intervals[0] == intervals[1]
    assert newest(folder).name in ("step=20.ckpt", "step=30.ckpt", "step=40.ckpt")  # as measured; 10 was not the last


def test_the_three_questions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoints("list", folder / "runs") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "newest" in line]
    assert "committed" in line
    assert newest(folder).name in line
    assert checkpoints("verify", folder / "runs") == 0
    assert "whole" in capsys.readouterr().out
    assert checkpoints("show", folder / "runs") == 0
    text = capsys.readouterr().out
    assert "written by 2 rank(s)" in text
    assert "ResilientModelCheckpoint" in text
    assert "model.model.embed_tokens.weight" in text


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided.*")
def test_lightning_loads_one_plain_file_and_goes_on_from_it(folder: Path, expected: dict[str, Any]) -> None:
    plain = folder / "plain.ckpt"
    assert checkpoints("consolidate", folder / "runs", plain) == 0
    model = TinyLlama.load_from_checkpoint(plain)
    assert model.state_dict().keys() == expected["state_dict"].keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected["state_dict"][name]), name
    seen: dict[str, Any] = {}

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen["step"] = trainer.global_step
            seen["optimizer"] = {
                name: trainer.optimizers[0].state[parameter]["exp_avg"].clone()
                for name, parameter in pl_module.named_parameters()
            }

    trainer = L.Trainer(
        max_steps=50,
        accelerator="cpu",
        devices=1,
        callbacks=[Look()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(TinyLlama(), loader(), ckpt_path=plain)
    assert trainer.global_step == 50
    assert f"step={seen['step']}.ckpt" == newest(folder).name
    for name, value in seen["optimizer"].items():
        assert torch.equal(value, expected["optimizer_0"]["state"][name]["exp_avg"]), name


def test_transformers_load_safetensors(folder: Path, expected: dict[str, Any]) -> None:
    hub = folder / "hf"
    assert checkpoints("consolidate", newest(folder), hub / "model.safetensors", "--strip-prefix", "model.") == 0
    config().save_pretrained(hub)
    loaded: Any = LlamaForCausalLM.from_pretrained(hub, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected["state_dict"][f"model.{name}"]), name
