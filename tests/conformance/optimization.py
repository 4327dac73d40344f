"""Behaviours around the optimizer: clipping, accumulation, schedulers, parameter groups, overridden
hooks.
"""

from __future__ import annotations

from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from conformance.bench import Bench, Net
from torch.optim import lr_scheduler


def clip_by_norm(bench: Bench) -> Any:
    return bench.fit(gradient_clip_val=0.1)


def clip_by_value(bench: Bench) -> Any:
    return bench.fit(gradient_clip_val=0.01, gradient_clip_algorithm="value")


def accumulate_grad_batches(bench: Bench) -> Any:
    return bench.fit(accumulate_grad_batches=3, rows=40, max_epochs=2)


class WithScheduler(Net):
    """AdamW and the scheduler that a subclass names, configured as a dict."""

    config: ClassVar[dict[str, Any]]

    def scheduler(self, optimizer: Any) -> Any:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler(optimizer), **self.config},
        }


def scheduler_by_step(bench: Bench) -> Any:
    class Steps(WithScheduler):
        config: ClassVar = {"interval": "step", "frequency": 2}

        def scheduler(self, optimizer: Any) -> Any:
            return lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)

    return _with_rates(bench, Steps)


def scheduler_by_epoch(bench: Bench) -> Any:
    class Epochs(WithScheduler):
        config: ClassVar = {"interval": "epoch"}

        def scheduler(self, optimizer: Any) -> Any:
            return lr_scheduler.StepLR(optimizer, 1, gamma=0.3)

    return _with_rates(bench, Epochs)


def scheduler_on_plateau(bench: Bench) -> Any:
    class Plateau(WithScheduler):
        config: ClassVar = {"monitor": "val_loss", "strict": True}

        def scheduler(self, optimizer: Any) -> Any:
            return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9, factor=0.5)

    return _with_rates(bench, Plateau)


def overridden_scheduler_step(bench: Bench) -> Any:
    class Own(WithScheduler):
        config: ClassVar = {"interval": "step"}

        def scheduler(self, optimizer: Any) -> Any:
            return lr_scheduler.CosineAnnealingLR(optimizer, 8)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(epoch=self.global_step // 2)

    return _with_rates(bench, Own)


def _with_rates(bench: Bench, kind: type[Net]) -> Any:
    class Rates(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
            self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    rates = Rates()
    return {**bench.fit(kind, validate=True, max_epochs=3, callbacks=[rates]), "rates": rates.seen}


def parameter_groups(bench: Bench) -> Any:
    class Groups(Net):
        def configure_optimizers(self) -> Any:
            decayed = [p for p in self.parameters() if p.ndim > 1]
            others = [p for p in self.parameters() if p.ndim <= 1]
            return torch.optim.AdamW(
                [
                    {"params": decayed, "weight_decay": 0.1},
                    {"params": others, "weight_decay": 0.0, "lr": 0.2},
                ],
                lr=0.05,
            )

    return bench.fit(Groups, gradient_clip_val=0.5)


def what_configure_optimizers_may_return(bench: Bench) -> Any:
    def scheduler(optimizer: Any) -> Any:
        return lr_scheduler.ExponentialLR(optimizer, 0.5)

    def kind(returned: Any) -> type[Net]:
        class Returns(Net):
            def configure_optimizers(self) -> Any:
                return returned(
                    torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)
                )

        return Returns

    forms = {
        "list": lambda o: [o],
        "two lists": lambda o: ([o], [scheduler(o)]),
        "dict": lambda o: {"optimizer": o},
        "dict with scheduler": lambda o: {"optimizer": o, "lr_scheduler": scheduler(o)},
        "list of dicts": lambda o: [
            {"optimizer": o, "lr_scheduler": {"scheduler": scheduler(o), "interval": "step"}}
        ],
        "tuple": lambda o: (o,),
    }
    return {
        name: bench.fit(kind(returned), limit_train_batches=2, max_epochs=2)
        for name, returned in forms.items()
    }


def element_wise_optimizers(bench: Bench) -> Any:
    class Lion(torch.optim.Optimizer):
        """A user's own optimizer."""

        def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
            super().__init__(params, {"lr": lr, "beta": beta})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                        p.sub_(group["lr"] * (mean * group["beta"] + p.grad).tanh())
                        mean.lerp_(p.grad, 1 - group["beta"])
            return loss

    def kind(make: Any) -> type[Net]:
        class Uses(Net):
            def configure_optimizers(self) -> Any:
                return make(self.parameters())

        return Uses

    made = {
        "lion": lambda p: Lion(p, lr=0.02),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
        "amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    }
    return {name: bench.fit(kind(make), limit_train_batches=3) for name, make in made.items()}


def overridden_gradient_clipping(bench: Bench) -> Any:
    class Clips(Net):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            if self.global_step >= 2:
                self.clip_gradients(
                    optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm"
                )
            else:
                torch.nn.utils.clip_grad_norm_(self.parameters(), 0.2)

    return bench.fit(Clips)


def norms_before_the_optimizers_step(bench: Bench) -> Any:
    """`grad_norm` of Lightning, and torch's own, see true gradients; so does
    `on_after_backward`.
    """
    from lightning.pytorch.utilities import grad_norm

    class Norms(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = grad_norm(self, norm_type=2)
            self.log_dict(norms)
            self.total = getattr(self, "total", [])
            self.total.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)))
            self.total.append(
                float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]))
            )

        def on_after_backward(self) -> None:
            self.whole = getattr(self, "whole", [])
            self.whole.append({n: p.grad is not None for n, p in self.named_parameters()})

    module, trainer = bench.module(Norms), bench.trainer()
    trainer.fit(module, bench.loader())
    return bench.outcome(trainer, module, total=module.total)


