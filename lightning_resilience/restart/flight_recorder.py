"""torch's own record of the last collectives, kept from being lost when the groups are closed after a hang."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning_resilience._torch_groups import flight_record

log = logging.getLogger(__name__)

DIRECTORY = "flight_recorder"


def keep_flight_record(directory: Path, generation: int, rank: int) -> Path | None:
    """Write it to `directory`, one file for each rank, as ``torchfrtrace DIRECTORY --prefix ...`` reads it.

    Does nothing where it is not switched on (``TORCH_FR_BUFFER_SIZE``, ``TORCH_NCCL_TRACE_BUFFER_SIZE``).

    Args:
        directory: Made if it is not there.
        generation: Tells records of several hangs apart.
        rank: Of this process.

    Returns:
        The file; None if none was written.
    """
    path = directory / f"hang_{generation}_rank_{rank}"
    try:
        record = flight_record()
        if record is None:
            return None
        directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(record)
    except (OSError, RuntimeError) as error:  # a record is never worth a restart
        log.warning("the flight recorder could not be kept in %s: %s", path, error)
        return None
    return path
