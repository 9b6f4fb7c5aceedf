"""A rank's process: it lives no longer than the launcher, and has a session of its own, so that Ctrl-C in a terminal
reaches it only through the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning_resilience.errors import ConfigurationError
from lightning_resilience.launcher.console import Tee

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

Sink = Tee | Path | None
"""Where an output goes: None for the launcher's own."""


class Rank:
    """A rank that runs.

    Args:
        rank: Its number.
        command: What it runs.
        environment: All of its environment.
        sinks: Where stdout and stderr go.

    Raises:
        ConfigurationError: The command cannot be run.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], sinks: tuple[Sink, Sink]
    ) -> None:
        self.rank = rank
        self.tees = [sink for sink in sinks if isinstance(sink, Tee)]
        with contextlib.ExitStack() as files:
            ends = [_end(sink, files) for sink in sinks]
            try:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=ends[0],
                    stderr=ends[1],
                    start_new_session=True,
                    preexec_fn=_dies_with(os.getpid()),
                )
            except OSError as error:
                raise ConfigurationError(f"{command[0]} cannot be run: {error}") from None
            finally:
                for tee in self.tees:
                    tee.started()

    @property
    def pid(self) -> int:
        """Of the process; valid until it is reaped."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal. The process is there, or has ended and was not reaped yet."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def reaped(self, code: int) -> None:
        """The launcher has waited for it."""
        self._process.returncode = code


def adopt_orphans() -> None:
    """What ranks leave behind becomes a child of this process, which can wait for it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Ids of this process's children, adopted ones too."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(folder.name))
    return found


def _end(sink: Sink, files: contextlib.ExitStack) -> int | None:
    if sink is None:
        return None
    return sink.writer if isinstance(sink, Tee) else files.enter_context(sink.open("wb")).fileno()


def _dies_with(launcher: int) -> Callable[[], None]:
    def in_child() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died in between
            os._exit(1)

    return in_child


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
