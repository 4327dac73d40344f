"""Programs of manual optimization, or with several optimizers."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from eager.program_base import WIDTH, Program
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader


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
        rewards = []
        for chosen, right in zip(action, label, strict=True):
            rewards.append(1.0 if int(chosen) == int(right) else -0.5)
        reward = torch.tensor(rewards).to(x)
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


class MuonAndAdamW(TwoKindsOfOptimizer):
    """Matrices by Muon, which needs them in full, vectors by AdamW."""

    def configure_optimizers(self) -> Any:
        matrices = torch.optim.Muon([p for p in self.parameters() if p.ndim > 1], lr=0.02)
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
        # each rank has a value of its own: such a step is eager
        self.seen += batch[0].mean() if batch_idx >= 3 else 1.0
        if batch_idx >= 3 and loss.item() > 1e9:
            return 0 * loss
        return loss


class AccumulatesOneOfAKind(Program):
    """The gradient of a number is complete before those that are in shards, batch by batch of an
    optimizer step.
    """

    arguments: ClassVar = {"accumulate_grad_batches": 2}

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.scale * self.net(x), label) + self.all_gather(x).mean()


class SetsItsGradients(AccumulatesByHand):
    """To full tensors of its own (made sample by sample, say), and to new tensors of what is
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


class WritesAnswers(AccumulatesByHand):
    """Writes answers of a length that the rank's samples decide, beside a frozen reference, and
    learns from them twice.
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
