"""Runs as one rank without a trainer: takes snapshots as fast as it can until somebody kills it.

Every tensor of the state is filled with the number of the step, so a snapshot that mixes two steps shows. A start
checks what its predecessor has left, says so, and goes on from it.

    snapshot_loop FOLDER SEED
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from lightning_resilience.checkpoint.candidates import META
from lightning_resilience.checkpoint.envelope import archive
from lightning_resilience.checkpoint.restore import Target
from lightning_resilience.checkpoint.snapshots.choice import Request
from lightning_resilience.checkpoint.snapshots.contents import RANK_STATE
from lightning_resilience.checkpoint.snapshots.engine import Snapshots
from lightning_resilience.checkpoint.snapshots.points import State
from lightning_resilience.checkpoint.snapshots.start import begin_run
from lightning_resilience.checkpoint.state import model_state
from lightning_resilience.checkpoint.storage import place_for


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    module = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(10)))  # most of the time goes into copying 40 MB
    snapshots = Snapshots(str(folder / "shm"), 1)
    step = begin_run(snapshots, place_for(folder / "run"), Request(None, asked=True), list) or 0
    if step:
        restored = snapshots.load(step, Target(module))
        assert restored.content == {"global_step": step}
        assert restored.rank_state == {"global_step": step}
        assert all(tensor.eq(step).all() for tensor in module.state_dict().values()), f"a mixture at step {step}"
    (folder / f"found-{seed}").write_text(str(step))
    first = step
    while True:
        step += 1
        with torch.no_grad():
            for tensor in module.state_dict().values():
                tensor.fill_(step)
        small = archive({"global_step": step})
        state = State({"state_dict": model_state(module)}, set(), {META: small, RANK_STATE: small})
        snapshots.take(step, lambda state=state: state)  # type: ignore[misc]  # bound now
        if step == first + 3:
            (folder / f"running-{seed}").touch()
        (folder / f"taken-{seed}").write_text(str(step))
