"""The plan of a job on this machine, as the options make it. Pure, apart from asking how many devices there are."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntFlag

from lightning_resilience.errors import ConfigurationError


class Std(IntFlag):
    """Which of a rank's two outputs."""

    NONE = 0
    OUT = 1
    ERR = 2


class Way(Enum):
    """Where output goes."""

    CONSOLE = "console"
    FILE = "file"
    BOTH = "both"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is started, how often, and where its output goes.

    Attributes:
        command: What each rank runs.
        ranks: How many there are.
        run_id: Names the job.
        master_addr: Where ranks find each other.
        master_port: The same; 0 for any that is free.
        max_restarts: How often all ranks may be started anew.
        grace_s: How long ranks have to end after a signal before they are killed.
        exit_zero_on_preempt: Whether a stop after SIGTERM counts as success.
        log_dir: Where redirected output goes; None for a new directory below that for temporary files.
        redirects: By rank, what goes to files only.
        tee: By rank, what goes to files and to the console, line by line with the rank before it.
        shown: Ranks whose output the console shows; None for all.
        role: Stands before the rank in lines of the console.
        dry_run: Whether to print the plan and to start nothing.
    """

    command: tuple[str, ...]
    ranks: int
    run_id: str
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    max_restarts: int = 3
    grace_s: float = 30.0
    exit_zero_on_preempt: bool = False
    log_dir: str | None = None
    redirects: Mapping[int, Std] = field(default_factory=dict)
    tee: Mapping[int, Std] = field(default_factory=dict)
    shown: frozenset[int] | None = None
    role: str = "default"
    dry_run: bool = False

    @property
    def logs(self) -> bool:
        """Whether anything goes to files."""
        return any(self.way(rank, std) is not Way.CONSOLE for rank in range(self.ranks) for std in (Std.OUT, Std.ERR))

    def way(self, rank: int, std: Std) -> Way:
        """Where an output of a rank goes."""
        if self.shown is not None and rank not in self.shown:
            return Way.FILE
        if std & self.tee.get(rank, Std.NONE):
            return Way.BOTH
        return Way.FILE if std & self.redirects.get(rank, Std.NONE) else Way.CONSOLE

    def environment(self, rank: int, restarts: int, given: Mapping[str, str]) -> dict[str, str]:
        """What a rank finds in its environment: the variables that `torchrun` sets.

        Args:
            rank: Which.
            restarts: How many restarts there were.
            given: The environment of the launcher.
        """
        count, number = str(self.ranks), str(rank)
        made = {
            "LOCAL_RANK": number,
            "RANK": number,
            "GROUP_RANK": "0",
            "ROLE_RANK": number,
            "ROLE_NAME": self.role,
            "LOCAL_WORLD_SIZE": count,
            "WORLD_SIZE": count,
            "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": count,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": given.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        if self.ranks > 1 and "OMP_NUM_THREADS" not in given:
            made["OMP_NUM_THREADS"] = "1"
        return {**given, **made}

    def describe(self) -> str:
        """For people: one line a fact."""
        port = self.master_port or "any free port"
        lines = [
            f"run id        {self.run_id}",
            f"ranks         {self.ranks} on this machine, the only one",
            f"command       {' '.join(self.command)}",
            f"meeting at    {self.master_addr}, {port}; served by the launcher",
            f"restarts      up to {self.max_restarts}, each of all ranks",
            f"stop          SIGTERM is passed on; {self.grace_s:g} s later SIGKILL; exit code {self.stop_code}",
            f"output        {self._output()}",
        ]
        return "\n".join(lines)

    @property
    def stop_code(self) -> int:
        """The exit code after SIGTERM."""
        return 0 if self.exit_zero_on_preempt else 143

    def _output(self) -> str:
        return f"files in {self.log_dir or 'a new temporary directory'}" if self.logs else "the launcher's own"


def command_of(script: str, arguments: list[str], *, module: bool, no_python: bool) -> tuple[str, ...]:
    """What a rank runs, as `torchrun` puts it together."""
    if module and no_python:
        raise ConfigurationError("-m and --no-python exclude each other: a module is run by Python")
    if no_python:
        return (script, *arguments)
    return (sys.executable, "-u", *(("-m",) if module else ()), script, *arguments)


def only_one_node(nnodes: str, node_rank: str) -> None:
    """Refuse what needs several machines.

    Raises:
        ConfigurationError: More than one may take part, or the text is none.
    """
    least, _, most = nnodes.partition(":")
    try:
        numbers = int(least), int(most or least)
    except ValueError:
        raise ConfigurationError(f"--nnodes {nnodes}: a number, or MIN:MAX") from None
    if not 1 <= numbers[0] <= numbers[1]:
        raise ConfigurationError(f"--nnodes {nnodes}: at least 1, and the second number not below the first")
    if numbers[1] > 1:
        raise ConfigurationError(
            f"--nnodes {nnodes}: several nodes are not supported by this launcher yet. Use torchrun for them, with the"
            " same options; faults inside a process are recovered from there too"
        )
    if node_rank != "0":
        raise ConfigurationError(f"--node-rank {node_rank}: there is one node, of rank 0")


def outputs(option: str, text: str, ranks: int) -> dict[int, Std]:
    """Read ``3`` (all ranks) or ``0:1,1:2`` (rank:which), where 1 is stdout, 2 stderr and 3 both."""
    parts = [part.partition(":") for part in text.split(",")]
    try:
        if len(parts) == 1 and not parts[0][1]:
            return dict.fromkeys(range(ranks), _std(text))
        found = {int(rank): _std(which) for rank, _, which in parts}
    except ValueError:
        raise ConfigurationError(f"{option} {text}: 0 to 3, or RANK:0 to RANK:3 with commas") from None
    if any(not 0 <= rank < ranks for rank in found):
        raise ConfigurationError(f"{option} {text}: there are ranks 0 to {ranks - 1}")
    return {rank: found.get(rank, Std.NONE) for rank in range(ranks)}


def _std(text: str) -> Std:
    number = int(text)
    if not 0 <= number <= Std.OUT | Std.ERR:
        raise ValueError(text)
    return Std(number)


def rank_count(text: str) -> int:
    """Read ``--nproc-per-node``.

    Raises:
        ConfigurationError: It is no number and no kind of device that is there.
    """
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text == "cpu":
        return os.cpu_count() or 1
    if text not in ("auto", "gpu"):
        raise ConfigurationError(f"--nproc-per-node {text}: a number above 0, auto, gpu or cpu")
    import torch  # takes a second, and is needed for nothing else here

    devices = torch.cuda.device_count()
    if text == "gpu" and not devices:
        raise ConfigurationError("--nproc-per-node gpu: there is no CUDA device")
    return devices or os.cpu_count() or 1
