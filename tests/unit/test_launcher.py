"""What the launcher makes of its options, and of exits."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from typing import Any

import pytest

from lightning_resilience.errors import ConfigurationError
from lightning_resilience.launcher.cli import add_options, spec_from
from lightning_resilience.launcher.decide import Exit, GoOn, RestartAll, Stop, after_exit, code_after_stop
from lightning_resilience.launcher.spec import Spec, Std, Way

KILLED = Exit(rank=1, code=-signal.SIGKILL)


def spec(*arguments: str, **given: str) -> Spec:
    parser = argparse.ArgumentParser()
    add_options(parser, given)
    return spec_from(parser.parse_args(arguments))


def test_command_line_of_torchrun() -> None:
    line = "--standalone --nnodes=1:1 --nproc_per_node 2 --rdzv-id job --max-restarts=5 -m train.main --lr 3 --nnodes 4"
    plan = spec(*line.split())
    assert plan.command == (sys.executable, "-u", "-m", "train.main", "--lr", "3", "--nnodes", "4")
    assert (plan.ranks, plan.run_id, plan.max_restarts) == (2, "job", 5)


def test_environment_stands_in_for_options() -> None:
    plan = spec("train.py", PET_NPROC_PER_NODE="3", PET_EXIT_ZERO_ON_PREEMPT="1", PET_MODULE="0")
    assert plan.ranks == 3
    assert plan.exit_zero_on_preempt
    assert "-m" not in plan.command
    assert spec("--nproc-per-node", "2", "train.py", PET_NPROC_PER_NODE="3").ranks == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--nnodes 2 x.py", "several nodes are not supported by this launcher yet"),
        ("--nnodes many x.py", "a number, or MIN:MAX"),
        ("--nnodes 3:2 x.py", "not below the first"),
        ("--node-rank 1 x.py", "there is one node"),
        ("--nproc-per-node 0 x.py", "a number above 0"),
        ("--max-restarts -1 x.py", "0 to"),
        ("--max-restarts few x.py", "a whole number"),
        ("--grace nan x.py", "--grace nan"),
        ("--master-port 70000 x.py", "0 to 65535"),
        ("-m --no-python x", "exclude each other"),
        ("--tee 4 x.py", "--tee 4"),
        ("--redirects 7:1 x.py", "there are ranks 0 to 0"),
        ("--local-ranks-filter 1 x.py", "there are ranks 0 to 0"),
        ("--numa-binding node x.py", "--numa-binding is not supported"),
    ],
)
def test_options_that_cannot_work(arguments: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        spec(*arguments.split())


def test_where_output_goes() -> None:
    plan = spec("--nproc-per-node", "3", "--tee", "0:3", "--redirects", "1:2", "--local-ranks-filter", "0,1", "x.py")
    ways = [[plan.way(rank, std) for std in (Std.OUT, Std.ERR)] for rank in range(3)]
    assert ways == [[Way.BOTH, Way.BOTH], [Way.CONSOLE, Way.FILE], [Way.FILE, Way.FILE]]
    assert plan.logs
    assert not spec("x.py").logs


def test_environment_of_a_rank() -> None:
    plan = spec("--nproc-per-node", "2", "x.py")
    found = plan.environment(1, 2, {"PATH": "/bin"})
    expected = {"PATH": "/bin", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    expected |= {"GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "2", "OMP_NUM_THREADS": "1"}
    assert expected.items() <= found.items()
    assert plan.environment(0, 0, {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"


def decide(exit_: Exit, running: int = 1, restarts: int = 0) -> Any:
    return after_exit(exit_, running=running, restarts=restarts, max_restarts=2)


def test_decisions() -> None:
    assert decide(Exit(rank=0, code=0)) == GoOn()
    assert decide(Exit(rank=0, code=0), running=0) == Stop(0, "all ranks are done")
    assert decide(KILLED) == RestartAll(str(KILLED))
    assert decide(KILLED, restarts=1) == RestartAll(str(KILLED))
    assert decide(KILLED, restarts=2).code == 1
    assert decide(Exit(rank=0, code=143), restarts=2).code == 143


def test_exits_in_words() -> None:
    assert str(KILLED).startswith("rank 1 was killed by SIGKILL (the kernel does that too when memory runs out")
    assert str(Exit(rank=0, code=3)) == "rank 0 ended with code 3"
    assert str(Exit(rank=0, code=-40)) == "rank 0 was killed by signal 40"


def test_code_after_a_stop() -> None:
    stop = Stop(143, "stopped by SIGTERM")
    assert code_after_stop(stop, {0: 143, 1: -15}, exit_zero=False) == 143
    assert code_after_stop(stop, {0: 143, 1: -15}, exit_zero=True) == 0
    assert code_after_stop(stop, {0: 143, 1: -9}, exit_zero=True) == 143
    assert code_after_stop(Stop(1, "used up"), {0: 1}, exit_zero=True) == 1


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from lightning_resilience.cli.main import main\n"
        "try: main(['run', *sys.argv[1:]])\n"
        "finally: print('torch' in sys.modules)"
    )
    for arguments in (["--help"], ["--dry-run", "train.py"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout.endswith("False\n")
