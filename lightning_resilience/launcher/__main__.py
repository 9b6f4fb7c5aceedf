"""`python -m lightning_resilience.launcher`: the same as `lightning-resilience run`."""

from __future__ import annotations

import sys

from lightning_resilience.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
