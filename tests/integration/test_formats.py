"""What one strategy writes another one reads: with stock Lightning in both directions, and on any number of ranks.

Every writer trains six steps and saves at the third; every reader resumes from there. A reader must start with the
writer's weights and optimizer state, as torch's own tools see them, and then compute the writer's losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.integration.fits import Fit, dump_of, orders, result_of
from tests.integration.ranks import Stem

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what we want of stock torch here

SAVED_AT, STEPS = 3, 6
CALL = "tests.integration.fits:main"

WRITERS = {
    "ours": Fit("ours", "ours"),
    "ours, one file": Fit("ours_file", "ours_file", full=True),
    "ours, by Lightning's own IO": Fit("ours_stock_io", "ours_stock_io", plugin=False),
    "stock": Fit("stock", "stock", strategy="model_parallel", plugin=False),
    "stock, one file": Fit("stock_file", "stock_file", strategy="model_parallel", full=True, plugin=False),
    "FSDP1": Fit("fsdp1", "fsdp1", strategy="fsdp1", plugin=False),
    "DDP": Fit("ddp", "ddp", strategy="ddp", plugin=False),
}
OURS = Fit("ours", "")
STOCK = Fit("stock", "", strategy="model_parallel", plugin=False)
DDP = Fit("ddp", "", strategy="ddp", plugin=False)
SINGLE = Fit("single", "", strategy="single", plugin=False)

READERS: dict[int, list[tuple[Fit, str]]] = {
    2: [
        *((OURS, writer) for writer in WRITERS),
        *((STOCK, writer) for writer in ("ours", "ours, one file", "ours, by Lightning's own IO")),
        (DDP, "ours, one file"),
    ],
    1: [(OURS, "ours"), (OURS, "ours, one file"), (OURS, "stock"), (SINGLE, "ours, one file")],
    4: [(OURS, "ours"), (OURS, "ours, one file"), (OURS, "stock"), (OURS, "FSDP1"), (OURS, "DDP"), (STOCK, "ours")],
}
CASES = [(ranks, reader.name, writer) for ranks, pairs in READERS.items() for reader, writer in pairs]


def writer_fit(folder: Path, name: str) -> Fit:
    fit = WRITERS[name]
    return replace(fit, folder=str(folder / fit.folder), steps=STEPS, every=SAVED_AT)


def reader_fit(folder: Path, ranks: int, reader: Fit, writer: str) -> Fit:
    source = writer_fit(folder, writer)
    resume = f"{source.folder}/step={SAVED_AT}.ckpt"
    return replace(reader, name=f"{reader.name}_{ranks}_{source.name}", folder=str(folder), steps=STEPS, resume=resume)


@pytest.fixture(scope="module")
def folder(stem: Stem, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all have written and read: one job for each number of ranks."""
    folder = tmp_path_factory.mktemp("formats")
    for ranks, pairs in READERS.items():
        writers = [writer_fit(folder, name) for name in WRITERS] if ranks == 2 else []
        readers = [reader_fit(folder, ranks, reader, writer) for reader, writer in pairs]
        stem.run(CALL, orders(*writers, *readers), ranks=ranks, folder=folder, timeout=115)
    return folder


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {key: item for part in value for key, item in flat(value[part], f"{name}/{part}").items()}


def read_by_torch(fit: Fit, step: str | int) -> dict[str, Any]:
    """What is in a sharded checkpoint; FSDP1 cannot tell by itself what its state is."""
    whole = Path(fit.folder, f"{step}.whole")
    dcp_to_torch_save(f"{fit.folder}/step={step}.ckpt", whole)
    content = torch.load(whole, weights_only=True)
    return {"model": content["model"], "optimizer": content["optimizer_0"]}


def state(fit: Fit, when: str | int) -> dict[str, Any]:
    """Everything in the model and the optimizer, by name; groups by the names of their parameters."""
    dump = read_by_torch(fit, when) if fit.strategy == "fsdp1" else torch.load(dump_of(fit, when), weights_only=True)
    groups = {",".join(sorted(group["params"])): group for group in dump["optimizer"]["param_groups"]}
    return flat({"model": dump["model"], "state": dump["optimizer"]["state"], "groups": groups})


@pytest.mark.parametrize("writer", WRITERS)
def test_writers_have_trained(folder: Path, writer: str) -> None:
    """So that nothing below compares states that are equal anyway."""
    fit = writer_fit(folder, writer)
    result = result_of(fit)
    assert result.error == ""
    assert sorted(result.losses) == [1, 2, 3, 4, 5, 6]
    assert Path(fit.folder, f"step={SAVED_AT}.ckpt").is_dir() is not (fit.full or fit.strategy == "ddp")
    saved, later = state(fit, SAVED_AT), state(fit, STEPS)
    assert saved.keys() == later.keys()
    tensors = [name for name, value in saved.items() if isinstance(value, torch.Tensor)]
    assert sum("exp_avg_sq" in name for name in tensors) == 6
    assert sum(name.startswith("/model") for name in tensors) == 7
    assert not [name for name in tensors if torch.equal(saved[name], later[name])]


@pytest.mark.parametrize(("ranks", "reader", "writer"), CASES)
def test_a_reader_goes_on_where_the_writer_was(folder: Path, ranks: int, reader: str, writer: str) -> None:
    source = writer_fit(folder, writer)
    fit = next(
        reader_fit(folder, ranks, fit, name) for fit, name in READERS[ranks] if (fit.name, name) == (reader, writer)
    )
    result, expected = result_of(fit), result_of(source)
    assert result.error == ""
    found, saved = state(fit, "start"), state(source, SAVED_AT)
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
            assert found[name].dtype == value.dtype, name
        elif not name.endswith("/params"):
            assert _listed(found[name]) == _listed(value), name
    assert sorted(result.losses) == [4, 5, 6]
    for step, loss in result.losses.items():
        assert loss == pytest.approx(expected.losses[step], rel=1e-6, abs=0.0), step
        if _same_mathematics(source, fit):
            assert loss == expected.losses[step], step


def _listed(value: Any) -> Any:
    """Stock Lightning turns the tuples of an optimizer's options into lists when it spreads one file over ranks."""
    return list(value) if isinstance(value, tuple) else value


def _same_mathematics(writer: Fit, reader: Fit) -> bool:
    """FSDP2 and two ranks on both sides: the same kernels on the same shards."""
    both = {writer.strategy, reader.strategy}
    return both <= {"ours", "model_parallel"} and "_2_" in reader.name
