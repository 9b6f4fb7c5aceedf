"""How a writer process is started. Runs in the training process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_MODULE = "lightning_resilience.checkpoint.writer_process"


def start_writer(fd: int) -> subprocess.Popen[bytes]:
    """Start one in a session of its own, so that Ctrl-C in the terminal does not reach it.

    Args:
        fd: Its end of the connection.
    """
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    ourselves = os.pidfd_open(os.getpid())  # opened here: the rank may be dead before the writer has started
    try:
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(fd), str(ourselves)],
            pass_fds=(fd, ourselves),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    finally:
        os.close(ourselves)
