"""More small LightningModules for pipelines: skips over several stages, encoder-decoder, parameters
used twice.

Importing this file adds them to `models.MODELS`. Ordinary user code, as in models.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from models import MODELS, TestModel
from torch import Tensor, nn


class UNet(TestModel):
    """Every level of the way down is read by one of the way up. Batch: (images [B, 3, S, S], labels
    [B, S, S]).
    """

    def __init__(
        self,
        channels: int = 4,
        num_classes: int = 5,
        image_size: int = 8,
        optimizer: str = "adamw",
        lr: float = 1e-2,
    ) -> None:
        super().__init__(optimizer, lr)
        self.image_size, self.num_classes = image_size, num_classes
        widths = [3, channels, 2 * channels, 4 * channels]
        self.down = nn.ModuleList(self._block(a, b) for a, b in pairwise(widths))
        self.middle = self._block(widths[3], widths[3])
        self.up = nn.ModuleList(
            self._block(2 * b, a) for a, b in zip([channels, *widths[1:3]], widths[1:], strict=True)
        )
        self.head = nn.Conv2d(channels, num_classes, 1)

    @staticmethod
    def _block(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in reversed(self.up):
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1))
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.log_dict(
            {"loss": loss, "accuracy": (logits.argmax(1) == labels).double().mean()}, on_epoch=True
        )
        return loss

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        size = (self.image_size, self.image_size)
        images = torch.randn(
            batch_size, 3, *size, generator=generator, dtype=self.head.weight.dtype
        )
        return images, torch.randint(self.num_classes, (batch_size, *size), generator=generator)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.conv2, self.bn2 = (
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(TestModel):
    """As torchvision writes it. Batch: (images [B, 3, S, S], classes [B])."""

    def __init__(
        self,
        channels: int = 4,
        num_classes: int = 6,
        image_size: int = 16,
        optimizer: str = "adamw",
        lr: float = 1e-2,
    ) -> None:
        super().__init__(optimizer, lr)
        self.image_size, self.num_classes = image_size, num_classes
        self.conv1, self.bn1 = nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(channels, channels, 1))
        self.layer2 = nn.Sequential(
            BasicBlock(channels, 2 * channels, 2), BasicBlock(2 * channels, 2 * channels, 1)
        )
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(2 * channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        return F.cross_entropy(self(images), classes, label_smoothing=0.1)

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        shape = (batch_size, 3, self.image_size, self.image_size)
        images = torch.randn(shape, generator=generator, dtype=self.fc.weight.dtype)
        return images, torch.randint(self.num_classes, (batch_size,), generator=generator)


class Translator(TestModel):
    """Encoder and decoder of torch.nn, one embedding for both ends and the head; the encoder's
    result is read by every
    decoder layer. Batch: {"source": [B, T], "target": [B, T + 1]}; padding is 0 and uneven.

    Without biases: the gradient of a key's is zero but for rounding, which Adam makes into a step
    of any size.
    """

    def __init__(
        self,
        vocab_size: int = 19,
        d_model: int = 8,
        seq_len: int = 6,
        optimizer: str = "adamw",
        lr: float = 1e-2,
    ) -> None:
        super().__init__(optimizer, lr)
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self.embed = nn.Embedding(vocab_size, d_model)
        common = {
            "d_model": d_model,
            "nhead": 2,
            "dim_feedforward": 16,
            "dropout": 0.0,
            "batch_first": True,
            "bias": False,
        }
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**common), 2, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(**common, norm_first=True), 2
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.embed(source))
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=memory.dtype)
        return self.decoder(self.embed(target), memory, tgt_mask=causal) @ self.embed.weight.T

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        target = batch["target"]
        logits = self(batch["source"], target[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), target[:, 1:], ignore_index=0)
        self.log("perplexity", loss.exp(), prog_bar=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        source = torch.randint(1, self.vocab_size, (batch_size, self.seq_len), generator=generator)
        target = torch.randint(
            1, self.vocab_size, (batch_size, self.seq_len + 1), generator=generator
        )
        lengths = 2 + torch.arange(batch_size)[:, None] % self.seq_len
        return {
            "source": source,
            "target": torch.where(torch.arange(self.seq_len + 1) < lengths, target, 0),
        }


class Twice(TestModel):
    """One linear layer at both ends, a sum for a loss, a schedule of learning rates. Batch: (x [B,
    D], y [B, D]).
    """

    def __init__(
        self, width: int = 6, depth: int = 4, optimizer: str = "adamw", lr: float = 1e-2
    ) -> None:
        super().__init__(optimizer, lr)
        self.width = width
        self.ends = nn.Linear(width, width)
        self.between = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        h = torch.tanh(self.ends(x))
        for layer in self.between:
            h = h + F.gelu(layer(h)) * self.scale
        prediction = self.ends(h)
        loss = (prediction - y).square().sum()
        self.log("loss", loss, on_step=True, on_epoch=True, reduce_fx="sum")
        self.log_dict({"mean": prediction.mean(), "largest": prediction.abs().max()})
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        shape, dtype = (batch_size, self.width), self.ends.weight.dtype
        return tuple(torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))


class Frozen(TestModel):
    """The first layers do not train. Batch: (x [B, D], y [B, D])."""

    def __init__(self, width: int = 6, optimizer: str = "adamw", lr: float = 1e-2) -> None:
        super().__init__(optimizer, lr)
        self.width = width
        self.backbone = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )
        self.backbone.requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.head(self.backbone(x)), y)

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        shape, dtype = (batch_size, self.width), self.head[0].weight.dtype
        return tuple(torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))


MODELS.update(
    {"unet": UNet, "resnet": ResNet, "translator": Translator, "twice": Twice, "frozen": Frozen}
)
