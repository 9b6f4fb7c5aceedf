"""Runs as a process of its own, with everything imported, and forks the ranks of one job after another.

    python -m tests.integration.stem MODULE ...

Importing torch and Lightning takes longer than what most tests do with them. Each line of standard input is an
order in JSON (see `ranks.py`): to import something more, or to start a job, which is answered by the process ids.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the ranks; nobody here asks how they ended
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "import" in order:
            importlib.import_module(order["import"])
            print("imported", flush=True)
        else:
            print(json.dumps([_fork(order, rank) for rank in range(order["ranks"])]), flush=True)


def _fork(order: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        _run(order, rank)
    return pid


def _run(order: dict[str, Any], rank: int) -> None:
    """The rank: says how it ended in a file, and ends as any interpreter does."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _redirect(f"{order['output']}.{rank}.out")
    os.environ.update(order["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    code = 1
    try:
        module, function = order["call"].split(":")
        sys.argv = [module, *order["arguments"]]
        getattr(importlib.import_module(module), function)()
        code = 0
    except BaseException as error:  # the edge of the process: the test reads it
        traceback.print_exc()
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    with open(f"{order['output']}.{rank}.exit", "w") as file:
        file.write(str(code))
    sys.exit(code)


def _redirect(output: str) -> None:
    for path, flags, fds in ((os.devnull, os.O_RDONLY, (0,)), (output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, (1, 2))):
        opened = os.open(path, flags, 0o666)
        for fd in fds:
            os.dup2(opened, fd)
        os.close(opened)


if __name__ == "__main__":
    main()
