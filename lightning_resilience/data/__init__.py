"""Where training stands in its data, and how to come back to it exactly."""

from __future__ import annotations

from lightning_resilience.data.install import (
    capture_rank_state,
    install,
    installed_loop,
    listen,
    mark_not_validated,
    stash_rank_state,
)

__all__ = ["capture_rank_state", "install", "installed_loop", "listen", "mark_not_validated", "stash_rank_state"]
