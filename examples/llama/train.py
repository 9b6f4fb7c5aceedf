"""Train a Llama with plain PyTorch Lightning; start the same command again and it goes on by itself.

    python examples/llama/train.py --devices 2 --accelerator cpu --steps 200

What makes it resilient are the lines marked with (1), (2) and (3); all else is ordinary Lightning.
"""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path
from typing import Literal

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.llama.data import TextDataModule
from examples.llama.model import LlamaModule
from examples.llama.sizes import SIZES
from examples.llama.step_log import StepLog, log_fault
from lightning_resilience import AsyncCheckpointIO, ResilientFSDPStrategy, newest_checkpoint
from lightning_resilience.errors import ConfigurationError
from lightning_resilience.faults.injector import FaultInjector
from lightning_resilience.faults.plan import PlannedFault, planned_fault


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a Llama on text files.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    model = parser.add_argument_group("model")
    model.add_argument("--size", choices=SIZES, default="tiny")
    model.add_argument("--pretrained", help="folder with Hugging Face weights and tokenizer, in place of --size")
    model.add_argument("--learning-rate", type=float, default=1e-3)
    model.add_argument("--meta-init", action="store_true", help="never hold the whole model in one process")
    data = parser.add_argument_group("data")
    data.add_argument("--data", help="text file or folder; without it the Python standard library")
    data.add_argument("--pattern", default="*.py", help="which files of the folder")
    data.add_argument("--seq-len", type=int, default=128)
    data.add_argument("--batch-size", type=int, default=8, help="on each rank")
    data.add_argument("--limit-mb", type=float, default=16.0, help="read at most this much text")
    run = parser.add_argument_group("run")
    run.add_argument("--accelerator", default="auto")
    run.add_argument("--devices", default="auto")
    run.add_argument("--num-nodes", type=int, default=1)
    run.add_argument("--precision", default="32-true")
    run.add_argument("--activation-checkpointing", action="store_true", help="trade time for memory")
    run.add_argument("--steps", type=int, default=200)
    run.add_argument("--validate-every", type=int, default=100, help="steps between two validations")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--deterministic", action="store_true", help="the same bits in every run on GPUs too")
    run.add_argument("--checkpoint-dir", default="runs/llama")
    run.add_argument("--checkpoint-every", type=int, default=20, help="steps between two checkpoints")
    run.add_argument(
        "--snapshot-every",
        type=steps_or_auto,
        help='steps between two snapshots in memory, or "auto"; else none',
    )
    run.add_argument("--no-progress-bar", action="store_true")
    faults = parser.add_argument_group("faults")
    faults.add_argument("--hang-timeout", type=float, help="seconds without progress that are a hang; else learned")
    faults.add_argument(
        "--fault",
        type=drill,
        action="append",
        default=[],
        help="a drill: let this happen, such as raise:backward:rank=1:step=33 or hang:forward:rank=0:step=35",
    )
    return parser.parse_args(arguments)


def steps_or_auto(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


def drill(text: str) -> PlannedFault:
    try:
        return planned_fault(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def build_trainer(options: argparse.Namespace) -> L.Trainer:
    folder = Path(options.checkpoint_dir)
    drills = [FaultInjector(options.fault, tell=partial(log_fault, folder / "steps.jsonl"))] if options.fault else []
    return L.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        precision=options.precision,
        deterministic=options.deterministic,
        max_steps=options.steps,
        val_check_interval=options.validate_every,
        check_val_every_n_epoch=None,
        limit_val_batches=8,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        default_root_dir=folder,  # events.jsonl goes there
        enable_progress_bar=not options.no_progress_bar,
        strategy=ResilientFSDPStrategy(  # (1)
            activation_checkpointing_policy="auto" if options.activation_checkpointing else None,
            hang_timeout=options.hang_timeout,
        ),
        plugins=[AsyncCheckpointIO(snapshot_every_n_steps=options.snapshot_every)],  # (2)
        callbacks=[
            ModelCheckpoint(dirpath=folder, every_n_train_steps=options.checkpoint_every, save_top_k=-1),
            StepLog(str(folder / "steps.jsonl")),
            *drills,
        ],
    )


def main() -> None:
    options = parse_arguments()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lightning_resilience").setLevel(logging.INFO)  # says what each save cost
    L.seed_everything(options.seed, verbose=False)
    model = LlamaModule(
        size=options.size,
        pretrained=options.pretrained,
        learning_rate=options.learning_rate,
        meta_init=options.meta_init,
    )
    data = TextDataModule(
        data=options.data,
        pattern=options.pattern,
        seq_len=options.seq_len,
        batch_size=options.batch_size,
        limit_mb=options.limit_mb,
        tokenizer=options.pretrained,
    )
    build_trainer(options).fit(model, data, ckpt_path=newest_checkpoint(options.checkpoint_dir))  # (3)


if __name__ == "__main__":
    main()
