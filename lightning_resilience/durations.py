"""Durations that a user passes: seconds or a timedelta."""

from __future__ import annotations

import math
from datetime import timedelta

from lightning_resilience.errors import ConfigurationError


def checked_seconds(value: float | timedelta, option: str, alternative: str = "") -> float:
    """The duration in seconds.

    Args:
        value: As passed by the user.
        option: What to call it in the error; has a place for the value, as in ``hang_timeout={}``.
        alternative: What else the option may be, for the error.

    Raises:
        ConfigurationError: It is none, or not a finite one above zero. NaN, for one, compares as false with
            everything, so a deadline of NaN would never come.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and seconds > 0 and math.isfinite(seconds):
        return float(seconds)
    raise ConfigurationError(f"{option.format(repr(value))}: seconds or a timedelta, more than 0{alternative}")
