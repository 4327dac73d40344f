"""Programs that store samples of a batch, or numbers of them, for the step to read."""

from __future__ import annotations

import copy
import threading
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from strategy.transfer_hook_programs import ROWS, WIDTH, Net, Samples
from torch import Tensor
from torch.utils.data import DataLoader


class RowsOfTheStep(Net):
    """A number that stands for a rank's samples, as its hook says."""

    n = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.n = float(len(batch["x"]))

    def loss(self, batch: Any, each: Tensor) -> Tensor:
        return each.sum() / self.n


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
