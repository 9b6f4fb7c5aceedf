"""The command line, as a shell sees it: what it prints, what it returns, what it leaves on the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_resilience.checkpoint.engine import CheckpointEngine, EngineOptions
from lightning_resilience.checkpoint.envelope import archive
from lightning_resilience.checkpoint.manifest import read_seal
from lightning_resilience.checkpoint.storage import place_for
from lightning_resilience.cli import output
from lightning_resilience.cli.main import main
from tests.unit.test_consolidate import Hyper

STEPS = (10, 20, 30)


def meta(step: int, **more: Any) -> dict[str, Any]:
    full = {"callbacks": {"Best{'monitor': None}": {"score": torch.tensor(0.5)}}, "lr_schedulers": [{}]}
    return {"epoch": 1, "global_step": step, "pytorch-lightning_version": "2.6.6", "loops": {}, **full, **more}


def state(step: int) -> dict[str, Any]:
    return {
        "state_dict": {"model.weight": torch.full((40, 30), float(step)), "model.bias": torch.arange(4.0).half()},
        "optimizer_0": {
            "state": {"model.weight": {"exp_avg": torch.full((40, 30), step + 0.5), "step": torch.tensor(1.0 * step)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["model.weight", "model.bias"]}],
        },
    }


@pytest.fixture
def engine(tmp_path: Path) -> CheckpointEngine:
    (tmp_path / "shm").mkdir()
    return CheckpointEngine(EngineOptions(shm_dir=str(tmp_path / "shm")))


@pytest.fixture
def runs(tmp_path: Path, engine: CheckpointEngine) -> Path:
    """Three committed checkpoints."""
    folder = tmp_path / "runs"
    for step in STEPS:
        files = {"meta.pt": archive(meta(step, hyper_parameters={"width": 30})), "rank_0.pt": archive({})}
        engine.save_sharded(str(folder / f"step={step}.ckpt"), step, state(step), files)
        engine.wait()  # or a newer one would take the place of one that waits
    engine.close()
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    code = main(["checkpoints", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, Any]:
    code = main(["checkpoints", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_list_tells_what_each_is_and_which_is_the_newest(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = CheckpointEngine(EngineOptions(shm_dir=str(runs.parent / "shm")))
    engine.save_file(str(runs / "weights.ckpt"), 40, {"global_step": 40, "state_dict": {}})
    engine.close()
    torch.save({**meta(5), "state_dict": {}}, runs / "stock.ckpt")
    os.utime(runs / "stock.ckpt", (1, 1))
    (runs / ".step=50.ckpt.abc.incomplete").mkdir()
    code, found = run_json(capsys, "list", runs)
    assert code == 0
    assert set(found["checkpoints"][0]) == {
        *("path", "state", "weights_only", "newest", "step", "time", "bytes", "ranks", "fault")
    }
    lines = {Path(item["path"]).name: item for item in found["checkpoints"]}
    assert {name: (item["state"], item["step"], item["weights_only"]) for name, item in lines.items()} == {
        ".step=50.ckpt.abc.incomplete": ("unfinished", None, False),
        "weights.ckpt": ("committed", 40, True),
        "step=30.ckpt": ("committed", 30, False),
        "step=20.ckpt": ("committed", 20, False),
        "step=10.ckpt": ("committed", 10, False),
        "stock.ckpt": ("foreign", 5, False),
    }
    assert [name for name, item in lines.items() if item["newest"]] == ["step=30.ckpt"]  # not the weights
    assert list(lines)[-1] == "stock.ckpt"
    code, text = run(capsys, "list", runs)
    assert code == 0
    (newest,) = [line for line in text.splitlines() if "newest" in line]
    assert "step=30.ckpt" in newest
    assert "committed, weights only" in text


def test_a_missing_file_shows_in_the_list_and_a_flipped_byte_when_all_is_read(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(runs / "step=20.ckpt" / "__0_0.distcp")
    code, text = run(capsys, "list", runs)
    assert (code, text.count("committed")) == (0, 3)
    assert "not contents: `verify` reads every byte" in text
    code, text = run(capsys, "verify", runs)
    assert code == 1
    assert f"{runs}/step=20.ckpt/__0_0.distcp does not hold what was written" in text
    assert text.count("whole ") == 2
    (runs / "step=30.ckpt" / "meta.pt").unlink()
    code, text = run(capsys, "list", runs)
    assert code == 1
    assert f"damaged: {runs}/step=30.ckpt/meta.pt is missing" in text
    code, found = run_json(capsys, "verify", runs)
    assert code == 1
    assert [(item["step"], item["whole"]) for item in found["checkpoints"]] == [(None, False), (20, False), (10, True)]
    assert run(capsys, "verify", runs / "step=10.ckpt")[0] == 0
    code, found = run_json(capsys, "verify", runs, "--newest")
    assert (code, found["checkpoints"][0]["step"]) == (1, 20)


def test_checkpoints_of_other_tools_have_no_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({**meta(5), "state_dict": {"w": torch.ones(3)}}, tmp_path / "stock.ckpt")
    code, found = run_json(capsys, "verify", tmp_path)
    assert code == 0
    assert found["checkpoints"][0]["checksums"] is False
    assert "no checksums" in run(capsys, "verify", tmp_path)[1]


def test_nothing_there_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "list", tmp_path) == (1, f"no checkpoints in {tmp_path}\n")
    assert run(capsys, "verify", tmp_path)[0] == 1
    assert run(capsys, "show", tmp_path)[0] == 1
    code, text = run(capsys, "list", tmp_path / "typo")
    assert (code, "there is nothing at" in text) == (2, True)
    with pytest.raises(SystemExit) as stopped:
        run(capsys, "list")
    assert stopped.value.code == 2


def test_show_tells_what_is_in_the_newest(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = run_json(capsys, "show", runs)
    assert code == 0
    assert facts["step"] == 30
    assert facts["parts"]["model"] == {
        "tensors": 2,
        "elements": 1204,
        "bytes": 4808,
        "dtypes": ["float16", "float32"],
    }
    assert facts["optimizer_groups"] == [[{"lr": 0.1, "betas": [0.9, 0.99], "params": 2}]]
    assert facts["hyper_parameters"] == ["width"]
    assert facts["callbacks"] == ["Best{'monitor': None}"]
    assert facts["refused"] is None
    names = [tensor["name"] for tensor in facts["tensors"]]
    assert names == ["model.weight", "model.bias", "0.state.model.weight.exp_avg", "0.state.model.weight.step"]
    text = run(capsys, "show", runs / "step=10.ckpt")[1]
    assert "a group of 2 parameters: lr 0.1" in text
    assert "exp_avg" not in text
    assert "exp_avg" in run(capsys, "show", runs / "step=10.ckpt", "--all")[1]


def test_what_needs_trust_is_said_and_the_rest_is_shown(
    tmp_path: Path, engine: CheckpointEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"meta.pt": archive(meta(1, hyper_parameters={"object": Hyper()}))}
    engine.save_sharded(str(tmp_path / "a.ckpt"), 1, state(1), files)
    engine.close()
    code, text = run(capsys, "show", tmp_path / "a.ckpt")
    assert code == 0
    assert "model.weight" in text
    assert "Hyper" in text
    assert "--trust" in text
    assert "object" in run(capsys, "show", tmp_path / "a.ckpt", "--trust")[1]
    out = tmp_path / "out.ckpt"
    code, text = run(capsys, "consolidate", tmp_path / "a.ckpt", out)
    assert (code, "--trust" in text, out.exists()) == (3, True, False)
    assert run(capsys, "consolidate", tmp_path / "a.ckpt", tmp_path / "w.safetensors")[0] == 0  # holds no objects
    assert run(capsys, "consolidate", tmp_path / "a.ckpt", out, "--trust")[0] == 0


def test_consolidate_writes_what_torch_and_safetensors_load(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, weights = runs.parent / "plain.ckpt", runs.parent / "hf" / "model.safetensors"
    code, made = run_json(capsys, "consolidate", runs, plain)
    assert code == 0
    assert (made["step"], made["tensors"], made["bytes"]) == (30, 4, plain.stat().st_size)
    found = torch.load(plain, weights_only=True)
    assert torch.equal(found["state_dict"]["model.weight"], state(30)["state_dict"]["model.weight"])
    optimizer = found["optimizer_states"][0]
    assert optimizer["state"][0]["exp_avg"].eq(30.5).all()
    assert optimizer["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]
    assert found["hyper_parameters"] == {"width": 30}
    assert run(capsys, "consolidate", runs / "step=10.ckpt", weights, "--strip-prefix", "model.")[0] == 0
    assert {name: tensor.dtype for name, tensor in load_file(weights).items()} == {
        "weight": torch.float32,
        "bias": torch.float16,
    }
    code, text = run(capsys, "consolidate", runs, weights)
    assert (code, "--force" in text) == (2, True)
    assert run(capsys, "consolidate", runs, runs.parent / "plain.bin")[0] == 2
    assert run(capsys, "consolidate", runs, "s3://bucket/plain.ckpt")[0] == 2


def test_one_plain_file_can_be_verified_and_taken_apart_again(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = runs.parent / "plain.ckpt"
    run(capsys, "consolidate", runs / "step=20.ckpt", plain)
    assert run(capsys, "verify", plain)[0] == 0
    code, facts = run_json(capsys, "show", plain)
    assert (code, facts["step"], facts["parts"]["optimizer 0"]["tensors"]) == (0, 20, 2)
    again = runs.parent / "again.safetensors"
    assert run(capsys, "consolidate", plain, again)[0] == 0
    assert load_file(again)["model.weight"].eq(20).all()
    flip(plain)
    code, text = run(capsys, "consolidate", plain, again, "--force")
    assert (code, str(plain) in text) == (1, True)
    assert load_file(again)["model.weight"].eq(20).all()


def test_a_plain_file_beside_newer_checkpoints_is_not_the_newest(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "consolidate", runs / "step=10.ckpt", runs / "plain.ckpt")
    seal = read_seal(place_for(runs / "plain.ckpt"))
    assert seal is not None
    assert seal.step == 10
    found = run_json(capsys, "list", runs)[1]["checkpoints"]
    assert [item["step"] for item in found if item["newest"]] == [30]


@pytest.mark.parametrize("kind", [".ckpt", ".safetensors"])
def test_damage_that_is_found_while_copying_leaves_no_file(
    runs: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = runs.parent / "out"
    flip(runs / "step=30.ckpt" / "rank_0.pt")  # not even needed
    code, text = run(capsys, "consolidate", runs, out / f"plain{kind}")
    assert (code, "rank_0.pt does not hold what was written" in text) == (1, True)
    assert list(out.iterdir()) == []


def test_prune_deletes_what_no_policy_keeps_and_asks_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "prune", runs)[0] == 2
    code, text = run(capsys, "prune", runs, "--keep-latest", "1")
    assert (code, "--yes" in text) == (2, True)
    code, plan = run_json(capsys, "prune", runs, "--keep-latest", "1", "--keep-every", "20", "--dry-run")
    assert (code, [Path(path).name for path in plan["deleted"]]) == (0, ["step=10.ckpt"])
    assert len(list(runs.iterdir())) == 3
    (runs / "best.ckpt").symlink_to("step=10.ckpt")
    code, done = run_json(capsys, "prune", runs, "--keep-latest", "1", "--yes")
    assert (code, [Path(path).name for path in done["deleted"]]) == (0, ["step=20.ckpt"])
    assert sorted(path.name for path in runs.iterdir()) == ["best.ckpt", "step=10.ckpt", "step=30.ckpt"]
    assert run(capsys, "prune", runs, "--keep-latest", "0", "--yes")[0] == 2


def test_prune_wants_a_directory_of_checkpoints(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs.parent / "notes.txt").write_text("nothing")
    for path in (runs / "step=30.ckpt", runs.parent / "notes.txt"):
        code, text = run(capsys, "prune", path, "--keep-latest", "1", "--yes")
        assert (code, f"{path} is not a directory of checkpoints" in text.replace("\n", "")) == (2, True)
    assert len(list(runs.iterdir())) == 3


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_file_of_another_kind_is_called_that(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    code, text = run(capsys, command, tmp_path / "notes.txt")
    assert (code, "is no checkpoint, or a damaged one" in " ".join(text.split())) == (1, True)


@pytest.mark.parametrize("command", ["list", "verify", "show", "prune"])
@pytest.mark.parametrize("path", ["", " ", "a\0b", "x" * 300])
def test_a_path_that_cannot_be_is_refused(command: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, command, path)
    assert (code, "path" in text, "Traceback" in text) == (2, True, False)


def test_prune_deletes_nothing_while_the_one_that_stays_is_damaged(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(runs / "step=30.ckpt" / "__0_0.distcp")
    code, text = run(capsys, "prune", runs, "--keep-latest", "1", "--yes")
    assert (code, "nothing was deleted" in text) == (1, True)
    assert len(list(runs.iterdir())) == 3
    (runs / "step=30.ckpt" / "meta.pt").unlink()  # now it shows without reading, and does not count
    assert run(capsys, "prune", runs, "--keep-latest", "1", "--yes")[0] == 0
    assert sorted(path.name for path in runs.iterdir()) == ["step=20.ckpt", "step=30.ckpt"]


@pytest.mark.parametrize(("answer", "left"), [("y", 1), ("", 3)])
def test_prune_asks_whoever_sits_at_the_terminal(
    runs: Path, answer: str, left: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    run(capsys, "prune", runs, "--keep-latest", "1")
    assert len(list(runs.iterdir())) == left


def test_a_checkpoint_that_leads_out_of_its_directory_is_not_followed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out = runs / "step=30.ckpt", runs.parent / "out.safetensors"
    shard = checkpoint / "__0_0.distcp"
    shard.rename(runs.parent / "secret")
    shard.symlink_to(runs.parent / "secret")
    code, text = run(capsys, "consolidate", checkpoint, out)
    assert (code, "link" in text, out.exists()) == (3, True, False)
    (checkpoint / "manifest.json").unlink()  # now as if another tool had written it
    (checkpoint / "rank_0.pt").unlink()
    code, text = run(capsys, "consolidate", checkpoint, out)
    assert (code, "link" in text, out.exists()) == (3, True, False)
    assert run(capsys, "consolidate", checkpoint, out, "--trust")[0] == 0
    metadata = (checkpoint / ".metadata").read_bytes()
    (checkpoint / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../../secret"))
    code, text = run(capsys, "consolidate", checkpoint, out, "--trust", "--force")
    assert (code, "outside" in text) == (3, True)


def test_names_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(
        {**meta(5, hyper_parameters={"\x1b[2J": 1}), "state_dict": {"w\x1b]0;x\x07": torch.ones(1)}},
        tmp_path / "a.ckpt",
    )
    code, text = run(capsys, "show", tmp_path / "a.ckpt")
    assert code == 0
    assert "\x1b" not in text
    assert "\x07" not in text


def test_an_option_of_the_storage_is_json_where_it_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "list", tmp_path, "--storage-option", "secret")
    assert (code, "KEY=VALUE" in text, "secret" in text) == (2, True, False)
    assert (
        run(capsys, "list", tmp_path, "--storage-option", 'client_kwargs={"a": 1}', "--storage-option", "key=x")[0] == 1
    )


def in_a_shell(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("command", [["--help"], ["checkpoints", "--help"], ["checkpoints", "list", "."]])
def test_what_does_not_need_torch_does_not_import_it(command: list[str]) -> None:
    done = in_a_shell(
        "import sys; from lightning_resilience.cli.main import main\n"
        f"try: main({command!r})\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, 'rich' in sys.modules, file=sys.stderr)"
    )
    assert done.stderr.strip().endswith("False False")


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m lightning_resilience --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (99_960, "100 kB"), (16e9, "16.0 GB"), (3e15, "3000 TB")],
)
def test_sizes(count: int, text: str) -> None:
    assert output.size(count) == text
