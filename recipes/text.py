"""Text as a LightningDataModule: windows of tokens from a file, or from the English that comes with
Python.

Tokens are UTF-8 bytes, or the uint16 ids of a `.bin` file (as nanoGPT's `prepare.py` writes them;
memory-mapped).
"""

from __future__ import annotations

from pathlib import Path

import lightning
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


def load_tokens(path: str | Path | None) -> np.ndarray:
    """Tokens [N] of a text file (uint8), of a `.bin` file (uint16) or, without a path, of Python's
    own help topics.
    """
    if path is None:
        from pydoc_data.topics import topics

        return np.frombuffer(
            "\n\n".join(topics[key] for key in sorted(topics)).encode(), dtype=np.uint8
        )
    if Path(path).suffix == ".bin":
        return np.memmap(path, dtype=np.uint16, mode="r")
    return np.frombuffer(Path(path).read_bytes(), dtype=np.uint8)


class Windows(Dataset):
    """Sample i is (tokens [T], the same shifted by one [T]) at a place drawn from (seed, i): the
    same on every rank.
    """

    def __init__(
        self, tokens: np.ndarray, sequence_length: int, num_samples: int, seed: int
    ) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.num_samples = num_samples
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng((self.seed, index))
        start = int(rng.integers(len(self.tokens) - self.sequence_length))
        window = torch.from_numpy(
            self.tokens[start : start + self.sequence_length + 1].astype(np.int64)
        )
        return window[:-1], window[1:]


class TextData(lightning.LightningDataModule):
    """Batches of (tokens [B, T], targets [B, T]), int64.

    Args:
        batch_size: rows that the loader yields: one rank's, or the global batch under
            `strategy.batch_scope: global`.
        sequence_length: T.
        path: a text file or a `.bin` of uint16 token ids; None: Python's help topics, about 0.7 MB
            of English.
        num_samples: windows in an epoch; None: as many as fit into the text without overlap.
        seed: chooses the windows.
        num_workers: loader processes.
    """

    def __init__(
        self,
        batch_size: int,
        sequence_length: int,
        path: str | None = None,
        num_samples: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if path is not None and not Path(path).is_file():
            raise ValueError(f"path: there is no file {path}")
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        h = self.hparams
        tokens = load_tokens(h.path)
        if len(tokens) <= h.sequence_length:
            raise ValueError(
                f"{h.path or 'the text'} has {len(tokens)} tokens; sequence_length is"
                f" {h.sequence_length}"
            )
        num_samples = h.num_samples or len(tokens) // h.sequence_length
        dataset = Windows(tokens, h.sequence_length, num_samples, h.seed)
        return DataLoader(
            dataset, h.batch_size, shuffle=True, num_workers=h.num_workers, drop_last=True
        )

    def example_batch(self) -> tuple[Tensor, Tensor]:
        """A batch of the right shapes that needs no data: what a plan is made for when nothing is
        trained.
        """
        shape = (self.hparams.batch_size, self.hparams.sequence_length)
        return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
