"""Runs on each rank: a fit in which a rank is killed, stopped, or holds the interpreter's lock.

losses FOLDER FAULT, where the fault is JSON
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import torch

from tests.integration import restarts

PATIENT_S = 3.0
"""A rank that is stopped is lost after this, one that holds the lock after three times as long."""


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(format="%(levelname)s rank {RANK}: %(message)s".format_map(os.environ))
    folder = Path(sys.argv[1])
    begin = folder / "struck"
    run = restarts.Run("lost", [json.loads(sys.argv[2])], strategy={"hang_timeout": PATIENT_S})
    result = restarts.fit(run, folder, tell=lambda _: note(begin, str(time.time())))
    result["seconds"] = time.time() - float(begin.read_text())
    note(folder / f"result-{os.environ['RANK']}.json", json.dumps(result))


def note(path: Path, text: str) -> None:
    """Whoever finds the file finds all of it."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)
