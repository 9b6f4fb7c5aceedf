"""The door: what the package exports, and that opening it costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lightning_resilience


def test_exports_exactly_the_public_names() -> None:
    assert lightning_resilience.__all__ == [
        "AsyncCheckpointIO",
        "KeepEvery",
        "KeepLatest",
        "ResilientFSDPStrategy",
        "ResilientModelCheckpoint",
        "RestartPolicy",
        "load_weights",
        "newest_checkpoint",
    ]
    for name in lightning_resilience.__all__:
        assert getattr(lightning_resilience, name).__name__ == name
        assert name in dir(lightning_resilience)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'AsyncCheckpoint'"):
        lightning_resilience.AsyncCheckpoint  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    [
        "import lightning_resilience",
        "from lightning_resilience import newest_checkpoint",
        "import lightning_resilience.checkpoint.writer_process",
    ],
)
def test_these_imports_do_not_load_torch(statement: str) -> None:
    code = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
