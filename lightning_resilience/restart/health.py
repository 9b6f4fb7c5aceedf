"""Is this rank fit to go on? Asked after a fault, before the ranks meet again.

A check remembers what was normal when training began and compares. Its answer is a text: empty when all is well.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from lightning_resilience._torch import cuda_in_use, nvml_index
from lightning_resilience.errors import ConfigurationError


class HealthCheck(Protocol):
    """One question about the health of a rank; users can bring their own.

    ``begin`` is called once, on the training thread, before the first batch. ``check`` is called on the training
    thread of every rank at every restart, after the process groups are gone: it must not communicate, and should
    take milliseconds. Whatever it raises counts as a failed check.
    """

    def begin(self) -> None:
        """Remember what is normal."""
        ...

    def check(self) -> str:
        """What is wrong, in words for the user; empty when nothing is."""
        ...


def checked(checks: Sequence[HealthCheck] | None) -> Sequence[HealthCheck] | None:
    """The option `health_checks`.

    Raises:
        ConfigurationError: Something in it is no check.
    """
    for check in checks or ():
        if not (callable(getattr(check, "begin", None)) and callable(getattr(check, "check", None))):
            raise ConfigurationError(f"health_checks: {check!r} has no begin() and check(); see HealthCheck.")
    return checks


def begin(checks: Sequence[HealthCheck]) -> None:
    """Let all checks remember what is normal."""
    for check in checks:
        check.begin()


def failures(checks: Sequence[HealthCheck]) -> list[str]:
    """What all checks find, each after its name; empty for a healthy rank."""
    return [f"{type(check).__name__}: {found}" for check in checks if (found := _outcome(check))]


def _outcome(check: HealthCheck) -> str:
    try:
        return check.check()
    except Exception as error:  # a user's check is an edge: whatever breaks in it is its finding
        return f"failed with {type(error).__name__}: {error}"


class DeviceResponds:
    """The device still computes, and computes right.

    Args:
        device: The device of this rank.
        timeout_s: Seconds it may take; a device that hangs does not answer at all.
    """

    def __init__(self, device: torch.device, timeout_s: float = 10.0) -> None:
        self._device = device
        self._timeout_s = timeout_s

    def begin(self) -> None:
        """Nothing to remember."""

    def check(self) -> str:
        """See :class:`HealthCheck`."""
        outcome: list[str] = []
        worker = threading.Thread(target=lambda: outcome.append(self._compute()), name="health", daemon=True)
        worker.start()
        worker.join(self._timeout_s)
        return outcome[0] if outcome else f"{self._device} did not answer within {self._timeout_s:.0f} s"

    def _compute(self) -> str:
        try:
            ones = torch.ones(16, 16, device=self._device)
            total = float((ones @ ones).sum())
        except RuntimeError as error:
            return f"{self._device} does not compute: {error}"
        return "" if total == 16.0**3 else f"{self._device} computes wrong: {total} instead of {16.0**3}"


class MemoryReturned:
    """The failed step has given its device memory back, so that repeating it will not run out.

    Args:
        device: The device of this rank; only CUDA devices are looked at.
        tolerance: Part of the device's memory by which more may be in use than when training began.
        used: Bytes in use on a device, without what is there to stay; by default what torch's allocator says.
    """

    def __init__(
        self, device: torch.device, tolerance: float = 0.1, used: Callable[[torch.device], int] | None = None
    ) -> None:
        self._device = device
        self._tolerance = tolerance
        self._used = used or torch.cuda.memory_allocated
        self._normal = 0

    def begin(self) -> None:
        """Parameters are there; gradients, optimizer state and activations are not."""
        self._normal = self._used(self._device) if self._applies else 0

    def check(self) -> str:
        """See :class:`HealthCheck`."""
        if not self._applies:
            return ""
        total = torch.cuda.get_device_properties(self._device).total_memory
        excess = self._used(self._device) - self._normal
        if excess <= self._tolerance * total:
            return ""
        return f"{excess / 2**30:.2f} GiB of {self._device} are still held by what failed"

    @property
    def _applies(self) -> bool:
        return self._device.type == "cuda" and cuda_in_use()


@dataclass(frozen=True)
class _Gpu:
    """Counters of a GPU that only grow when something breaks."""

    uncorrected: int
    links_down: int


class GpuHardware:
    """The driver reports no new uncorrectable memory errors and no lost NVLink of this rank's GPU.

    Args:
        index: Index of the GPU as the driver counts.
        nvml: The NVML library; by default ``pynvml``, and where that finds no driver the check passes.
    """

    def __init__(self, index: int, nvml: Any | None = None) -> None:
        self._index = index
        self._nvml = nvml
        self._normal: _Gpu | None = None

    def begin(self) -> None:
        """Errors of the past are not ours."""
        self._normal = self._read()

    def check(self) -> str:
        """See :class:`HealthCheck`."""
        if self._normal is None:
            return ""
        now = self._read()
        if now is None:
            return f"the driver does not find GPU {self._index} any more (see 'Xid' in dmesg)"
        if now.uncorrected > self._normal.uncorrected:
            return f"GPU {self._index} has had {now.uncorrected - self._normal.uncorrected} uncorrectable memory errors"
        if now.links_down > self._normal.links_down:
            return f"GPU {self._index} has lost {now.links_down - self._normal.links_down} NVLink connection(s)"
        return ""

    def _read(self) -> _Gpu | None:
        nvml = self._library()
        if nvml is None:
            return None
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(self._index)
        except nvml.NVMLError:
            return None
        return _Gpu(_uncorrected(nvml, handle), _links_down(nvml, handle))

    def _library(self) -> Any | None:
        if self._nvml is None:
            import pynvml

            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError:
                return None
            self._nvml = pynvml
        return self._nvml


def _uncorrected(nvml: Any, handle: Any) -> int:
    try:
        return int(
            nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        )
    except nvml.NVMLError:  # a GPU without ECC
        return 0


def _links_down(nvml: Any, handle: Any) -> int:
    down = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            down += nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_DISABLED
        except nvml.NVMLError:  # no such link
            continue
    return down


class NetworkLinks:
    """Network and InfiniBand links that were up when training began are up.

    Args:
        sysfs: Where the kernel shows its devices; tests pass their own.
    """

    def __init__(self, sysfs: Path = Path("/sys/class")) -> None:
        self._sysfs = sysfs
        self._normal: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Links that are down already are not used."""
        self._normal = self._up()

    def check(self) -> str:
        """See :class:`HealthCheck`."""
        down = sorted(self._normal - self._up())
        return f"the network link {', '.join(down)} is down" if down else ""

    def _up(self) -> frozenset[str]:
        ethernet = {path.parent.name for path in self._sysfs.glob("net/*/operstate") if _says(path, "up")}
        infiniband = {
            f"{path.parents[2].name}/{path.parent.name}"
            for path in self._sysfs.glob("infiniband/*/ports/*/state")
            if _says(path, "4: ACTIVE")
        }
        return frozenset(ethernet | infiniband)


