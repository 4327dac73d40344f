"""Images as LightningDataModules: handwritten digits that come with scikit-learn, and shapes alone
for planning.
"""

from __future__ import annotations

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningDataModule):
    """Batches of (images [B, 1, 8, 8] from 0 to 1, labels [B]): 1797 scans (UCI ML repository), no
    download.

    Args:
        batch_size: rows that the loader yields: one rank's, or the global batch under
            `strategy.batch_scope: global`.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError(
                "the digits come with scikit-learn: pip install scikit-learn"
            ) from error
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
        dataset = TensorDataset(images, torch.from_numpy(digits.target).long())
        return DataLoader(dataset, self.hparams.batch_size, shuffle=True, drop_last=True)

    def example_batch(self) -> tuple[Tensor, Tensor]:
        """A batch of the right shapes, for planning."""
        size = self.hparams.batch_size
        return torch.zeros(size, 1, 8, 8), torch.zeros(size, dtype=torch.int64)


class ImageShapes(lightning.LightningDataModule):
    """Batches of (images [B, 3, H, H], labels [B]) of ImageNet's shapes, of noise: for planning and
    measuring.

    Args:
        batch_size: rows that the loader yields: one rank's, or the global batch under
            `strategy.batch_scope: global`.
        image_size: H.
        num_classes: of the labels.
        num_samples: images in an epoch.
    """

    def __init__(
        self,
        batch_size: int,
        image_size: int = 224,
        num_classes: int = 1024,
        num_samples: int = 1536,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(_Noise(self.hparams), self.hparams.batch_size, drop_last=True)

    def example_batch(self) -> tuple[Tensor, Tensor]:
        """A batch of the right shapes on the meta device: a paper-sized one would need 0.9 GB."""
        h = self.hparams
        images = torch.zeros(h.batch_size, 3, h.image_size, h.image_size, device="meta")
        return images, torch.zeros(h.batch_size, dtype=torch.int64, device="meta")


class _Noise(torch.utils.data.Dataset):
    """Image i is drawn from the seed i."""

    def __init__(self, hparams: object) -> None:
        self.h = hparams

    def __len__(self) -> int:
        return self.h.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, self.h.image_size, self.h.image_size, generator=generator)
        return image, torch.randint(self.h.num_classes, (), generator=generator)
