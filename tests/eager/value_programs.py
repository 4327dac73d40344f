"""Programs whose step depends on values of tensors, on ranks, or on shapes."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import torchmetrics
from eager.program_base import BATCHES, CLASSES, ROWS, WIDTH, Program, Rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


class ReadsItsLoss(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        if loss.item() > 1.0:
            loss = 2.0 * loss
        if torch.isnan(loss):
            raise FloatingPointError("no number")
        self.log("train_loss", float(loss), sync_dist=True)
        return loss


class LooksAtItsWeights(Program):
    """Whole parameters for what it generates, a gradient step and a checkpoint in the midst of a
    step.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label = batch
        whole = getattr(self.trainer.strategy, "whole_parameters", contextlib.nullcontext)
        with whole(), torch.no_grad():
            guessed = self.net(x).argmax(-1)
            size = sum(float(p.abs().sum()) for p in self.parameters())
        loss = self.loss(x, label)
        if batch_idx == 2:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/in_step.ckpt")
        self.log_dict({"right": (guessed == label).double().mean(), "size": size}, sync_dist=True)
        return loss * (1 + size / 1000)


class LooksThroughViews(Program):
    """A view of a weight, made before the training, shows what the weight is now."""

    def __init__(self) -> None:
        super().__init__()
        self.view, self.transposed = self.net[0].weight.data, self.net[0].weight.t()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label = batch
        loss = self.loss(x, label) + (x @ self.transposed).square().mean()
        loss = loss + 0.1 * (self.net[0].weight * self.view).sum()
        self.log_dict({"train_loss": loss.item(), "norm": self.view.norm()}, sync_dist=True)
        return loss


class PerturbsItsWeights(Program):
    """Its weights are others for a while, and what they were again, all within a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = []
        for factor in (1.5, 0.5, 4 / 3):
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.mul_(factor)
                losses.append(self.loss(*batch).item())
        loss = self.loss(*batch) * (1 + losses[0] - losses[1])
        self.log_dict(
            {"train_loss": loss, "sharpness": losses[0] + losses[1] - 2 * losses[2]}, sync_dist=True
        )
        return loss


class KeepsARunningMean(Program):
    def __init__(self) -> None:
        super().__init__()
        self.mean = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        self.log("mean", self.mean, sync_dist=True)
        return loss / self.mean


class SelectsRows(Program):
    """Boolean masks and nonzero: shapes depend on data, and on the rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label = batch
        hard = x[:, 0] > -0.5
        chosen = torch.nonzero(label == 1).flatten()
        loss = self.loss(x, label) + self.net(x[hard]).square().sum() + self.net(x[chosen]).sum()
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Experts(nn.Module):
    """A mixture of experts as it was first written: each gets the rows that chose it, and keeps
    statistics of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = self.gate(hidden).softmax(-1).topk(2, -1)
        result = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            result.index_add_(0, rows, torch.tanh(expert(hidden[rows])) * weights[rows, slot, None])
        return self.norm(result[:, None])[:, 0]


class LoopsOverExperts(Program):
    """Shapes depend on data inside of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, Experts())


