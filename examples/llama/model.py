"""A Llama as a LightningModule: loss, perplexity, AdamW with weight-decay groups, warm-up and cosine.

Logged, losses in nats a token: `train/loss`, mean over ranks, and `train/perplexity` of rank 0's batch after
every step; `val/loss` and `val/perplexity`, over all ranks and validation batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric
from transformers import LlamaForCausalLM

from examples.llama.sizes import Size, llama_config


class Perplexity(MeanMetric):
    """exp of the mean loss of a token.

    The same number as `torchmetrics.text.Perplexity`, from the loss that is there already: no second softmax
    over the vocabulary.
    """

    def compute(self) -> Tensor:
        return super().compute().exp()


def warmup_cosine(step: int, warmup_steps: int, total_steps: int, floor: float = 0.1) -> float:
    """Factor of the peak learning rate: up in a line, down to `floor` in half a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices; leave norms and biases alone."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def teach_reset_parameters(network: LlamaForCausalLM) -> None:
    """Give every layer the method that strategies call once they have allocated it from the meta device.

    Hugging Face has the initialisation of all layers in one function of the whole network instead.
    """
    for layer in network.modules():
        object.__setattr__(layer, "reset_parameters", partial(network._init_weights, layer))


class LlamaModule(LightningModule):
    """A causal language model that trains on windows of `seq_len + 1` token numbers.

    Args:
        size: a named size, from `tiny` (1 M parameters, CPU) to `llama-3.1-8b`.
        pretrained: folder with Hugging Face weights to start from, in place of `size`.
        learning_rate: at its peak, after the warm-up.
        weight_decay: for matrices; norms have none.
        betas: of AdamW.
        warmup_steps: optimizer steps until the peak.
        schedule_steps: optimizer steps until the end of the cosine; default: `Trainer(max_steps=...)`.
        attention_dropout: probability, in place of the one of the size.
        meta_init: build without memory and let a sharding strategy allocate and initialise it layer by layer,
            for models that are too big for one process. Not with `pretrained`.
    """

    def __init__(
        self,
        size: Size = "tiny",
        pretrained: str | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 20,
        schedule_steps: int | None = None,
        attention_dropout: float | None = None,
        meta_init: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size = size
        self.pretrained = pretrained
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = betas
        self.warmup_steps = warmup_steps
        self.schedule_steps = schedule_steps
        self.attention_dropout = attention_dropout
        self.meta_init = meta_init
        self.model: Any = None
        self.train_perplexity = Perplexity()
        self.val_perplexity = Perplexity()

    def configure_model(self) -> None:
        """Build the network on the device the strategy asks for; called again, keep what is there."""
        if self.model is None:
            self.model = self._load() if self.pretrained else self._build()

    def _build(self) -> Any:
        config = llama_config(self.size, self.attention_dropout)
        if not self.meta_init:
            return LlamaForCausalLM(config)
        with torch.device("meta"):
            network = LlamaForCausalLM(config)
        teach_reset_parameters(network)
        return network

    def _load(self) -> Any:
        # Hugging Face refuses to load weights under the meta device.
        with torch.device("cpu"):
            return LlamaForCausalLM.from_pretrained(self.pretrained, use_cache=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, shape (batch, length, vocabulary)."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def loss(self, batch: Tensor) -> Tensor:
        """Mean loss of a token in nats; `batch` has the shape (batch, seq_len + 1)."""
        logits = self(batch[:, :-1])
        return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.train_perplexity(loss.detach())
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        self.log("train/perplexity", self.train_perplexity, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.val_perplexity(loss, weight=len(batch))
        self.log("val/loss", loss, batch_size=len(batch), prog_bar=True, sync_dist=True)
        self.log("val/perplexity", self.val_perplexity)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(
            decay_groups(self.parameters(), self.weight_decay), lr=self.learning_rate, betas=self.betas
        )
        total = self._total_steps()
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, self.warmup_steps, total)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _total_steps(self) -> int:
        # Not trainer.estimated_stepping_batches: it builds the loaders before a resume has restored them.
        total = self.schedule_steps or self.trainer.max_steps
        if total <= 0:
            raise ValueError("the cosine needs an end: set Trainer(max_steps=...) or schedule_steps")
        return total
