"""`python -m lightning_resilience`: the same as the command `lightning-resilience`."""

from __future__ import annotations

import sys

from lightning_resilience.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
