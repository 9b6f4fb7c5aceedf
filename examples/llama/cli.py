"""The same training by LightningCLI and one YAML file; start it again and it goes on by itself.

python examples/llama/cli.py fit --config examples/llama/config.yaml
"""

from __future__ import annotations

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningCLI

from examples.llama.data import TextDataModule
from examples.llama.model import LlamaModule
from lightning_resilience import newest_checkpoint


class ResumingCLI(LightningCLI):
    """Goes on from the newest checkpoint that is whole, unless `--ckpt_path` names another."""

    def before_fit(self) -> None:
        fit = self.config_init["fit"]
        callback = self.trainer.checkpoint_callback
        if fit["ckpt_path"] is None and isinstance(callback, ModelCheckpoint) and callback.dirpath:
            fit["ckpt_path"] = newest_checkpoint(callback.dirpath)


def main(arguments: ArgsType = None) -> None:
    ResumingCLI(
        LlamaModule,
        TextDataModule,
        args=arguments,
        # A restarted process finds the config of its predecessor; without this Lightning refuses to start.
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
