"""The example as a user starts it: processes that are killed, a YAML file, a second start of the same command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.llama.step_log import read_events

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llama"


def run(script: str, *arguments: str, folder: Path) -> str:
    """Run a script of the example to its end; returns what it printed."""
    command = [sys.executable, str(EXAMPLE / script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # more spin, and are very slow, when the machine is busy
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def steps_of(events: list[dict[str, Any]]) -> list[int]:
    return [event["step"] for event in events if event["event"] == "step"]


@pytest.mark.timeout(280)
def test_two_ranks_that_fail_hang_and_are_killed_go_on_bit_for_bit(tmp_path: Path) -> None:
    output = run("demo.py", "--steps", "16", "--checkpoint-every", "6", "--kill-at", "11", folder=tmp_path)
    assert "rank 1 raises an exception after step 7" in output
    assert "rank 0 hangs after step 9" in output
    assert output.count("nothing is lost") == 2
    assert "resumes by itself from step 6" in output
    assert "bit for bit" in output


@pytest.mark.timeout(280)
def test_cli_with_the_yaml_file_resumes_by_itself(tmp_path: Path) -> None:
    def fit(steps: int) -> list[dict[str, Any]]:
        arguments = {
            "--config": EXAMPLE / "config.yaml",
            "--trainer.accelerator": "cpu",
            "--trainer.devices": 1,
            "--trainer.max_steps": steps,
            "--trainer.enable_progress_bar": "false",
            "--trainer.callbacks.every_n_train_steps": 3,
            "--data.limit_mb": 0.5,
            "--data.batch_size": 2,
        }
        flags = [f"{name}={value}" for name, value in arguments.items()]
        run("cli.py", "fit", *flags, folder=tmp_path)
        return read_events(tmp_path / "runs/llama-cli/steps.jsonl")

    first = fit(steps=6)
    assert steps_of(first) == [1, 2, 3, 4, 5, 6]
    second = fit(steps=8)[len(first) :]
    assert (second[0]["event"], second[0]["step"]) == ("start", 6)
    assert steps_of(second) == [7, 8]
