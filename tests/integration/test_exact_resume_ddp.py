"""Two processes under DDP, with the sampler that Lightning injects: each rank goes on with its own numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_resilience.data import capture_rank_state, install, stash_rank_state
from tests.ports import free_port
from tests.unit.resume_runs import Net, Samples, SaveAt, seed_all

WORLD = 2
SAVE_AT = {
    "mid": ("on_train_batch_end", lambda trainer: trainer.global_step == 5),
    "last": ("on_train_batch_end", lambda trainer: trainer.global_step == 6),
    "epoch": ("on_train_epoch_end", lambda trainer: trainer.current_epoch == 1),
}


class RanksStrategy(DDPStrategy):
    """Stores the state of each rank in a file of its own."""

    def setup_environment(self) -> None:
        super().setup_environment()
        install(self.trainer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        torch.save(capture_rank_state(self.trainer), f"{filepath}.rank{self.global_rank}")
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        state = torch.load(f"{checkpoint_path}.rank{self.global_rank}", weights_only=True)
        stash_rank_state(self.trainer, state)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @property
    def trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


def _fit(seed: int, callbacks: list[Any], ckpt_path: Path | None, workers: int) -> Net:
    seed_all(seed)
    torch.rand(int(os.environ["LOCAL_RANK"]))  # dropout of the ranks differs
    model = Net()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=RanksStrategy(process_group_backend="gloo"),
        plugins=[LightningEnvironment()],
        max_epochs=3,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = DataLoader(Samples(), batch_size=2, shuffle=True, num_workers=workers)
    trainer.fit(model, train, DataLoader(Samples(4), batch_size=2), ckpt_path=ckpt_path, weights_only=False)
    return model


def run_rank(rank: int, port: int, folder: Path) -> None:
    """What one process does: one run from start to end, and one resumed from each of its checkpoints."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=WORLD)
    saves = {name: SaveAt(folder / f"{name}.ckpt", *where) for name, where in SAVE_AT.items()}
    whole = _fit(1, list(saves.values()), None, workers=0)
    for name, save in saves.items():
        resumed = _fit(90 + rank, [], save.path, workers=1 if name == "mid" else 0)
        assert resumed.losses == whole.losses[save.saved_after :], name
        for mine, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine, theirs), name
    (folder / f"losses{rank}.json").write_text(json.dumps(whole.losses))
    torch.distributed.destroy_process_group()


def test_each_rank_goes_on_exactly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", __name__, str(free_port()), str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(WORLD)]
    try:
        assert [rank.wait(timeout=200) for rank in ranks] == [0] * WORLD
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    losses = [json.loads((tmp_path / f"losses{rank}.json").read_text()) for rank in range(WORLD)]
    assert [len(of_rank) for of_rank in losses] == [9, 9]
    assert losses[0] != losses[1]


if __name__ == "__main__":
    run_rank(int(sys.argv[3]), int(sys.argv[1]), Path(sys.argv[2]))
