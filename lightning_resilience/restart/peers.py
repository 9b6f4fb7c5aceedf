"""The processes of other ranks, as far as this machine knows of them: alive, stopped, ended.

Two processes can see each other when they share a kernel and a table of process ids. A number alone is not enough: it
is given again to another process, so the time when the process began goes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

_STOPPED = "tT"
_ENDED = "ZXx"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs.

    Attributes:
        rank: Which.
        pid: Its process.
        host: Name of its machine, for people.
        machine: Names a kernel since it started, and a table of process ids in it.
        began: When the process began, in ticks of that kernel.
    """

    rank: int
    pid: int
    host: str
    machine: str
    began: int

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    def to_json(self) -> str:
        """For the control store; one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Place:
        """The inverse."""
        return cls(**json.loads(text))


def own_place(rank: int) -> Place:
    """Of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    machine = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    pid = os.getpid()
    _, began = _stat(pid) or ("", 0)
    return Place(rank=rank, pid=pid, host=socket.gethostname(), machine=machine, began=began)


class Neighbour:
    """A process on this machine. To be closed.

    Args:
        place: Of the process.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._fd: int | None = None
        with contextlib.suppress(OSError):  # gone already, or a kernel without them: `state` tells
            self._fd = os.pidfd_open(place.pid)

    def fileno(self) -> int | None:
        """Becomes readable when the process ends; None where the kernel has no such thing."""
        return self._fd

    @property
    def ended(self) -> bool:
        """Whether the process is no more."""
        return self.state in _ENDED

    @property
    def stopped(self) -> bool:
        """Whether somebody has stopped it: SIGSTOP, Ctrl-Z, a debugger."""
        return self.state in _STOPPED

    @property
    def state(self) -> str:
        """The kernel's letter for what it does; ``X`` when it is no more."""
        found = _stat(self.place.pid)
        if found is None or found[1] != self.place.began:
            return "X"
        if self._fd is not None and select.select([self._fd], [], [], 0)[0]:
            return "X"
        return found[0]

    def close(self) -> None:
        """Forget it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start of a process; see proc_pid_stat(5). The name before them may contain anything."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])
