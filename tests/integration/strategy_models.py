"""Small models for the strategy scenarios, and the same training written in plain torch, on one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric

VOCAB, WIDTH, BATCH = 17, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.narrow(torch.relu(self.wide(self.norm(x)))) * 1.0
        return out


class TinyLM(L.LightningModule):
    """Layers in `__init__`, tied weights, a frozen layer, a scalar, a buffer that is not saved, a metric."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)
        self.mean_loss = MeanMetric()
        self.lr = lr
        self.losses: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.frozen(x)) * self.temperature
        return out

    def loss(self, tokens: Tensor) -> Tensor:
        penalty = self.embedding.weight.float().square().mean()  # the root's weight, before and outside any layer
        logits = self(tokens).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + 0.1 * penalty

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch[0])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.mean_loss(self.loss(batch[0]))
        self.log("val_loss", self.mean_loss)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch[0]), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out: Tensor = self(batch[0]).argmax(-1)
        return out

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Unscaled(TinyLM):
    """Without the scalar parameter, which `fully_shard` itself refuses."""

    def __init__(self) -> None:
        super().__init__()
        del self.temperature
        self.temperature = 1.0  # type: ignore[assignment]  # a plain number from here on


class Gan(L.LightningModule):
    """Two optimizers, two backwards and two steps in one training step; gradients are zeroed after the steps."""

    def __init__(self, toggle: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.toggle = toggle
        self.losses: list[float] = []

    def forward(self, noise: Tensor) -> Tensor:
        out: Tensor = self.generator(noise)
        return out

    def generator_loss(self, noise: Tensor) -> Tensor:
        return nn.functional.softplus(-self.discriminator(self(noise))).mean()

    def discriminator_loss(self, noise: Tensor) -> Tensor:
        fake = self.discriminator(self(noise).detach())
        real = self.discriminator(noise[:, :3])
        return (nn.functional.softplus(fake) + nn.functional.softplus(-real)).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer, loss_of in zip(optimizers, (self.generator_loss, self.discriminator_loss), strict=True):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            loss = loss_of(batch[0])
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if self.toggle:
                self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in parts]


def tokens(batches: int) -> TensorDataset:
    """Data for `batches` steps of two ranks; a distributed sampler deals the rows out in turn."""
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randint(0, VOCAB, (2 * BATCH * batches, 5), generator=generator))


def noise(batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(8)
    return TensorDataset(torch.randn(2 * BATCH * batches, 4, generator=generator))


def loader(dataset: TensorDataset) -> DataLoader[tuple[Tensor, ...]]:
    """Deal rows out in order; Lightning's own sampler would shuffle them."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        dataset, num_replicas=ranks, rank=rank, shuffle=False
    )
    return DataLoader(dataset, batch_size=BATCH, sampler=sampler)


def shards(dataset: TensorDataset, ranks: int = 2) -> list[list[Tensor]]:
    """For each step, the batch of each rank."""
    rows = dataset.tensors[0]
    step = ranks * BATCH
    return [[rows[i : i + step][rank::ranks] for rank in range(ranks)] for i in range(0, len(rows), step)]


def train_alone(
    model: TinyLM,
    steps: list[list[Tensor]],
    *,
    clip: Callable[[list[nn.Parameter]], object] | None = None,
    accumulate: int = 1,
) -> list[float]:
    """Train on the batches of all ranks, in one process and without Lightning.

    Returns:
        The loss on rank 0's batches.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=model.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    losses = []
    for index, batches in enumerate(steps):
        each = [model.loss(batch) for batch in batches]
        (torch.stack(each).mean() / accumulate).backward()  # type: ignore[no-untyped-call]  # torch
        losses.append(each[0].item())
        if (index + 1) % accumulate == 0:
            if clip is not None:
                clip(parameters)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return losses


def train_gan_alone(model: Gan, steps: list[list[Tensor]]) -> list[float]:
    """The GAN's training step in one process: each optimizer only ever sees the gradients of its own loss."""
    parts = [(model.generator, model.generator_loss), (model.discriminator, model.discriminator_loss)]
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2) for part, _ in parts]
    losses = []
    for batches in steps:
        for optimizer, (_, loss_of) in zip(optimizers, parts, strict=True):
            model.zero_grad()
            each = [loss_of(batch) for batch in batches]
            torch.stack(each).mean().backward()  # type: ignore[no-untyped-call]  # torch
            optimizer.step()
            losses.append(each[0].item())
    return losses
