"""Programs whose step changes modules, hooks or Python state, or runs code of other kinds."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from eager.program_base import BATCHES, CLASSES, ROWS, WIDTH, Program, Rows
from eager.value_programs import ReadsItsLoss
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate


class AveragesWeights(Program):
    """An average of the weights that is no part of the module, changed within `optimizer_step`."""

    def on_fit_start(self) -> None:
        self.average = [p.detach().clone() for p in self.net.parameters()]

    def whole(self) -> Any:
        return getattr(self.trainer.strategy, "whole_parameters", contextlib.nullcontext)()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("average", sum(p.sum().item() for p in self.average))
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with self.whole():
            self.take()

    @torch.no_grad()
    def take(self, *_: Any) -> None:
        for p, q in zip(self.average, self.net.parameters(), strict=True):
            p.lerp_(q, 0.1)


class AveragesParts(AveragesWeights):
    """The same by the loader, which is no hook."""

    def train_dataloader(self) -> DataLoader:
        def collate(samples: Any) -> Any:
            self.take()
            return default_collate(samples)

        return DataLoader(Rows(2 * ROWS * BATCHES, 1), batch_size=ROWS, collate_fn=collate)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pl.LightningModule.optimizer_step(self, *args, **kwargs)


class Annealed(Program):
    """Temperatures in a list and a length are others in every batch: each would be another
    capture.
    """

    begins_captured = True

    def __init__(self) -> None:
        super().__init__()
        self.temperatures, self.length = [2.0], 20

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(
            self.net(x) / self.temperatures[0] + 0 * x.new_ones(self.length).sum(), label
        )

    def on_train_batch_end(self, *_: Any) -> None:
        self.temperatures[0] *= 0.95
        self.length -= 1


class SparseAdjacency(Program):
    """A graph's neighbours in a sparse matrix, which autograd keeps for the backward."""

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        near = (x @ x.T > 0).to(x.dtype).to_sparse()
        return F.cross_entropy(torch.sparse.mm(near, self.net(x)), label)


class Functions(Program):
    """Transforms of torch.func: a step of gradient descent inside of the step, tangents,
    Jacobians.
    """

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        def inner(weights: Any, x: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(
                torch.func.functional_call(self.net, weights, (x[None],)), label[None]
            )

        def task(x: Tensor, label: Tensor) -> Tensor:
            weights = dict(self.net.named_parameters())
            gradients = torch.func.grad(inner)(weights, x, label)
            return inner({key: weights[key] - 0.1 * gradients[key] for key in weights}, x, label)

        _, tangent = torch.func.jvp(self.net, (x,), (x.flip(0),))
        jacobian = torch.func.vmap(torch.func.jacrev(self.net))(x)
        return (
            torch.func.vmap(task)(x, label).mean()
            + tangent.square().mean()
            + jacobian.square().mean()
        )


class Scripted(Program):
    """TorchScript, whose modules keep their parameters elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.jit.script(self.net)


class EvaluatesInside(Program):
    """A direction for the inputs by a net that evaluates within the step, and trains again after
    it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        logits, near = self.net(x), x.clone().requires_grad_()
        self.net.eval()
        (direction,) = torch.autograd.grad(F.cross_entropy(self.net(near), label), near)
        self.net.train()
        return F.cross_entropy(logits, label) + self.net(x + direction.sign()).square().mean()


class TimesRanks(Program):
    """A sum over rows, times the ranks that DDP will divide it by."""

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), label, reduction="sum") * self.trainer.world_size


class TimesRanksByGroup(Program):
    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        return (
            F.cross_entropy(self.net(x), label, reduction="sum")
            * torch.distributed.get_world_size()
        )


class LengthsLater(Program):
    """Batches of one shape at first, then of shapes that differ between the ranks."""

    begins_captured = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label = batch
        loss = F.cross_entropy(self.net(x).mean(1), label)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def train_dataloader(self) -> DataLoader:
        def collate(rows: list[Any]) -> Any:
            x, label = torch.utils.data.default_collate(rows)
            length = 3 if self.trainer.global_step < 3 else 3 + int(label[0])
            return x[:, None].expand(-1, length, -1) + torch.arange(length)[:, None], label

        return DataLoader(Rows(2 * ROWS * BATCHES, 1), batch_size=ROWS, collate_fn=collate)


