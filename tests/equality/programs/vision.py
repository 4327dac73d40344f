"""Images: BatchNorm nets, segmentation, detection, distillation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equality.programs.basic import Program
from torch import Tensor, nn


def _images(generator: torch.Generator, num: int = 4, size: int = 8) -> tuple[Tensor, Tensor]:
    x = torch.randn(num, 3, size, size, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (num,), generator=generator)


def _block(channels_in: int, channels: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU())


class ResidualNet(Program):
    """Residual blocks with BatchNorm, and a projection shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _block(3, 4)
        self.main = nn.Sequential(_block(4, 8, 2), nn.Conv2d(8, 8, 3, padding=1))
        self.shortcut = nn.Sequential(nn.Conv2d(4, 8, 1, 2), nn.BatchNorm2d(8))
        self.norm = nn.BatchNorm2d(8, momentum=None)
        self.head = nn.Linear(8, 4)

    example = staticmethod(_images)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.stem(x)
        h = F.relu(self.norm(self.main(h)) + self.shortcut(h))
        return F.cross_entropy(self.head(h.mean((2, 3))), y, label_smoothing=0.1)


class MixupUNet(Program):
    """A U-Net with BatchNorm whose images are mixed with their neighbours in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.down = _block(3, 4)
        self.middle = nn.Sequential(nn.MaxPool2d(2), _block(4, 8))
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.out = nn.Sequential(_block(8, 4), nn.Conv2d(4, 2, 1))

    @staticmethod
    def example(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, _ = _images(generator)
        return x, torch.randint(0, 2, (4, 8, 8), generator=generator)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        share = 0.7
        h = self.down(share * x + (1 - share) * x.roll(1, 0))
        h = torch.cat([h, self.up(self.middle(h))], dim=1)
        scores = self.out(h)
        first, second = F.cross_entropy(scores, y), F.cross_entropy(scores, y.roll(1, 0))
        return share * first + (1 - share) * second


class DiceSegmentation(Program):
    """A Dice loss: intersections and sizes are sums over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.head = nn.Conv2d(4, 1, 1)

    @staticmethod
    def example(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, _ = _images(generator)
        mask = torch.rand(4, 1, 8, 8, generator=generator, dtype=torch.float64) > 0.6
        return x, mask.double()

    def loss(self, batch: Any) -> Tensor:
        x, mask = batch
        scores = self.head(self.net(x))
        share = scores.sigmoid()
        overlap = (share * mask).sum((0, 2, 3))
        total = (share + mask).sum((0, 2, 3))
        dice = 1 - ((2 * overlap + 1) / (total + 1)).mean()
        return dice + F.binary_cross_entropy_with_logits(scores, mask)


class Detection(Program):
    """Anchors matched to padded boxes; losses are divided by the number of positives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU())
        self.scores, self.boxes = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        x, _ = _images(generator)
        return {
            "image": x,
            "boxes": torch.rand(4, 16, 4, generator=generator, dtype=torch.float64),
            # 0: background, -1: ignored
            "labels": torch.randint(-1, 3, (4, 16), generator=generator),
        }

    def loss(self, batch: Any) -> Tensor:
        h = self.net(batch["image"])
        scores = self.scores(h).flatten(2).transpose(1, 2)
        boxes = self.boxes(h).flatten(2).transpose(1, 2)
        labels = batch["labels"]
        positive = labels > 0
        num_positive = positive.sum().clamp(min=1)
        losses = F.cross_entropy(
            scores.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none"
        )
        focal = (1 - (-losses).exp()).pow(2) * losses * (labels.flatten() >= 0)
        distance = F.smooth_l1_loss(boxes, batch["boxes"], reduction="none").sum(-1)
        return focal.sum() / num_positive + (distance * positive).sum() / num_positive


class Distillation(Program):
    """A frozen teacher in evaluation mode, with BatchNorm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(_block(3, 4), nn.Flatten(), nn.Linear(256, 4))
        self.teacher = nn.Sequential(_block(3, 4), nn.Flatten(), nn.Linear(256, 4))
        self.teacher.requires_grad_(False)

    example = staticmethod(_images)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.teacher.eval()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.teacher.eval()
        with torch.no_grad():
            target = (self.teacher(x) / 2).softmax(-1)
        scores = self.student(x)
        soft = F.kl_div((scores / 2).log_softmax(-1), target, reduction="batchmean") * 4
        return soft + F.cross_entropy(scores, y)


class SiameseNorm(Program):
    """BatchNorm that runs twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(_block(3, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    example = staticmethod(_images)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        first, second = self.net(x), self.net(x.flip(0))
        same = (y == y.flip(0)).to(first.dtype) * 2 - 1
        return F.cosine_embedding_loss(first, second, same, margin=0.2)


class SpectralCritic(Program):
    """Spectral normalisation: buffers that a step updates and no sample changes."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.net = nn.Sequential(norm(nn.Conv2d(3, 4, 3)), nn.LeakyReLU(0.2), nn.Flatten())
        self.head = norm(nn.Linear(144, 1))

    example = staticmethod(_images)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        scores = self.head(self.net(x)).squeeze(1)
        return F.relu(1 - (2.0 * (y > 1) - 1) * scores).mean()


class TemporalNorm(Program):
    """BatchNorm over batch and time, and a masked maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(6, 8, 3, padding=1), nn.BatchNorm1d(8), nn.GELU())
        self.head = nn.Linear(8, 3)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "x": torch.randn(4, 6, 5, generator=generator, dtype=torch.float64),
            "length": torch.randint(2, 6, (4,), generator=generator),
            "y": torch.randint(0, 3, (4,), generator=generator),
        }

    def loss(self, batch: Any) -> Tensor:
        h = self.net(batch["x"])
        is_padding = torch.arange(5, device=self.device)[None, :] >= batch["length"][:, None]
        pooled = h.masked_fill(is_padding[:, None, :], float("-inf")).amax(-1)
        return F.cross_entropy(self.head(pooled), batch["y"])


PROGRAMS = (
    ResidualNet,
    MixupUNet,
    DiceSegmentation,
    Detection,
    Distillation,
    SiameseNorm,
    SpectralCritic,
    TemporalNorm,
)
