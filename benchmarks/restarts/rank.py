"""One training process: ``python -m benchmarks.restarts.rank PLAN``, with its place in ``RANK`` and ``WORLD_SIZE``."""

from __future__ import annotations

import sys

import torch

from benchmarks.restarts.plan import Plan


def main() -> None:
    """Train through all faults."""
    plan = Plan.decode(sys.argv[1])
    torch.set_num_threads(1)
    if plan.method == "ours":
        from benchmarks.restarts.ours import run
    else:
        from benchmarks.restarts.nvrx import run
    run(plan)


if __name__ == "__main__":
    main()
