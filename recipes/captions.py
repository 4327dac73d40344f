"""Images with captions as LightningDataModules: drawn shapes and what they are, and CLIP's shapes
alone for planning.
"""

from __future__ import annotations

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

COLORS = {
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
    "yellow": (1.0, 1.0, 0.0),
    "violet": (1.0, 0.0, 1.0),
    "white": (1.0, 1.0, 1.0),
}
SHAPES = ("square", "disc", "cross")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")
CELL = 5
CAPTION_LENGTH = 32


class CaptionedShapes(lightning.LightningDataModule):
    """Batches of (images [B, 3, 16, 16] from 0 to 1, captions [B, 32] of bytes, int64).

    An image has one shape on grey noise, its caption says which: "red disc top left". 162 differ.

    Args:
        batch_size: rows that the loader yields: one rank's, or the global batch under
            `strategy.batch_scope: global`.
        num_samples: pairs in an epoch.
    """

    def __init__(self, batch_size: int, num_samples: int = 4096) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        pairs = _ShapePairs(self.hparams.num_samples)
        return DataLoader(pairs, self.hparams.batch_size, drop_last=True)

    def example_batch(self) -> tuple[Tensor, Tensor]:
        """A batch of the right shapes, for planning."""
        size = self.hparams.batch_size
        images = torch.zeros(size, 3, 3 * CELL + 1, 3 * CELL + 1)
        return images, torch.zeros(size, CAPTION_LENGTH, dtype=torch.int64)


class _ShapePairs(Dataset):
    """Pair i is drawn from the seed i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        choices = []
        for options in (tuple(COLORS), SHAPES, ROWS, COLUMNS):
            choices.append(int(torch.randint(len(options), (), generator=generator)))
        color, shape, row, column = choices
        color_name = tuple(COLORS)[color]

        image = 0.2 * torch.rand(3, 3 * CELL + 1, 3 * CELL + 1, generator=generator)
        corner = image[:, row * CELL : row * CELL + CELL, column * CELL : column * CELL + CELL]
        corner[:, _mask(SHAPES[shape])] = torch.tensor(COLORS[color_name]).unsqueeze(-1)

        words = f"{color_name} {SHAPES[shape]} {ROWS[row]} {COLUMNS[column]}"
        return image, torch.tensor(list(words.ljust(CAPTION_LENGTH).encode()))


def _mask(shape: str) -> Tensor:
    """The pixels of a shape in a cell."""
    offset = (torch.arange(CELL) - CELL // 2).abs()
    if shape == "disc":
        return offset.unsqueeze(1) + offset <= CELL // 2
    if shape == "cross":
        return offset.unsqueeze(1) == offset
    return offset.unsqueeze(1) + offset >= 0


class PairShapes(lightning.LightningDataModule):
    """Batches of (images [B, 3, H, H], captions [B, T]) of CLIP's shapes, of noise: for planning
    and measuring.

    Args:
        batch_size: rows that the loader yields: one rank's, or the global batch under
            `strategy.batch_scope: global`.
        sequence_length: T.
        vocab_size: of the captions' tokens.
        image_size: H.
        num_samples: pairs in an epoch.
    """

    def __init__(
        self,
        batch_size: int,
        sequence_length: int = 77,
        vocab_size: int = 49408,
        image_size: int = 224,
        num_samples: int = 65536,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(_NoisePairs(self.hparams), self.hparams.batch_size, drop_last=True)

    def example_batch(self) -> tuple[Tensor, Tensor]:
        """A batch of the right shapes on the meta device."""
        h = self.hparams
        images = torch.zeros(h.batch_size, 3, h.image_size, h.image_size, device="meta")
        shape = (h.batch_size, h.sequence_length)
        return images, torch.zeros(shape, dtype=torch.int64, device="meta")


class _NoisePairs(Dataset):
    """Pair i is drawn from the seed i."""

    def __init__(self, hparams: object) -> None:
        self.h = hparams

    def __len__(self) -> int:
        return self.h.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, self.h.image_size, self.h.image_size, generator=generator)
        shape = (self.h.sequence_length,)
        return image, torch.randint(self.h.vocab_size, shape, generator=generator)
