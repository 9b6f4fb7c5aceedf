"""What people see: lines of the launcher, and the output of ranks where it is redirected."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

from lightning_resilience.launcher.spec import Spec, Std, Way

_CHUNK = 1 << 16


def say(text: str) -> None:
    """One line of the launcher's own."""
    print(f"lightning-resilience: {text}", file=sys.stderr, flush=True)


class Tee:
    """One output of one rank, to a file and to the console, line by line with the rank before it.

    Args:
        prefix: Stands before each line.
        file: Where it goes too.
        console: File descriptor of the launcher's own output.
    """

    def __init__(self, prefix: str, file: Path, console: int) -> None:
        self._prefix = prefix.encode()
        self._file: BinaryIO = file.open("wb", buffering=0)
        self._console = console
        self._rest = b""
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def started(self) -> None:
        """The rank has its end; the launcher needs it no more."""
        os.close(self.writer)

    def pump(self) -> bool:
        """Pass on what there is; False at the end. Never blocks on the rank."""
        try:
            data = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return True
        self._file.write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._print(lines)
        return bool(data)

    def close(self) -> None:
        """Pass on the rest. Processes that the rank has left behind may still hold the other end."""
        while self.pump():
            if not self._ready():
                break
        self._print([self._rest] if self._rest else [])
        self._file.close()
        os.close(self.reader)

    def _ready(self) -> bool:
        import select

        return bool(select.select([self.reader], [], [], 0)[0])

    def _print(self, lines: list[bytes]) -> None:
        text = b"".join(self._prefix + line + b"\n" for line in lines)
        while text:
            text = text[os.write(self._console, text) :]


class Outputs:
    """The files and pipes of a job.

    Args:
        spec: Of the job.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.directory: Path | None = None
        if spec.logs:
            above = spec.log_dir or tempfile.mkdtemp(prefix="lightning-resilience-")
            Path(above).mkdir(parents=True, exist_ok=True)
            self.directory = Path(tempfile.mkdtemp(prefix=f"{spec.run_id}_", dir=above))

    def of(self, rank: int, attempt: int, std: Std) -> Tee | Path | None:
        """Where an output of a rank goes: None for the launcher's own."""
        way = self._spec.way(rank, std)
        if way is Way.CONSOLE:
            return None
        assert self.directory is not None
        folder = self.directory / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / ("stdout.log" if std is Std.OUT else "stderr.log")
        if way is Way.FILE:
            return file
        return Tee(f"[{self._spec.role}{rank}]:", file, (sys.stdout if std is Std.OUT else sys.stderr).fileno())
