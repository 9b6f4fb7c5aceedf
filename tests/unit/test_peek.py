"""What can be told of a file of torch without torch."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resilience.checkpoint.envelope import without_crc
from lightning_resilience.checkpoint.peek import Facts, peek, read_facts
from lightning_resilience.checkpoint.placefile import open_place
from lightning_resilience.checkpoint.storage import place_for

FULL: dict[str, Any] = {"epoch": 1, "global_step": 300, "loops": {}, "callbacks": {}, "lr_schedulers": []}
WEIGHTS = {"epoch": 1, "global_step": 70_000, "state_dict": {"w": torch.ones(3)}, "loops": {"global_step": 5}}


def test_a_checkpoint_and_weights_only(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(FULL, path)
    assert peek(place_for(path)) == Facts(resumable=True, step=300)
    with without_crc():  # as our writer has it; zipfile would refuse to read that
        torch.save(WEIGHTS, path)
    assert peek(place_for(path)) == Facts(resumable=False, step=70_000)
    assert peek(place_for(tmp_path / "nothing")) is None
    path.write_bytes(path.read_bytes()[:400])
    assert peek(place_for(path)) is None
    path.write_text("no archive")
    assert peek(place_for(path)) is None


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_any_protocol_of_pickle(protocol: int) -> None:
    assert read_facts(pickle.dumps(FULL, protocol)) == Facts(resumable=True, step=300)
    assert read_facts(pickle.dumps({"global_step": 2**40}, protocol)) == Facts(resumable=False, step=2**40)
    assert read_facts(pickle.dumps({"global_step": "many"}, protocol)) == Facts(resumable=False, step=None)


def test_nothing_in_it_is_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "harm"),)

    read_facts(pickle.dumps({"global_step": Bomb()}))
    assert not (tmp_path / "harm").exists()
    with pytest.raises(ValueError, match="opcode"):
        read_facts(b"\xff\xfe")


def test_a_place_is_read_like_a_file(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 5000)
    with open_place(place_for(path)) as file:
        assert file.seek(-2, os.SEEK_END) == 1_279_998
        assert file.read() == b"\xfe\xff"
        assert file.seek(300_000) == file.tell() == 300_000
        assert file.read(3) == bytes([224, 225, 226])
        assert file.seek(7, os.SEEK_CUR) == 300_010
        file.seek(0)
        assert file.read() == path.read_bytes()
    with pytest.raises(FileNotFoundError):
        open_place(place_for(tmp_path))
