"""What to do about a fault: a pure function of the fault, what happened before, and what the user allows.

Every rank calls it with the same values and so comes to the same answer; nothing here communicates or raises.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

from lightning_resilience.durations import checked_seconds
from lightning_resilience.errors import ConfigurationError

_ALWAYS_FATAL = (
    "builtins.KeyboardInterrupt",
    "builtins.SystemExit",
    "lightning.fabric.utilities.exceptions.MisconfigurationException",
    "lightning_resilience.errors.ResilienceError",  # a verdict, reached when nothing else could be done
)
_BROKEN_CONTEXT = (  # after these every later call into CUDA fails in the same process
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "uncorrectable ECC error",
    "hardware stack error",
    "context is destroyed",
)
_LONGEST_MESSAGE = 2000
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What went wrong, as every rank hears of it.

    Attributes:
        kind: An exception left a hook; a section's deadline passed; a process is gone; a health check failed.
        rank: Where it happened; the suspect if that is not known for sure.
        step: Optimizer steps that are committed on all ranks.
        section: What the rank was doing.
        types: Full names of the exception's class and its bases, most special first; empty for other kinds.
        message: Text of the exception, or how the rank was found.
        where: File, line and function, innermost last.
        at_s: When, in seconds since the epoch: ranks of several machines share no other clock.
    """

    kind: Literal["exception", "hang", "lost", "unhealthy"]
    rank: int
    step: int
    section: str = ""
    types: tuple[str, ...] = ()
    message: str = ""
    where: str = ""
    at_s: float = 0.0

    @property
    def title(self) -> str:
        """The fault in a few words, for a log line."""
        if self.kind == "exception":
            name = self.types[0].removeprefix("builtins.") if self.types else "an exception"
            first_line = self.message.partition("\n")[0]
            return f"{name}: {first_line}" if first_line else name
        return self.message or {"hang": "no progress", "lost": "the process is gone"}.get(self.kind, self.kind)

    def repeats(self, other: Fault) -> bool:
        """Whether it is the same fault at the same step; numbers in the text, such as addresses, may differ."""
        return self._identity == other._identity

    @property
    def _identity(self) -> tuple[object, ...]:
        return self.kind, self.step, self.types[:1], _VARYING.sub("#", self.message)


def exception_fault(error: BaseException, *, rank: int, step: int, section: str = "", at_s: float = 0.0) -> Fault:
    """The fault that this exception is."""
    types = tuple(_full_name(cls) for cls in type(error).__mro__ if cls is not object)
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = " > ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
    return Fault(
        kind="exception",
        rank=rank,
        step=step,
        section=section,
        types=types,
        message=str(error)[:_LONGEST_MESSAGE],
        where=where,
        at_s=at_s,
    )


@dataclass(frozen=True)
class RestartInProcess:
    """Every rank goes on in its process."""


@dataclass(frozen=True)
class RespawnRank:
    """This rank needs a new process; the others go on in theirs."""

    rank: int
    reason: str


@dataclass(frozen=True)
class DropRank:
    """This rank is out for good; the others go on without it."""

    rank: int
    reason: str


@dataclass(frozen=True)
class GiveUp:
    """The fault ends the run."""

    reason: str