def overridden_optimizer_hooks(bench: Bench) -> Any:
    class Own(Net):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            if batch_idx % 2 == 0:
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 * (1 + self.global_step)
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def backward(self, loss: Any) -> None:
            (2 * loss).backward()

    return bench.fit(Own, gradient_clip_val=0.5)


def weights_projected_where_the_optimizer_steps(bench: Bench) -> Any:
    class Projected(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norms: list[float] = []

        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            if batch_idx % 2 == 0:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()
                for parameter in self.parameters():
                    self.norms.append(parameter.grad.norm().item())
                    parameter.grad.mul_(0.5)
                optimizer.step()
            weight = self.net[0].weight
            with torch.no_grad():
                weight.div_(weight.norm(dim=0, keepdim=True))

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()
            self.net[2].weight.data.div_(self.net[2].weight.data.norm())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module, trainer = bench.module(Projected), bench.trainer(max_epochs=2)
    trainer.fit(module, bench.loader())
    return bench.outcome(trainer, module, norms=module.norms)


def parameters_reached_by_other_ways(bench: Bench) -> Any:
    """By the groups, by a name of their own, by the optimizer's hooks; gradients after the step."""

    def on_the_sphere(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for each in group["params"]:
                    each.div_(each.norm().clamp(min=2.0))

    class Reaches(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gains = torch.nn.Parameter(torch.linspace(0.5, 2, 6))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch[0] * self.gains, batch[1]), batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            self.log("gains", self.gains.mean())
            self.log("late", torch.stack([p.grad.norm() for p in self.parameters()]).norm())

        def on_train_epoch_end(self) -> None:
            on_the_sphere(self.optimizers())

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(on_the_sphere)
            return optimizer

    return bench.fit(Reaches, max_epochs=2)


def frozen_parameters(bench: Bench) -> Any:
    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    return bench.fit(Frozen, gradient_clip_val=0.1)


def parameters_frozen_on_the_way(bench: Bench) -> Any:
    class Freezes(pl.Callback):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            pl_module.net[2].bias.requires_grad_(batch_idx != 1)
            pl_module.net[0].requires_grad_(batch_idx not in (2, 3))

    return bench.fit(callbacks=[Freezes()], max_epochs=2)


parameters_frozen_on_the_way.reference = (
    "plain"  # DDP must be told before which parameters will have no gradient
)


def unused_parameters(bench: Bench) -> Any:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = torch.nn.Linear(3, 3)

    trainer = bench.trainer(
        **({} if bench.is_alpa else {"strategy": "ddp_find_unused_parameters_true"})
    )
    module = bench.module(Unused)
    trainer.fit(module, bench.loader())
    return bench.outcome(trainer, module)


def gradients_by_hand(bench: Bench) -> Any:
    """Hooks on gradients, and gradients changed in on_after_backward."""

    class Changes(Net):
        def on_after_backward(self) -> None:
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5).nan_to_num_()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return F.mse_loss(self(x), y) + 1e-3 * sum(p.square().sum() for p in self.parameters())

    return bench.fit(Changes)


def gradients_by_hand_while_they_accumulate(bench: Bench) -> Any:
    """Parameters that are gathered once a step: gradients of whole copies, in place and as new
    tensors.
    """

    class ByHand(Net):
        def on_after_backward(self) -> None:
            for layer in (self.net[0], self.net[2]):
                layer.weight.grad *= 1.5
                layer.bias.grad = layer.bias.grad * 0.5

    return bench.fit(ByHand, plan={"parallel": "zero2"}, accumulate_grad_batches=2, max_epochs=2)


def gradients_clipped_at_every_batch(bench: Bench) -> Any:
    """Of an accumulated step: one device has the gradients of all rows then."""

    class Clips(Net):
        def on_after_backward(self) -> None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    return bench.fit(Clips, plan={"parallel": "data"}, accumulate_grad_batches=2)


gradients_clipped_at_every_batch.reference = "plain"


def shared_weights(bench: Bench) -> Any:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__(d_in=6, d_hidden=6)
            self.again = torch.nn.Linear(6, 6)
            self.again.weight = self.net[0].weight

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = F.mse_loss(self.net(torch.tanh(self.again(x))), y)
            self.log("train_loss", loss, sync_dist=True)
            return loss

    return bench.fit(Tied, gradient_clip_val=0.5)


def optimizer_that_calls_the_step_several_times(bench: Bench) -> Any:
    class Searches(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, history_size=3)

    plan = (
        {"num_stages": 1, "num_microbatches": 2}
        if bench.kind == "pipelined"
        else {"parallel": "data"}
    )
    module, trainer = bench.module(Searches), bench.trainer(plan=plan)
    trainer.fit(module, bench.loader())
    return bench.outcome(trainer, module)


optimizer_that_calls_the_step_several_times.reference = (
    "plain"  # DDP's ranks would search by their own losses
)


class OtherParameters(Net):
    """The second layer is used in some steps only, the whole net three times in some."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch

        def loss(x: Any, second: bool) -> Any:
            h = self.net[0](x)
            return F.mse_loss(self.net[2](torch.tanh(h)) if second else h[:, : y.shape[1]], y)

        total = loss(x, batch_idx % 2 == 0)
        if batch_idx % 3 == 0:
            total = total + loss(x + 1, True) + loss(2 * x, False)
        self.log("train_loss", total, sync_dist=True)
        return total


def parameters_of_some_steps(bench: Bench) -> Any:
    return bench.fit(OtherParameters, rows=48, max_epochs=2)


parameters_of_some_steps.reference = (
    "plain"  # DDP wants to be told that some parameters get no gradient
)
