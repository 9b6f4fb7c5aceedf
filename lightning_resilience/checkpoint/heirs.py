"""Writers that wait for the end of this process, to make a checkpoint of its newest snapshot then.

A ``fit`` that an exception has ended may be called again in the same process, which then goes on from the snapshot
itself: until that happens, or the process ends, its writer stays.
"""

from __future__ import annotations

import logging

from lightning_resilience.checkpoint.writer import WriterClient

log = logging.getLogger(__name__)

_PATIENCE_S = 1.0

_waiting: dict[str, WriterClient] = {}


def leave(run: str, writer: WriterClient) -> None:
    """Let the writer wait for the end of this process. It has nothing else to do."""
    call_off(run)
    _waiting[run] = writer


def call_off(run: str) -> None:
    """This process goes on with the run, or has ended it well."""
    writer = _waiting.pop(run, None)
    if writer is not None:
        writer.close(_PATIENCE_S)
