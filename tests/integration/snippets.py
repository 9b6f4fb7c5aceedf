"""Runs in a process forked from the warm one: a piece of code, as if it were the script of an interpreter.

snippets CODE ARGUMENT ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """What is printed goes to the files ``out`` and ``err`` in the folder that is the first argument."""
    code, *arguments = sys.argv[1:]
    for fd, name in ((1, "out"), (2, "err")):
        opened = os.open(Path(arguments[0]) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(opened, fd)
        os.close(opened)
    sys.argv[1:] = arguments
    exec(compile(code, "snippet", "exec"), vars(sys.modules["__main__"]))  # names live until the interpreter ends