class GradientPenalty(Program):
    """autograd.grad inside: the backward is differentiated again."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label = batch
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).logsumexp(1).sum(), x, create_graph=True)
        loss = self.loss(x, label) + (slope.norm(dim=1) - 1).square().mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss if loss.item() < 1e3 else 0.1 * loss


class LearnsToLearn(Program):
    """MAML as learn2learn writes it: a learner shares the net's attributes, but for weights made of
    the net's.
    """

    def _learner(self, module: nn.Module) -> nn.Module:
        learner = copy.copy(module)
        learner._parameters = {name: weight.clone() for name, weight in module._parameters.items()}
        learner._modules = {name: self._learner(child) for name, child in module._modules.items()}
        return learner

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label = batch
        learner = self._learner(self.net)
        places = [
            (each._parameters, name) for each in learner.modules() for name in each._parameters
        ]
        loss = F.cross_entropy(learner(x[::2]), label[::2])
        weights = [weights[name] for weights, name in places]
        slopes = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        for (own, name), slope in zip(places, slopes, strict=True):
            if slope is not None:  # of no part in the loss
                own[name] = own[name] - 0.5 * slope
        loss = F.cross_entropy(learner(x[1::2]), label[1::2])
        self.log("train_loss", loss.item(), sync_dist=True)
        return loss


class MoCo(Program):
    """Momentum weights and a queue of keys, updated in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.key_net = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("queue", torch.randn(CLASSES, 16))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _keys(self, x: Tensor) -> Tensor:
        for q, k in zip(self.net.parameters(), self.key_net.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1
        return F.normalize(self.key_net(x), dim=1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        q, k = F.normalize(self.net(x), dim=1), self._keys(x + 0.1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1)
        loss = F.cross_entropy(logits / 0.5, torch.zeros(len(x), dtype=torch.long))
        keys = self.all_gather(k).flatten(0, 1)
        place = int(self.place)
        self.queue[:, place : place + len(keys)] = keys.T
        self.place[0] = (place + len(keys)) % 16
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Contrastive(Program):
    """self.all_gather with gradients: every rank's samples against all ranks'."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = F.normalize(self.net(batch[0]), dim=1)
        everybody = self.all_gather(z, sync_grads=True).flatten(0, 1)
        own = torch.arange(len(z)) + self.global_rank * len(z)
        loss = F.cross_entropy(z @ everybody.T, own)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Checkpointed(Program):
    """Reentrant recomputation, of a layer that is used twice as well."""

    use_reentrant = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label = batch
        x = x.requires_grad_()
        h = checkpoint(self.net[0], x, use_reentrant=self.use_reentrant)
        loss = F.cross_entropy(checkpoint(self.net[1:], h, use_reentrant=self.use_reentrant), label)
        self.log("train_loss", loss.item(), sync_dist=True)
        return loss if loss.item() < 100 else loss / 2


class CheckpointedTwice(Checkpointed):
    """A weight whose gradient comes in two parts: DDP refuses it; compared without
    recomputation.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label = batch
        x = x.requires_grad_()

        def again(layer: Any, x: Tensor) -> Tensor:
            return checkpoint(layer, x, use_reentrant=True) if self.use_reentrant else layer(x)

        h = again(self.net[0], x) + again(self.net[0], 2 * x)
        loss = F.cross_entropy(again(self.net[1:], h), label)
        return loss if loss.item() < 100 else loss / 2


class RankDependent(Program):
    """Each rank uses another head, rank 0 sometimes none; one head is never used."""

    ddp = "ddp_find_unused_parameters_true"

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label = batch
        h = self.net(x)
        if self.global_rank == 1 or batch_idx % 2:
            h = self.heads[self.global_rank](h)
        loss = F.cross_entropy(h, label)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class OtherShapes(Program):
    """Lengths that differ between ranks and steps; a custom batch class."""

    class Packed:
        def __init__(self, rows: list[Any]) -> None:
            self.x = torch.cat(
                [x.repeat(1 + int(label) + i % 3, 1) for i, (x, label) in enumerate(rows)]
            )
            self.sizes = [1 + int(label) + i % 3 for i, (_, label) in enumerate(rows)]
            self.label = torch.stack([label for _, label in rows])

        def to(self, device: Any, **_: Any) -> Any:
            return self

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = torch.stack([part.mean(0) for part in self.net(batch.x).split(batch.sizes)])
        loss = F.cross_entropy(h, batch.label)
        self.log("train_loss", loss, sync_dist=True, batch_size=len(batch.label))
        return loss

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(2 * ROWS * BATCHES, 1), batch_size=ROWS, collate_fn=self.Packed)


class Normalized(Program):
    """BatchNorm's statistics are rank 0's when a step begins; accumulated, clipped; dropout is each
    rank's own.
    """

    arguments: ClassVar = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, CLASSES)
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, label)
        self.accuracy(logits, label)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("train_loss", loss.item(), sync_dist=True, on_epoch=True)
        return loss if math.isfinite(loss.item()) else 0 * loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(*batch), sync_dist=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Rows(2 * ROWS * 2, 2), batch_size=ROWS)


class Recurrent(Program):
    """Parameters that a module keeps in a list, that are used past their module, shared, and used
    twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, 8, batch_first=True)
        self.embed = nn.Linear(8, 16, bias=False)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(64))
        self.head = nn.Linear(16, CLASSES)
        del self.net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label = batch
        h = self.embed(self.rnn(x[:, None] * torch.ones(3, 1, dtype=x.dtype))[0])
        h = self.attention(h, h, h)[0]
        h = F.linear(h, self.embed.weight.T).repeat(1, 1, 8) * self.scale
        h = self.head(self.embed(h[..., :8])).mean(1)
        loss = F.cross_entropy(h, label) + 1e-3 * sum(p.square().sum() for p in self.parameters())
        self.log("train_loss", loss.item(), sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log(
            "val",
            self.head(self.embed(self.rnn(batch[0][:, None])[0][:, 0])).square().mean(),
            sync_dist=True,
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Rows(2 * ROWS * 2, 2), batch_size=ROWS)


class FreezesInItsStep(Program):
    ddp = "ddp_find_unused_parameters_true"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[0].requires_grad_(batch_idx % 2 == 1)
        return self.loss(*batch)