def _says(path: Path, text: str) -> bool:
    try:
        return path.read_text().strip() == text
    except OSError:  # unplugged while we look
        return False


class FreeSpace:
    """There is room for what training writes: logs, checkpoints, staged state.

    Args:
        directories: Where to look; those that do not exist (any more, or yet) are passed over.
        least_bytes: How much must be free in each.
    """

    def __init__(self, directories: Sequence[str | os.PathLike[str]], least_bytes: int = 64 << 20) -> None:
        self._directories: tuple[str | os.PathLike[str], ...] = tuple(directories)
        self._least = least_bytes

    def begin(self) -> None:
        """What is full already, such as shared memory that was all taken up, is passed over."""
        self._directories = tuple(path for path in self._directories if not self._is_full(path))

    def check(self) -> str:
        """See :class:`HealthCheck`."""
        full = [os.fspath(path) for path in self._directories if self._is_full(path)]
        return f"less than {self._least >> 20} MiB are free in {', '.join(full)}" if full else ""

    def _is_full(self, path: str | os.PathLike[str]) -> bool:
        try:
            return shutil.disk_usage(path).free < self._least
        except FileNotFoundError:
            return False


def default_checks(
    device: torch.device,
    directories: Sequence[str | os.PathLike[str]],
    used: Callable[[torch.device], int] | None = None,
) -> list[HealthCheck]:
    """What is checked unless the user says otherwise.

    Args:
        device: The device of this rank.
        directories: Where it writes.
        used: See :class:`MemoryReturned`.
    """
    checks: list[HealthCheck] = [DeviceResponds(device), NetworkLinks(), FreeSpace(directories)]
    if device.type == "cuda":
        checks += [MemoryReturned(device, used=used), GpuHardware(nvml_index(device))]
    return checks
