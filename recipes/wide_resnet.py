"""A Wide-ResNet (Zagoruyko and Komodakis, arXiv 1605.07146, with bottlenecks) as an ordinary
LightningModule.

Nothing in it knows of parallelism. Shapes: B batch, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}  # blocks of each of the four resolutions


def conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image's size but for its stride, without bias (a BatchNorm
    follows).
    """
    return nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut: `channels`, `width` times that, and four
    times that.
    """

    def __init__(self, in_channels: int, channels: int, width: int, stride: int) -> None:
        super().__init__()
        inner, out_channels = channels * width, channels * 4
        self.conv1, self.norm1 = conv(in_channels, channels, 1), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = conv(channels, inner, 3, stride), nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = conv(inner, out_channels, 1), nn.BatchNorm2d(out_channels)
        self.shortcut = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels)
            )
        nn.init.zeros_(self.norm3.weight)  # each block starts as its shortcut

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = F.relu(self.norm1(self.conv1(x_BCHW)))
        y_BCHW = F.relu(self.norm2(self.conv2(y_BCHW)))
        y_BCHW = self.norm3(self.conv3(y_BCHW))
        return F.relu(y_BCHW + (x_BCHW if self.shortcut is None else self.shortcut(x_BCHW)))


class WideResNet(lightning.LightningModule):
    """Image classification. A batch is (images [B, C, H, W], labels [B] int64).

    Args:
        layers: 50 or 101, or the number of blocks at each resolution, such as (1, 1).
        channels: of the first blocks; doubled at every further resolution.
        width: of a block's 3x3 convolution, in multiples of its channels.
        num_classes, in_channels: of the labels and images.
        small_images: a 3x3 stem, instead of the 7x7 one and the pooling that make a quarter of the
            image's size.
        lr, momentum, weight_decay: SGD with Nesterov's momentum.
    """

    def __init__(
        self,
        layers: int | Sequence[int],
        channels: int,
        width: int,
        num_classes: int = 1024,
        in_channels: int = 3,
        small_images: bool = False,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
    ) -> None:
        super().__init__()
        if isinstance(layers, int) and layers not in DEPTHS:
            raise ValueError(
                f"layers is {layers}; use one of {sorted(DEPTHS)}, or blocks per resolution such as"
                " [1, 1]"
            )
        self.save_hyperparameters()
        stem = (
            [conv(in_channels, channels, 3)]
            if small_images
            else [conv(in_channels, channels, 7, 2)]
        )
        stem += [nn.BatchNorm2d(channels), nn.ReLU()]
        stem += [] if small_images else [nn.MaxPool2d(3, 2, padding=1)]
        self.stem = nn.Sequential(*stem)
        self.blocks = nn.ModuleList()
        before = channels
        for resolution, count in enumerate(DEPTHS[layers] if isinstance(layers, int) else layers):
            own = channels * 2**resolution
            for index in range(count):
                if resolution > 0 and index == 0:
                    stride = 2
                else:
                    stride = 1
                self.blocks.append(Bottleneck(before, own, width, stride))
                before = 4 * own
        self.head = nn.Linear(before, num_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Logits [B, classes]."""
        x_BCHW = self.stem(x_BCHW)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return self.head(x_BCHW.mean((2, 3)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images_BCHW, labels_B = batch
        logits = self(images_BCHW)
        loss = F.cross_entropy(logits, labels_B)
        self.log("train_loss", loss, prog_bar=True)
        self.log("accuracy", (logits.argmax(-1) == labels_B).float().mean(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        h = self.hparams
        return torch.optim.SGD(
            self.parameters(),
            lr=h.lr,
            momentum=h.momentum,
            weight_decay=h.weight_decay,
            nesterov=h.momentum > 0,
        )
