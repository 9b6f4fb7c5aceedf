"""How fast a checkpoint is loaded and verified: ``python benchmarks/checkpoint_load.py``.

`README.md` beside it says what each figure means.
"""

from __future__ import annotations

from benchmarks.throughput.command import run
from benchmarks.throughput.plan import LOADS

if __name__ == "__main__":
    run("load", LOADS, target=0.6)
