"""Health checks: what they find, and that a healthy machine passes."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_resilience.errors import ConfigurationError
from lightning_resilience.restart import health
from lightning_resilience.restart.health import (
    DeviceResponds,
    FreeSpace,
    GpuHardware,
    MemoryReturned,
    NetworkLinks,
    checked,
    default_checks,
    failures,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def test_this_machine_is_healthy(tmp_path: Path) -> None:
    checks = default_checks(CPU, [tmp_path])
    for check in checks:
        check.begin()
    assert failures(checks) == []


class Failing:
    def begin(self) -> None: ...

    def check(self) -> str:
        raise ValueError("no such sensor")


def test_a_check_that_breaks_is_a_finding_and_does_not_hide_the_others(tmp_path: Path) -> None:
    found = failures([Failing(), FreeSpace([tmp_path], least_bytes=1 << 60)])
    assert found[0] == "Failing: failed with ValueError: no such sensor"
    assert found[1].startswith("FreeSpace: less than")
    assert str(tmp_path) in found[1]


def test_what_is_no_check_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no begin"):
        checked([FreeSpace([]), object()])  # type: ignore[list-item]


def test_shared_memory_that_was_full_from_the_start_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"full": 1 << 20, "roomy": 1 << 30}
    usage = lambda path: SimpleNamespace(free=free[Path(path).name])  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    check = FreeSpace([tmp_path / "full", tmp_path / "roomy"])
    check.begin()
    assert check.check() == ""
    free["roomy"] = 1 << 20
    assert check.check() == f"less than 64 MiB are free in {tmp_path / 'roomy'}"


def test_device_that_hangs_is_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    release, right = threading.Event(), torch.ones

    def hang(*args: Any, **kwargs: Any) -> torch.Tensor:
        release.wait(30)
        return right(16, 16)

    monkeypatch.setattr(torch, "ones", hang)
    assert "did not answer" in DeviceResponds(CPU, timeout_s=0.05).check()
    release.set()
    for thread in threading.enumerate():
        if thread.name == "health":
            thread.join()


def test_device_that_fails_or_errs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *args, **kwargs: 2 * right(16, 16))
    assert "computes wrong" in DeviceResponds(CPU).check()

    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch, "ones", fail)
    assert "unspecified launch failure" in DeviceResponds(CPU).check()


def test_memory_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 100 << 30

    monkeypatch.setattr(health, "cuda_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    used = 20 << 30
    check = MemoryReturned(CUDA, used=lambda device: used)
    check.begin()
    used = 29 << 30
    assert check.check() == ""
    used = 33 << 30
    assert check.check() == "13.00 GiB of cuda:0 are still held by what failed"


class FakeNvml:
    """A driver with one GPU of three links; the third was never connected."""

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_FEATURE_DISABLED, NVML_FEATURE_ENABLED = 0, 1
    NVML_NVLINK_MAX_LINKS = 4

    def __init__(self) -> None:
        self.errors: int | None = 2
        self.links = [1, 1, 0]
        self.present = True

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if not self.present:
            raise self.NVMLError
        return f"gpu{index}"

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        if self.errors is None:
            raise self.NVMLError
        return self.errors

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= len(self.links):
            raise self.NVMLError
        return self.links[link]


def test_gpu_errors_are_compared_with_the_start() -> None:
    nvml = FakeNvml()
    check = GpuHardware(0, nvml)
    check.begin()
    assert check.check() == ""
    nvml.errors = 3
    assert check.check() == "GPU 0 has had 1 uncorrectable memory errors"
    nvml.errors, nvml.links = 2, [1, 0, 0]
    assert check.check() == "GPU 0 has lost 1 NVLink connection(s)"
    nvml.present = False
    assert "does not find GPU 0" in check.check()


def test_gpu_without_ecc_passes() -> None:
    nvml = FakeNvml()
    nvml.errors = None
    check = GpuHardware(0, nvml)
    check.begin()
    assert check.check() == ""


def test_no_driver_passes() -> None:
    check = GpuHardware(0)  # the real library, on a machine that may have no driver
    check.begin()
    assert check.check() == ""


def network(root: Path, **states: str) -> None:
    for name, state in states.items():
        device = root / "net" / name
        device.mkdir(parents=True, exist_ok=True)
        (device / "operstate").write_text(f"{state}\n")


def port(root: Path, state: str) -> None:
    place = root / "infiniband" / "mlx5_0" / "ports" / "1"
    place.mkdir(parents=True, exist_ok=True)
    (place / "state").write_text(f"{state}\n")


def test_links_that_went_down_are_named(tmp_path: Path) -> None:
    network(tmp_path, eth0="up", eth1="down", lo="unknown")
    port(tmp_path, "4: ACTIVE")
    check = NetworkLinks(tmp_path)
    check.begin()
    assert check.check() == ""
    network(tmp_path, eth0="down")
    port(tmp_path, "1: DOWN")
    assert check.check() == "the network link eth0, mlx5_0/1 is down"
    network(tmp_path, eth0="up", eth1="up")
    port(tmp_path, "4: ACTIVE")
    assert check.check() == ""


def test_missing_directories_are_not_full(tmp_path: Path) -> None:
    assert FreeSpace([tmp_path / "not yet"], least_bytes=1 << 60).check() == ""
