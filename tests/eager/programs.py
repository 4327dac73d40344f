"""Programs whose steps no graph can hold: they train as they are written, as under DDP. What a user
might write.

A program is a LightningModule without arguments; `rows(rank)` may give each rank a loader of its
own.
"""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, default_collate

WIDTH = 6
CLASSES = 3
ROWS = 4
BATCHES = 6


class Rows(Dataset):
    """Inputs, classes and targets of as many rows as every rank's batches need."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        self.label = torch.randint(0, CLASSES, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.label[i]


class Program(pl.LightningModule):
    """A classifier of two layers that logs its loss as users do under DDP."""

    ddp: ClassVar[str] = "ddp"
    arguments: ClassVar[dict[str, Any]] = {}  # of its Trainer
    begins_captured: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), label)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(2 * ROWS * BATCHES, 1), batch_size=ROWS)


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
    """self.all_gather with gradients: every rank's rows against all ranks'."""

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


class Gan(Program):
    """Two optimizers in turn."""

    ddp = "ddp_find_unused_parameters_true"

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, WIDTH)
        )
        self.critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        del self.net

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        z = torch.randn(len(x), 4, dtype=x.dtype)
        self.toggle_optimizer(first)
        fooled = F.softplus(-self.critic(self.generator(z))).mean()
        self.manual_backward(fooled)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        told = (
            F.softplus(-self.critic(x)).mean()
            + F.softplus(self.critic(self.generator(z).detach())).mean()
        )
        self.manual_backward(told)
        self.clip_gradients(second, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.log_dict({"g": fooled, "d": told}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=0.02)
        second = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 2)]


class GanEveryNSteps(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        fake = self.generator(torch.randn(len(x), 4, dtype=x.dtype))
        told = F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(fake.detach())).mean()
        second.zero_grad()
        self.manual_backward(told)
        second.step()
        if batch_idx % 3 == 0:
            first.zero_grad()
            self.manual_backward(F.softplus(-self.critic(fake)).mean())
            first.step()


class FrozenCritic(Gan):
    """As in pix2pix: the critic is left frozen when a step ends, and trains again within the
    next.
    """

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        fake = self.generator(torch.randn(len(x), 4, dtype=x.dtype))
        self.critic.requires_grad_(True)
        second.zero_grad()
        self.manual_backward(
            F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(fake.detach())).mean()
        )
        second.step()
        for parameter in self.critic.parameters():
            parameter.requires_grad = False
        first.zero_grad()
        self.manual_backward(F.softplus(-self.critic(fake)).mean())
        first.step()


class FreezesInItsStep(Program):
    ddp = "ddp_find_unused_parameters_true"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[0].requires_grad_(batch_idx % 2 == 1)
        return self.loss(*batch)


class AccumulatesByHand(Program):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        is_last = (batch_idx + 1) % 3 == 0
        with optimizer.toggle_model(sync_grad=is_last):
            loss = self.loss(*batch) / 3
            self.manual_backward(loss)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        self.log("train_loss", loss, sync_dist=True)


class SeveralBackwards(AccumulatesByHand):
    """Two losses in a step, gradients of both summed."""

    ddp = "ddp_find_unused_parameters_true"

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        x, label = batch
        optimizer.zero_grad()
        self.manual_backward(self.loss(x, label))
        self.manual_backward(0.1 * self.net[0](x).square().mean())
        optimizer.step()


class ClipsByHand(AccumulatesByHand):
    """Torch's norms between backward and step, by two names and of two kinds; the rest is element
    by element.
    """

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        before = torch.nn.utils.get_total_norm(
            [p.grad for p in self.parameters() if p.grad is not None]
        )
        clip_grad_norm_(self.parameters(), 0.05)
        largest = clip_grad_norm_(self.net.parameters(), 0.01, norm_type=float("inf"))
        for p in self.parameters():
            p.grad.mul_(0.5)
        self.log_dict({"before": before, "largest": largest})
        optimizer.step()


class Lbfgs(AccumulatesByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(*batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Sam(AccumulatesByHand):
    """Sharpness-aware: a step up, a second backward there, then the real step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(*batch))
        with torch.no_grad():
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])
            moves = [0.05 * p.grad / norm for p in self.parameters()]
            for p, move in zip(self.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        with torch.no_grad():
            for p, move in zip(self.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


class ActorCritic(Program):
    """Actions are drawn, returns computed by Python, two parts trained by two optimizers from one
    graph.
    """

    ddp = "ddp_find_unused_parameters_true"

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, label = batch
        policy = torch.distributions.Categorical(logits=self.net(x))
        action = policy.sample()
        reward = torch.tensor(
            [1.0 if int(a) == int(b) else -0.5 for a, b in zip(action, label, strict=True)]
        ).to(x)
        value = self.critic(x).squeeze(1)
        advantage = (reward - value).detach()
        actor, critic = self.optimizers()
        actor.zero_grad()
        critic.zero_grad()
        self.manual_backward(
            -(policy.log_prob(action) * advantage).mean() + F.mse_loss(value, reward)
        )
        actor.step()
        critic.step()
        self.log("reward", reward.mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=0.02), torch.optim.SGD(
            self.critic.parameters(), lr=0.1
        )


class TwoKindsOfOptimizer(Program):
    """Matrices by one optimizer, vectors by another, as Muon with AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(*batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("train_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        matrices = torch.optim.SGD(
            [p for p in self.parameters() if p.ndim > 1], lr=0.1, momentum=0.9
        )
        vectors = torch.optim.AdamW([p for p in self.parameters() if p.ndim == 1], lr=0.02)
        return [matrices, vectors], [
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (matrices, vectors)
        ]


class CapturableAtFirst(Program):
    """Something that no graph can hold comes in the fourth batch only, between two batches of one
    optimizer step.
    """

    begins_captured = True
    arguments: ClassVar = {"accumulate_grad_batches": 2}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen += batch[0].mean() if batch_idx >= 3 else 1.0  # each rank's own, as written
        if batch_idx >= 3 and loss.item() > 1e9:
            return 0 * loss
        return loss


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
    """Word vectors: each rank's rows of a table alone get gradients."""

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
    """Under an optimizer that takes dense gradients too: tables may lie in shards."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("train_loss", loss.item(), sync_dist=True)
        return loss * (2.0 if loss.item() > 0.9 else 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class AccumulatesOneOfAKind(Program):
    """The gradient of a number is complete before those that lie in shards, batch by batch of an
    optimizer step.
    """

    arguments: ClassVar = {"accumulate_grad_batches": 2}

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.scale * self.net(x), label) + self.all_gather(x).mean()


class SetsItsGradients(AccumulatesByHand):
    """To whole tensors of its own (made sample by sample, say), and to new tensors of what is
    there.
    """

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, weights = self.optimizers(), [self.net[0].weight, self.net[2].weight]
        optimizer.zero_grad()
        loss = self.loss(*batch)
        grads = torch.autograd.grad(loss, weights, retain_graph=True)
        self.manual_backward(loss)
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = self.trainer.strategy.reduce(grad.sign(), reduce_op="mean")
        for layer in (self.net[0], self.net[2]):
            layer.bias.grad = layer.bias.grad.clamp(-0.05, 0.05)
        optimizer.step()
        self.log("train_loss", loss, sync_dist=True)


class TrainsElsewhere(Program):
    """Backward passes of its own in a hook and in its validation, where it adapts to a batch for a
    while.
    """

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        x, label = batch
        x.requires_grad_()
        self.loss(x, label).backward()
        self.sharpness = x.grad.norm() * self.net[2].bias.grad.norm()
        self.zero_grad()
        x.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("sharpness", self.sharpness, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, label = batch
        kept = copy.deepcopy(self.net.state_dict())
        with torch.inference_mode(False), torch.enable_grad():
            optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                self.net(x.clone()).softmax(-1).square().sum().neg().backward()
                optimizer.step()
            self.log("adapted", self.loss(x, label).item(), sync_dist=True)
            self.net.load_state_dict(kept)
            self.zero_grad()


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
    """Rows are read one by one beside their names: of all ranks' rows there would be those of one
    rank alone.
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


class WritesAnswers(AccumulatesByHand):
    """Writes answers of a length that the rank's rows decide, beside a frozen reference, and learns
    from them twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reference = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, label = batch
        with torch.no_grad():
            written = x
            for _ in range(6 + int(label[0])):
                written = written + 0.1 * self.net(written).mean(1, keepdim=True)
            liked = self.reference(written)
        for _ in range(2):
            logits = self.net(written)
            with torch.no_grad():  # as it is now, in the midst of what a backward needs
                sure = self.net(x).softmax(1).amax(1)
            loss = (F.cross_entropy(logits, label, reduction="none") * sure).mean() + F.mse_loss(
                logits, liked
            )
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("train_loss", loss, sync_dist=True)


class Borrows(Program):
    """Uses a weight of one of its layers through a list, and a value of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.borrowed = [self.net[2].weight]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch) + self.borrowed[0].square().mean()
        return loss * (2.0 if loss.item() > 0.9 else 1.0)


PROGRAMS = {
    program.__name__: program
    for program in (
        ReadsItsLoss,
        LooksAtItsWeights,
        LooksThroughViews,
        PerturbsItsWeights,
        FrozenCritic,
        FreezesInItsStep,
        KeepsARunningMean,
        SelectsRows,
        LoopsOverExperts,
        GradientPenalty,
        LearnsToLearn,
        MoCo,
        Contrastive,
        Checkpointed,
        RankDependent,
        Pruned,
        LotteryTickets,
        OtherShapes,
        Normalized,
        Recurrent,
        Gan,
        GanEveryNSteps,
        AccumulatesByHand,
        SeveralBackwards,
        ClipsByHand,
        AccumulatesOneOfAKind,
        SetsItsGradients,
        TrainsElsewhere,
        Lbfgs,
        Sam,
        ActorCritic,
        TwoKindsOfOptimizer,
        CapturableAtFirst,
        AveragesWeights,
        Annealed,
        SparseAdjacency,
        Functions,
        Scripted,
        WritesAnswers,
        EvaluatesInside,
        TimesRanks,
        TimesRanksByGroup,
        LengthsLater,
        ManyLengths,
        SparseTables,
        SparseTablesBySgd,
        Adversarial,
        CopiesItsNet,
        HookOfAWeight,
        HookOfWhatIsMade,
        CountsNames,
        CountsRecords,
    )
}
