"""Programs with hooks around a batch: `on_before_batch_transfer` and `on_after_batch_transfer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

ROWS = 6


BATCHES = 5


WIDTH = 6


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2 * ROWS * BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator, dtype=torch.float64), torch.tensor(index % 3)


class Net(pl.LightningModule):
    """A classifier; its loss takes the batch as a dict that the hook below has made of x and y."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))
        self.calls, self.generator = 0, torch.Generator().manual_seed(7)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0], "y": batch[1]}

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        """each: of a row."""
        return each.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        each = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
        loss = self.loss(batch, each)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Samples(), ROWS)


class Normalised(Net):
    """In place, and counts its calls."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls += 1
        batch[0].sub_(0.1).div_(2.0)
        return super().on_after_batch_transfer(batch, dataloader_idx)


class Flipped(Net):
    """Some rows, chosen at random, half of them by a generator of its own."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        flips = (torch.rand(len(x)) < 0.5) ^ (torch.rand(len(x), generator=self.generator) < 0.5)
        return {"x": torch.where(flips[:, None], x.flip(1), x), "y": y}


class MixedUp(Net):
    """Labels of both, and one factor for all."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        factor, order = torch.rand((), dtype=x.dtype), torch.randperm(len(x))
        return {
            "x": factor * x + (1 - factor) * x[order],
            "y": y,
            "other": y[order],
            "factor": factor,
        }

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        other = F.cross_entropy(self.net(batch["x"]), batch["other"])
        return batch["factor"] * each.mean() + (1 - batch["factor"]) * other


class TwoViews(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return {"x": torch.cat([x, x + 0.1 * torch.randn_like(x)]), "y": torch.cat([y, y])}

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        first, second = self.net(batch["x"]).chunk(2)
        return each.mean() + (first - second).square().mean()


class Indexed(Net):
    """Compares each row with another one of its batch."""

    def indices(self, x: Tensor) -> Tensor:
        return torch.randperm(len(x))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return *batch, self.indices(batch[0])

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0], "y": batch[1], "index": batch[2]}

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        hidden = self.net(batch["x"])
        return each.mean() - 0.1 * (hidden - hidden[batch["index"]]).square().mean()


class RandomNegatives(Indexed):
    def indices(self, x: Tensor) -> Tensor:
        return torch.randint(0, len(x), (len(x), 2))

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        hidden = self.net(batch["x"])
        return each.mean() - 0.1 * (hidden[:, None] - hidden[batch["index"]]).square().mean()


class HardNegatives(Indexed):
    def indices(self, x: Tensor) -> Tensor:
        return torch.cdist(x, x).argmax(1)


class Counted(Net):
    """A number made of this rank's samples."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        x, y = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return x, y, (y > 0).sum()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0], "y": batch[1], "count": batch[2]}

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return ((batch["y"] > 0) * each).sum() / batch["count"]


class Weighted(Net):
    """By class: the same for all rows."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {
            **super().on_after_batch_transfer(batch, dataloader_idx),
            "weights": torch.tensor([1.0, 2.0, 0.5]),
        }

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return (batch["weights"][batch["y"]] * each).mean()


class Cropped(Net):
    """Whole numbers at random that count no rows."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return {"x": x, "y": y, "shift": torch.randint(0, 1000, (len(x),))}

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return (each * (1 + batch["shift"] / 1000)).mean()


class Standardised(Net):
    """By the mean and spread of this rank's samples."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return {"x": (x - x.mean(0)) / (1 + x.std(0)), "y": y}


class Shares(Net):
    """Each row's share of the batch: they sum to one on every rank."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return {"x": x, "y": y, "share": self.shares(x, y)}

    def shares(self, x: Tensor, y: Tensor) -> Tensor:
        return 1.0 / (torch.bincount(y, minlength=3)[y] * len(y))

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return (each * batch["share"]).sum()


class RandomShares(Shares):
    def shares(self, x: Tensor, y: Tensor) -> Tensor:
        chosen = 0.1 + torch.rand(len(x))
        return chosen / chosen.sum()


class RunningMean(Net):
    """A buffer that the hook changes: under DDP it is rank 0's when a step begins."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        self.mean.lerp_(x.mean(0), 0.1)
        return {"x": x - self.mean, "y": y}


class OnlySixRows(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0].view(ROWS, WIDTH), "y": batch[1]}


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2 * ROWS * BATCHES

    def __getitem__(self, index: int) -> str:
        return f"{index * 7919:06d}"


class Tokenized(Net):
    """The loader gives texts."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        letters = [list(map(float, text)) for text in batch]
        codes = torch.tensor(letters, dtype=torch.float64)
        return codes, codes[:, 0].long() % 3

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Texts(), ROWS)


class Data(pl.LightningDataModule):
    """The hook is the data module's."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        two_views: Any = TwoViews.on_after_batch_transfer
        return two_views(self, batch, dataloader_idx)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Samples(), ROWS)


class OfTheData(Net):
    make_data: Callable[[], Any] = Data


class NamedAsAMethod(Net):
    """A callback keeps what it calls as the module calls a method of its own."""

    class Keeps(pl.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.loss = float(outputs["loss"]) * len(batch["x"])

    def configure_callbacks(self) -> Any:
        return [self.Keeps()]