Action: TypeAlias = RestartInProcess | RespawnRank | DropRank | GiveUp


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How often, and after which faults, ``fit`` goes on.

    Exceptions are named by class, or by name as in YAML: ``"OSError"``, ``"torch.OutOfMemoryError"``; subclasses
    count too. ``KeyboardInterrupt``, ``SystemExit``, errors of configuration and
    this package's own always end the run.

    Args:
        max_restarts: Restarts within ``window``; None for any number.
        max_restarts_without_progress: Restarts in a row between which no optimizer step was completed.
        window: Seconds (or a timedelta) after which a restart no longer counts; None to count all of the run.
        retry_on: Exceptions after which to go on.
        never_retry: Exceptions that end the run, even if ``retry_on`` covers them.
        max_faults_per_rank: Faults of one rank within ``window`` after which it is replaced, if there is a launcher
            that can, or else ends the run. None for any number.
        first_step_escalates: A fault in the first step after a restart means that this process cannot be trusted:
            replace it, if there is a launcher that can.
        min_world_size: Go on with fewer ranks, down to this many, when one is lost for good: its process is gone, or
            cannot be used any more. None to need all. Whoever has started the ranks must not end the others then.
        keep_global_batch: With fewer ranks accumulate more batches, where that divides evenly, so that an
            optimizer step sees as many samples as before; where it does not, as many as fit.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    max_restarts: int | None = 100
    max_restarts_without_progress: int = 3
    window: float | timedelta | None = None
    retry_on: Sequence[type[BaseException] | str] = (Exception,)
    never_retry: Sequence[type[BaseException] | str] = ()
    max_faults_per_rank: int | None = None
    first_step_escalates: bool = True
    min_world_size: int | None = None
    keep_global_batch: bool = True

    def __post_init__(self) -> None:
        _check_count("max_restarts", self.max_restarts, least=0, optional=True)
        _check_count("max_restarts_without_progress", self.max_restarts_without_progress, least=0)
        _check_count("max_faults_per_rank", self.max_faults_per_rank, least=1, optional=True)
        _check_count("min_world_size", self.min_world_size, least=1, optional=True)
        for flag in ("first_step_escalates", "keep_global_batch"):
            if not isinstance(getattr(self, flag), bool):
                raise ConfigurationError(f"RestartPolicy({flag}={getattr(self, flag)!r}): True or False")
        for argument in ("retry_on", "never_retry"):
            object.__setattr__(self, argument, _names(argument, getattr(self, argument)))
        object.__setattr__(self, "window", _window(self.window))

    def decide(self, fault: Fault, earlier: Sequence[Fault], *, can_respawn: bool = False) -> Action:
        """What to do about ``fault``.

        Args:
            fault: What happened now.
            earlier: The faults of this run that were recovered from, oldest first.
            can_respawn: Whether somebody can replace a process.
        """
        if reason := self._why_fatal(fault, earlier):
            return GiveUp(reason)
        if reason := self._why_unusable(fault, earlier):
            if can_respawn:
                return RespawnRank(fault.rank, reason)
            if self.min_world_size is not None:
                return DropRank(fault.rank, reason)
            return GiveUp(f"{reason}, and nothing here can replace that process")
        if can_respawn and (reason := self._why_suspicious(fault, earlier)):
            return RespawnRank(fault.rank, reason)
        return RestartInProcess()

    def _why_fatal(self, fault: Fault, earlier: Sequence[Fault]) -> str:
        recent = self._recent(fault, earlier)
        if fault.kind == "exception" and not self._retries(fault.types):
            return f"{fault.title} is not to be retried"
        if fault.kind not in ("lost", "unhealthy") and any(fault.repeats(other) for other in earlier):
            return f"this fault repeats at step {fault.step}; it is not transient"
        if self.max_restarts is not None and len(recent) >= self.max_restarts:
            return f"{_times(len(recent), 'restart')} so far, and max_restarts={self.max_restarts}"
        stuck = _at_the_same_step(fault, earlier)
        if stuck >= self.max_restarts_without_progress:
            return f"{_times(stuck, 'restart')} at step {fault.step} brought no progress"
        return ""

    def _why_unusable(self, fault: Fault, earlier: Sequence[Fault]) -> str:
        """What rules out that the process of the rank goes on."""
        if fault.kind == "lost":
            return fault.title
        if fault.kind == "unhealthy":
            return f"rank {fault.rank} is not fit to go on ({fault.message}; mend that and start the job again)"
        if breaks_context(fault):
            return "the error leaves the device context of its process unusable"
        own = sum(other.rank == fault.rank for other in self._recent(fault, earlier)) + 1
        if self.max_faults_per_rank is not None and own > self.max_faults_per_rank:
            return f"{_times(own, 'fault')} of rank {fault.rank}, and max_faults_per_rank={self.max_faults_per_rank}"
        return ""

    def _why_suspicious(self, fault: Fault, earlier: Sequence[Fault]) -> str:
        """What makes a new process the better try, where one can be had."""
        if self.first_step_escalates and earlier and earlier[-1].step == fault.step:
            return f"rank {fault.rank} failed again in the first step after a restart"
        return ""

    def _retries(self, types: Sequence[str]) -> bool:
        names = (*_ALWAYS_FATAL, *map(str, self.never_retry))
        return not _covers(names, types) and _covers(map(str, self.retry_on), types)

    def _recent(self, fault: Fault, earlier: Sequence[Fault]) -> list[Fault]:
        if self.window is None:
            return list(earlier)
        assert isinstance(self.window, float)
        return [other for other in earlier if other.at_s >= fault.at_s - self.window]


def breaks_context(fault: Fault) -> bool:
    """Whether the process's device context is beyond repair."""
    is_device_error = "CUDA" in fault.message or any("AcceleratorError" in name for name in fault.types)
    return is_device_error and any(text in fault.message for text in _BROKEN_CONTEXT)


def _at_the_same_step(fault: Fault, earlier: Sequence[Fault]) -> int:
    count = 0
    for other in reversed(earlier):
        if other.step != fault.step:
            break
        count += 1
    return count


def _times(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _covers(wanted: Iterable[str], types: Sequence[str]) -> bool:
    """A bare name means a builtin exception or any class of that name."""
    return any(
        name == full or ("." not in name and full.rpartition(".")[2] == name) for name in wanted for full in types
    )


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _names(argument: str, values: object) -> tuple[str, ...]:
    if isinstance(values, (str, type)) or not isinstance(values, Iterable):
        raise ConfigurationError(f"RestartPolicy({argument}={values!r}): a list of exception classes or their names")
    return tuple(_name(argument, value) for value in values)


def _name(argument: str, value: object) -> str:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, type) and issubclass(value, BaseException):
        return _full_name(value)
    raise ConfigurationError(f"RestartPolicy({argument}=...): {value!r} is neither an exception class nor its name")


def _check_count(argument: str, value: object, *, least: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        none = " or None" if optional else ""
        raise ConfigurationError(f"RestartPolicy({argument}={value!r}): a whole number, {least} or more{none}")


def _window(value: float | timedelta | None) -> float | None:
    return None if value is None else checked_seconds(value, "RestartPolicy(window={})", ", or None")
