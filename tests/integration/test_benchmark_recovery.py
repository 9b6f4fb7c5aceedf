"""The benchmark runs and its figures follow from the notes. It asserts no duration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.restarts.plan import Plan
from benchmarks.restarts.report import Outcome, outcome, targets

_ROOT = Path(__file__).parents[2]


def test_a_job_recovers_and_has_a_row(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/recovery.py", "--ranks", "2", "--faults", "2", "--large", "0"]
    done = subprocess.run(
        [*command, "--kinds", "exception", "--methods", "ours", "--json", str(report)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    (job,) = json.loads(report.read_text())["jobs"]
    assert job["failure"] == "", job["failure"]
    assert len(job["stood_still_s"]) == len(job["noticed_s"]) == 2
    assert job["redone"] == 0
    assert {"unblock", "rebuild", "restore"} <= set(job["phases_s"])
    assert "no step redone: 0.00  met" in done.stdout


def _plan(directory: Path) -> Plan:
    return Plan(method="nvrx", kind="hang", ranks=2, millions=1, faults=1, deadline_s=2.0, directory=str(directory))


def _note(directory: Path, rank: int, *notes: tuple[str, int, float]) -> None:
    lines = [json.dumps({"what": what, "step": step, "at": at}) for what, step, at in notes]
    (directory / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")


def test_training_stands_still_until_the_slowest_rank_is_done(tmp_path: Path) -> None:
    _note(tmp_path, 0, ("step", 4, 9.9), ("fault", 5, 10.0), ("noticed", -1, 12.5), ("step", 5, 13.0))
    _note(tmp_path, 1, ("step", 4, 10.1), ("noticed", -1, 12.4), ("step", 5, 13.5), ("step", 4, 13.6))
    found = outcome(_plan(tmp_path), "")
    assert found.stood_still_s == (3.5,)
    assert [round(seconds, 6) for seconds in found.noticed_s] == [2.4]
    assert found.recovery_s == 1.5
    assert found.failure == ""


def test_a_fault_that_did_not_strike_is_a_failure(tmp_path: Path) -> None:
    assert outcome(_plan(tmp_path), "").failure == "only 0 of 1 faults struck"


def test_targets_compare_recoveries_after_the_deadline() -> None:
    def of(method: str, still_s: float) -> Outcome:
        return Outcome(
            method=method,
            kind="hang",
            ranks=2,
            millions=1,
            deadline_s=5.0,
            step_s=0.1,
            stood_still_s=(still_s,),
            noticed_s=(5.5,),
            phases_s={},
            redone=0,
        )

    lines = targets([of("ours", 5.25), of("nvrx-tuned", 5.75)])
    assert "hang, 2 ranks, 1 M: recovery <= 0.5 s: 0.25 s met" in lines
    assert "hang, 2 ranks, 1 M: noticed within 1.2 x the deadline: 1.10 x met" in lines
    assert any("at least 2 x faster" in line and line.endswith("3.00 x met") for line in lines)
