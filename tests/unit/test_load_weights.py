"""`load_weights`: all of it, a part of it, under other names; and nothing by mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_resilience import load_weights
from lightning_resilience.errors import ConfigurationError, LoadError, MismatchedCheckpointError
from tests.unit.test_restore import a_module, assert_equal_state, each_format, trained, write_file


class Bigger(nn.Module):
    """What was pre-trained, under another name, and a new head."""

    def __init__(self, head: int) -> None:
        super().__init__()
        self.backbone = a_module()
        self.head = nn.Linear(2, head)


def state_of(module: Any) -> dict[str, Any]:
    return {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


@each_format
def test_all_weights_without_the_optimizer(tmp_path: Path, write: Any) -> None:
    module, optimizer = trained()
    path = write(tmp_path / "a.ckpt", module, optimizer)
    fresh = a_module()
    report = load_weights(fresh, path)
    assert_equal_state(state_of(fresh), state_of(module))
    assert report.path == str(path)
    assert report.loaded == sorted(module.state_dict())
    assert report.missing == report.unused == []


@each_format
def test_under_other_names_into_a_part(tmp_path: Path, write: Any) -> None:
    module, _ = trained()
    path = write(tmp_path / "a.ckpt", module)
    fresh = Bigger(head=5)
    head = fresh.head.weight.clone()
    with pytest.raises(MismatchedCheckpointError, match=r"Missing in it: head\.bias, head\.weight"):
        load_weights(fresh, path, rename={"backbone.": ""})
    assert not fresh.head.weight.isnan().any()
    load_weights(fresh, path, rename={"backbone.": ""}, only="backbone.*")
    assert_equal_state(state_of(fresh.backbone), state_of(module))
    assert torch.equal(fresh.head.weight, head)
    other = Bigger(head=5)
    report = load_weights(other, path, rename={"backbone.": ""}, strict=False)
    assert report.missing == ["head.bias", "head.weight"]
    assert_equal_state(state_of(other.backbone), state_of(module))


@each_format
def test_from_a_bigger_checkpoint(tmp_path: Path, write: Any) -> None:
    torch.manual_seed(1)
    big = Bigger(head=7)
    path = write(tmp_path / "a.ckpt", big)
    small = Bigger(head=3)
    with pytest.raises(MismatchedCheckpointError, match=r"head\.weight \(7, 2\) instead of \(3, 2\)"):
        load_weights(small, path)
    report = load_weights(small, path, only=["backbone.0.*", "backbone.2.*"])
    assert torch.equal(small.backbone[2].weight, big.backbone[2].weight)
    assert "head.weight" in report.unused
    part = a_module()
    load_weights(part, path, rename={"": "backbone."})
    assert_equal_state(state_of(part), state_of(big.backbone))


def test_the_newest_of_a_directory(tmp_path: Path) -> None:
    module, _ = trained()
    path = write_file(tmp_path / "a.ckpt", module)
    assert load_weights(a_module(), tmp_path).path == str(path)


def test_mistakes_are_told(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.ckpt", trained()[0])
    with pytest.raises(ConfigurationError, match=r"only='encoder\.\*'\) matches nothing in Sequential"):
        load_weights(a_module(), path, only="encoder.*")
    with pytest.raises(ConfigurationError, match=r"on the meta device .* `on_fit_start`"):
        load_weights(nn.Linear(2, 2, device="meta"), path)
    with pytest.raises(MismatchedCheckpointError, match="nothing under the names that Linear asks for: weight, bias"):
        load_weights(nn.Linear(2, 2), path, strict=False)
    with pytest.raises(LoadError, match="there is no checkpoint"):
        load_weights(a_module(), tmp_path / "b.ckpt")
