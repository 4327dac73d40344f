"""What hooks around a batch make of its rows is tried: rows stay captured, all else runs per
replica, as DDP.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy

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
    """A number made of this rank's rows."""

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
    """By the mean and spread of this rank's rows."""

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


class RowsOfTheStep(Net):
    """A number that stands for a rank's rows, as its hook says."""

    n = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.n = float(len(batch["x"]))

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.sum() / self.n


class NamedAsAMethod(Net):
    """A callback keeps what it calls as the module calls a method of its own."""

    class Keeps(pl.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.loss = float(outputs["loss"]) * len(batch["x"])

    def configure_callbacks(self) -> Any:
        return [self.Keeps()]


class RowsOfTheTransfer(RowsOfTheStep):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not hasattr(self, "count"):
            self.count = {"rows": len(batch[0])}
        return super().on_after_batch_transfer(batch, dataloader_idx)

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.sum() / self.count["rows"]


class RowsOfACallback(RowsOfTheStep):
    on_train_batch_start = pl.LightningModule.on_train_batch_start

    class Counts(pl.Callback):
        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int
        ) -> None:
            setattr(module, "n", 3.0 * batch["x"].shape[0])  # noqa: B010

    def configure_callbacks(self) -> Any:
        return [self.Counts()]


class RowsInABuffer(RowsOfTheStep):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.mean.fill_(len(batch["x"]))

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.sum() / self.mean[0]


class RowsOfTheLastBatch(RowsOfTheStep):
    """Known when the first batch ends, as it wants outputs: the second step is the first that is
    per replica.
    """

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.n = float(len(batch["x"])) + 0 * float(outputs["loss"])

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.mean() if self.n == 1.0 else each.sum() / self.n


class RowsOfTheLastBatchAhead(RowsOfTheLastBatch):
    """The hook needs no outputs, so that all steps are per replica."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.n = float(len(batch["x"]))

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.sum() / self.n


class RowsInAContainer(RowsOfTheStep):
    def on_fit_start(self) -> None:
        self.rows: dict[str, float] = {"n": 1.0}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rows["n"] = float(len(batch["x"]))

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.sum() / self.rows["n"]


class RowsUpdated(RowsInAContainer):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rows.update(n=float(len(batch["x"])))


class RowsOfTheGradient(RowsOfTheStep):
    """Sums of losses, whose gradients a hook divides."""

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.sum()

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad /= self.n


class DividedByACallback(RowsOfTheGradient):
    on_train_batch_start = pl.LightningModule.on_train_batch_start
    on_after_backward = pl.LightningModule.on_after_backward

    class Divides(pl.Callback):
        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int
        ) -> None:
            self.rows = len(batch["x"])

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            for parameter in module.parameters():
                parameter.grad /= self.rows

    def configure_callbacks(self) -> Any:
        return [self.Divides()]


class DividedByTheBatchSize(Net):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = ROWS

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.sum()

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad /= self.batch_size


class RowsFromTheLoader(Net):
    """Stored before the first batch, in a line that says what it is."""

    def on_train_start(self) -> None:
        self.n = self.trainer.train_dataloader.batch_size

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.sum() / self.n


class TimesTheRanks(Net):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad *= self.trainer.world_size


class NumberInTheBatch(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0], "y": batch[1], "n": float(len(batch[0])), "half": 0.5}

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.sum() / batch["n"]


class SameNumberInTheBatch(NumberInTheBatch):
    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.mean() * batch["half"]


class NumberOfTheCollation(Net):
    """A share of the rows, in the loader's batch."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Samples(), ROWS, collate_fn=with_share)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.sum() * batch["share"]


def with_share(samples: list[Any]) -> dict[str, Any]:
    x, y = torch.utils.data.default_collate(samples)
    return {"x": x, "y": y, "share": 1.0 / len(samples)}


class OnlySixRowsInTheStep(RowsOfTheStep):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.n = float(batch["x"].view(ROWS, WIDTH).size(0))