class ManyLengths(LengthsLater):
    """Another length in every batch, the same on all ranks."""

    arguments: ClassVar = {"max_epochs": 3}

    def train_dataloader(self) -> DataLoader:
        def collate(rows: list[Any]) -> Any:
            x, label = torch.utils.data.default_collate(rows)
            length = 2 + self.trainer.global_step
            return x[:, None].expand(-1, length, -1) + torch.arange(length)[:, None], label

        return DataLoader(Rows(2 * ROWS * BATCHES, 1), batch_size=ROWS, collate_fn=collate)


class Pruned(Program):
    """Masks that grow at the end of every epoch, and are made permanent in what is left."""

    arguments: ClassVar[dict[str, Any]] = {"max_epochs": 3}

    def configure_callbacks(self) -> Any:
        return [ModelPruning("l1_unstructured", amount=0.3, parameter_names=["weight"])]


class LotteryTickets(Pruned):
    """Pruned weights begin again at their first values."""

    def configure_callbacks(self) -> Any:
        return [ModelPruning("l1_unstructured", amount=2, use_global_unstructured=True)]


class SparseTables(Program):
    """Word vectors: each rank's samples of a table alone get gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList(
            [nn.Embedding(30, WIDTH, sparse=True), nn.Embedding(CLASSES, WIDTH, sparse=True)]
        )

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        words = (x * 4).long().clamp(-10, 10) + 10  # [rows, WIDTH]
        return F.cross_entropy(
            self.net[0](words).mean(1) @ self.net[1](torch.arange(CLASSES)).T, label
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(list(self.parameters()), lr=0.02)


class SparseTablesBySgd(SparseTables):
    """Under an optimizer that takes dense gradients too: tables may be in shards."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("train_loss", loss.item(), sync_dist=True)
        return loss * (2.0 if loss.item() > 0.9 else 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Adversarial(Program):
    """Its step runs a backward for the inputs' gradient and clears what that left in the
    weights.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label = batch
        x = x.clone().requires_grad_()
        self.loss(x, label).backward()
        self.net.zero_grad()
        loss = self.loss(x.detach() + 0.1 * x.grad.sign(), label)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class CopiesItsNet(ReadsItsLoss):
    """A moving average that begins as a copy, made within a step, of the net as it is then."""

    def __init__(self) -> None:
        super().__init__()
        self.average: nn.Module | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.average is None and batch_idx == 2:
            self.average = copy.deepcopy(self.net).requires_grad_(False)
        elif self.average is not None:
            for slow, fast in zip(self.average.parameters(), self.net.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return super().training_step(batch, batch_idx)


class HookOfAWeight(Program):
    """The gradient of a weight is changed where a rank's backward makes it, not linearly."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class HookOfWhatIsMade(HookOfAWeight):
    """The same in `grad` itself."""

    def __init__(self) -> None:
        Program.__init__(self)
        self.net[0].weight.register_post_accumulate_grad_hook(self.clamp)

    def clamp(self, parameter: Tensor) -> None:
        parameter.grad.clamp_(-0.01, 0.01)


class ClipsInBackward(Program):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        nn.utils.clip_grad_value_(self.parameters(), 0.01)


class Named(Rows):
    """Each row has a name, of which the default collate function makes a list."""

    def __getitem__(self, i: int) -> Any:
        return *super().__getitem__(i), f"row {i}"


class CountsNames(Program):
    """Rows are read one by one beside their names: of all ranks' samples there would be those of
    one rank alone.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label, names = batch
        losses = F.cross_entropy(self.net(x), label, reduction="none")
        loss = sum(losses[i] for i, _ in enumerate(names)) / 4
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Named(2 * ROWS * BATCHES, 1), batch_size=ROWS)


class CountsRecords(CountsNames):
    """The same with a record for each row, of a collate function of one's own."""

    def train_dataloader(self) -> DataLoader:
        def collate(samples: Any) -> Any:
            x, label, _ = zip(*samples, strict=True)
            return (
                torch.stack(x),
                torch.stack(label),
                [{"kind": "image", "weight": 1.0} for _ in samples],
            )

        return DataLoader(Named(2 * ROWS * BATCHES, 1), batch_size=ROWS, collate_fn=collate)


class LooksAtNames(CountsNames):
    """A list of names that takes no part in the computation is captured, even where one is read."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label, names = batch
        assert isinstance(names[0], str)
        return self.loss(x, label)


class Borrows(Program):
    """Uses a weight of one of its layers through a list, and a value of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.borrowed = [self.net[2].weight]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch) + self.borrowed[0].square().mean()
        return loss * (2.0 if loss.item() > 0.9 else 1.0)
