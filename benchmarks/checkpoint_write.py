"""How fast a save becomes durable, beside writing the same bytes: ``python benchmarks/checkpoint_write.py``.

`README.md` beside it says what each figure means.
"""

from __future__ import annotations

from benchmarks.throughput.command import run
from benchmarks.throughput.plan import WRITES

if __name__ == "__main__":
    run("write", WRITES, target=0.8)