class OnlySixRowsAfterAChange(OnlySixRowsInTheStep):
    """It has changed weights already when it fails on more rows."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.net[0].weight.mul_(0.5)
        super().on_train_batch_start(batch, batch_idx)


class AsManyByChance(RowsOfTheStep):
    """Numbers that are equal to the rows; what hooks change besides is changed once a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.seen = ROWS, 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.n, self.largest = float(ROWS), 6 + batch_idx
        self.seen += 1
        self.mean.add_(1.0)
        with torch.no_grad():
            self.net[0].bias.mul_(0.5)
        self.log("seen", float(self.seen))
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.mean() * self.n / self.heads * self.mean[0] / self.largest


class Tracker:
    def __init__(self) -> None:
        self.calls = 0


class AveragesOutside(Net):
    """Its hook stores what the step reads, and changes what a trial must put back: through `.data`,
    in a network that
    is no submodule, in tensors, arrays and objects."""

    factor = 1.0

    def on_fit_start(self) -> None:
        self.teachers = [copy.deepcopy(self.net).requires_grad_(False)]
        self.seen = {"steps": torch.zeros(())}
        self.counts = np.zeros(2)
        self.tracker = Tracker()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.factor = 1.0 + batch_idx
        self.move()
        self.seen["steps"].add_(1)
        self.counts += 1
        self.tracker.calls += 1
        self.mean.data.add_(1.0)
        self.mean[1:4] = torch.tensor(
            [float(self.seen["steps"]), self.counts[0], self.tracker.calls]
        )

    def move(self) -> None:
        for own, mean in zip(self.net.parameters(), self.teachers[0].parameters(), strict=True):
            mean.data.mul_(0.5).add_(own.data, alpha=0.5)

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.mean() + self.factor * F.mse_loss(
            self.net(batch["x"]), self.teachers[0](batch["x"])
        )


class AveragesInOtherMemory(AveragesOutside):
    def move(self) -> None:
        for own, mean in zip(self.net.parameters(), self.teachers[0].parameters(), strict=True):
            mean.data = 0.5 * mean.data + 0.5 * own.data


class Pace:
    """What a hook changes: an attribute of a class, a slot, an attribute of a function, of the
    Trainer, a dataset's.
    """

    __slots__ = ("now",)
    of_all = 1.0

    def __init__(self) -> None:
        self.now = 1.0


def paced(loss: Tensor) -> Tensor:
    return loss * getattr(paced, "factor", 1.0)


class ChangesFarAway(Net):
    def on_fit_start(self) -> None:
        self.pace = Pace()
        Pace.of_all, paced.factor = 1.0, 1.0  # type: ignore[attr-defined]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        Pace.of_all *= 0.9
        self.pace.now *= 0.9
        paced.factor *= 0.9  # type: ignore[attr-defined]
        self.trainer.pace = getattr(self.trainer, "pace", 1.0) * 0.9
        data = self.trainer.train_dataloader.dataset
        data.pace = getattr(data, "pace", 1.0) * 0.9

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        far = getattr(self.trainer, "pace", 1.0) * getattr(
            self.trainer.train_dataloader.dataset, "pace", 1.0
        )
        return paced(each.mean()) * Pace.of_all * self.pace.now * far


class TakesTheNext(RowsOfTheStep):
    """Hooks around the step are not tried: they may do what cannot be put back."""

    def on_fit_start(self) -> None:
        self.numbers = iter(range(100))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.n = 1.0 + next(self.numbers)

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.mean() / self.n


class CallbackOfAThread(Net):
    """What runs beside the step, and changes its own variables meanwhile, is no change of the
    step's.
    """

    class Watches(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            self.monitor = Monitor()
            self.monitor.start()

        def on_train_batch_start(self, *_: Any) -> None:
            self.seen = self.monitor.count

        def on_train_end(self, *_: Any) -> None:
            self.monitor.ended.set()
            self.monitor.join()

    def configure_callbacks(self) -> Any:
        return [self.Watches()]


class Fills(threading.Thread):
    """Fills a list of a dataset, from the first batch on."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()

    def __call__(self, items: list[int]) -> None:
        self.items = items
        self.start()

    def run(self) -> None:
        count = 0
        while not self.ended.wait(1e-4):
            self.items.append(count := count + 1)


class DatasetOfAThread(Net):
    """What a thread puts into the dataset, of which the step reads something else, is all there
    afterwards.
    """

    def on_train_start(self) -> None:
        data = self.trainer.train_dataloader.dataset
        data.scale = 2.0
        data.items = []
        data.fills = Fills()
        data.fills(data.items)

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.mean() * self.trainer.train_dataloader.dataset.scale

    def on_train_end(self) -> None:
        fills = self.trainer.train_dataloader.dataset.fills
        fills.ended.set()
        fills.join()
        assert fills.items == list(range(1, 1 + len(fills.items)))


class Monitor(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(1e-4):
            self.count += 1


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(
    name: str, strategy: Any, root: str
) -> tuple[dict[str, Tensor], list[float], bool, list[str]]:
    """Return the final state, losses by step, whether steps were eager, and the package's log."""
    torch.manual_seed(5)
    model = globals()[name]().double()
    losses: list[float] = []
    said = Lines()

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            losses.append(float(trainer.callback_metrics["loss"]))

    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(said)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        strategy=strategy,
        default_root_dir=root,
        callbacks=[Watch()],
        **QUIET,
    )
    trainer.fit(model, datamodule=model.make_data() if hasattr(model, "make_data") else None)
    logger.removeHandler(said)
    assert "_on_before_batch_transfer" not in vars(model)
    as_written = strategy != "ddp" and strategy.plan.is_eager
    return model.state_dict(), losses, as_written, [x for x in said.lines if x.startswith("alpa:")]


def train_both(name: str, root: str) -> Any:
    return train(name, "ddp", root), train(
        name, AlpaStrategy(cluster="pcie_8gpu", verbose=False), root
    )


CAPTURED = ["Flipped", "MixedUp", "Weighted", "Cropped", "Tokenized"]
PER_REPLICA = [
    "TwoViews",
    "Indexed",
    "RandomNegatives",
    "HardNegatives",
    "Counted",
    "RunningMean",
    "OnlySixRows",
]
PER_REPLICA += ["Standardised", "Shares", "RandomShares"]
CAPTURED += ["AsManyByChance"]
PER_REPLICA += [
    "RowsOfTheStep",
    "RowsOfTheTransfer",
    "RowsOfACallback",
    "RowsInABuffer",
    "RowsOfTheLastBatch",
]
PER_REPLICA += [
    "OnlySixRowsInTheStep",
    "OnlySixRowsAfterAChange",
    "RowsOfTheLastBatchAhead",
    "RowsOfTheGradient",
    "DividedByACallback",
]
PER_REPLICA += [
    "DividedByTheBatchSize",
    "TimesTheRanks",
    "NumberInTheBatch",
    "NumberOfTheCollation",
]
CAPTURED += ["SameNumberInTheBatch"]
PER_REPLICA += ["RowsFromTheLoader", "Normalised", "RowsInAContainer", "RowsUpdated"]
CAPTURED += ["TakesTheNext", "CallbackOfAThread", "DatasetOfAThread"]
CAPTURED += ["NamedAsAMethod", "AveragesOutside", "AveragesInOtherMemory", "ChangesFarAway"]


@pytest.mark.parametrize("name", [*CAPTURED, *PER_REPLICA, "OfTheData"])
def test_what_a_hook_makes_of_rows_is_known(pool, tmp_path, name: str) -> None:
    (expected, found), (_, second) = pool.run(2, train_both, name, str(tmp_path))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        found[1], expected[1], rtol=1e-9, atol=1e-9
    )  # all numbers at random are the same ones
    assert found[2] == (name not in CAPTURED)
    assert all(torch.equal(found[0][key], second[0][key]) for key in found[0] if key != "mean")
    said = " ".join(found[3])
    assert ("mixup and the like" in said) == (name == "MixedUp")
    assert ("as they are written" in said) == (name not in CAPTURED)
    if name.startswith("RowsOf") and name != "RowsOfTheTransfer":
        assert "the step reads what a hook stores that reads this rank's rows: n (" in said
    if name == "OnlySixRows":
        assert "on_after_batch_transfer cannot be tried on more rows: RuntimeError: shape" in said
