"""More optimizers after their papers: those that look at elements, at rows and blocks, at all
parameters, and those with two kinds of weights or two backwards a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from optimizers.matrix_optimizers import OwnOptimizer, loss_of, orthogonalized, split_by_dims
from torch import Tensor, nn
from torch.optim import Optimizer

# Of the models that these step.
NUM_HEADS = 4


class Lion(OwnOptimizer):
    """The sign of an interpolated momentum (Chen et al. 2023)."""

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        momentum = state.setdefault("exp_avg", torch.zeros_like(grad))
        parameter.mul_(1 - 0.1 * group["lr"])
        parameter.sub_(group["lr"] * momentum.lerp(grad, 0.1).sign())
        momentum.lerp_(grad, 0.01)


class Sophia(OwnOptimizer):
    """A clipped step by an estimate of the Hessian's diagonal, renewed every few steps from the
    gradient (Liu et al. 2023, Gauss-Newton-Bartlett).
    """

    def __init__(self, params: Any, lr: float = 0.02, rho: float = 0.04, every: int = 3) -> None:
        super().__init__(params, lr, rho=rho, every=every)

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        step = state.setdefault("step", 0)
        first = state.setdefault("exp_avg", torch.zeros_like(grad)).lerp_(grad, 0.04)
        hessian = state.setdefault("hessian", torch.zeros_like(grad))
        if step % group["every"] == 0:
            hessian.lerp_(8 * grad.square(), 0.01)
        state["step"] = step + 1
        ratio = first.abs() / (group["rho"] * 8 * hessian + 1e-15)
        parameter.sub_(group["lr"] * first.sign() * ratio.clamp(max=1))


class Adan(OwnOptimizer):
    """Nesterov momentum from differences of gradients (Xie et al. 2022)."""

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        previous = state.setdefault("previous", grad.clone())
        difference = grad - previous
        first = state.setdefault("exp_avg", torch.zeros_like(grad)).lerp_(grad, 0.02)
        change = state.setdefault("exp_avg_diff", torch.zeros_like(grad)).lerp_(difference, 0.08)
        second = state.setdefault("exp_avg_sq", torch.zeros_like(grad))
        second.lerp_((grad + 0.92 * difference).square(), 0.01)
        previous.copy_(grad)
        parameter.sub_(group["lr"] * (first + 0.92 * change) / (second.sqrt() + 1e-3))
        parameter.div_(1 + 0.02 * group["lr"])


class AdEMAMix(OwnOptimizer):
    """Adam with a second, slow average of gradients (Pagliardini et al. 2024)."""

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        step = state["step"] = state.get("step", 0) + 1
        fast = state.setdefault("exp_avg_fast", torch.zeros_like(grad)).lerp_(grad, 0.1)
        slow = state.setdefault("exp_avg_slow", torch.zeros_like(grad))
        slow.lerp_(grad, max(0.0001, 0.1 / step))
        second = state.setdefault("exp_avg_sq", torch.zeros_like(grad)).lerp_(grad.square(), 0.01)
        alpha = min(step / 10, 1.0) * 5
        scale = (second / (1 - 0.99**step)).sqrt() + 1e-3
        parameter.sub_(group["lr"] * (fast / (1 - 0.9**step) + alpha * slow) / scale)


class Came(OwnOptimizer):
    """Adafactor with a factored confidence in its update (Luo et al. 2023)."""

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        square = grad.square() + 1e-12
        if grad.dim() < 2:
            second = state.setdefault("second", torch.zeros_like(grad)).lerp_(square, 0.01)
            update = grad * second.rsqrt()
        else:
            update = grad * _factored(state, "square", square)
        update = update / (update.square().mean().sqrt() / 1.0).clamp(min=1.0)
        first = state.setdefault("exp_avg", torch.zeros_like(grad)).lerp_(update, 0.1)
        if grad.dim() >= 2:
            instability = (update - first).square() + 1e-6
            first = first * _factored(state, "instability", instability)
        parameter.sub_(0.1 * group["lr"] * first)


def _factored(state: dict[str, Any], name: str, value: Tensor) -> Tensor:
    """Return the reciprocal root of an average of `value`, stored as its rows' and columns'."""
    rows = state.setdefault(f"{name}_row", torch.zeros_like(value.mean(-1)))
    columns = state.setdefault(f"{name}_col", torch.zeros_like(value.mean(-2)))
    rows.lerp_(value.mean(-1), 0.01)
    columns.lerp_(value.mean(-2), 0.01)
    share = (rows / rows.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
    return share * columns.rsqrt().unsqueeze(-2)


class Sm3(OwnOptimizer):
    """Adagrad whose accumulators cover slices of each dim (Anil et al. 2019)."""

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        dims = range(grad.dim())
        if "covers" not in state:
            state["covers"] = []
            for dim in dims:
                shape = [1] * grad.dim()
                shape[dim] = grad.shape[dim]
                state["covers"].append(grad.new_zeros(shape))
        covers = state["covers"]
        bound = covers[0].expand_as(grad)
        for cover in covers[1:]:
            bound = torch.minimum(bound, cover)
        bound = bound + grad.square()
        for dim, cover in enumerate(covers):
            others = [d for d in dims if d != dim]
            cover.copy_(bound.amax(others, keepdim=True) if others else bound)
        parameter.sub_(group["lr"] * grad / (bound.sqrt() + 1e-3))


class NovoGrad(OwnOptimizer):
    """A second moment for each tensor: that of its gradient's norm (Ginsburg et al. 2019)."""

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        norm = grad.norm().square()
        second = state["second"] = (
            norm if "second" not in state else state["second"].lerp(norm, 0.1)
        )
        momentum = state.setdefault("exp_avg", torch.zeros_like(grad))
        momentum.mul_(0.9).add_(grad / (second.sqrt() + 1e-8) + 0.01 * parameter)
        parameter.sub_(group["lr"] * momentum)


class Centralized(OwnOptimizer):
    """SGD on gradients without the mean of each row (Yong et al. 2020)."""

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if grad.dim() > 1:
            grad = grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True)
        parameter.sub_(group["lr"] * grad)


class AdamMini(OwnOptimizer):
    """Adam with one second moment for each head of queries and keys, each row of other matrices,
    and each remaining tensor (Zhang et al. 2024). As in the authors' code it is made of named
    parameters, a group for each, and knows groups by their names.
    """

    def __init__(self, named_parameters: Any, lr: float = 0.02, num_heads: int = 2) -> None:
        self.num_heads = num_heads
        groups = [{"name": name, "params": [p]} for name, p in named_parameters]
        super().__init__(groups, lr)

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        blocks = grad.reshape(self._num_blocks(group["name"], grad), -1)
        square = blocks.square().mean(1, keepdim=True)
        first = state.setdefault("m", torch.zeros_like(grad)).lerp_(grad, 0.1)
        second = state.setdefault("v", torch.zeros_like(square)).lerp_(square, 0.05)
        move = first.reshape_as(blocks) / (second.sqrt() + 1e-6)
        parameter.sub_(group["lr"] * move.view_as(parameter))

    def _num_blocks(self, name: str, grad: Tensor) -> int:
        if name.endswith("qkv.weight"):
            return 3 * self.num_heads
        return len(grad) if grad.dim() > 1 else 1


class MuonPerHead(OwnOptimizer):
    """Muon of each head of a projection, which has as many rows as heads divide."""

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(grad)).lerp_(grad, 0.1)
        matrices = momentum.view(group["num_heads"], -1, momentum.shape[-1])
        scale = 0.2 * math.sqrt(max(matrices.shape[-2:]))
        update = scale * orthogonalized(matrices).view_as(momentum)
        parameter.mul_(1 - 0.1 * group["lr"]).sub_(group["lr"] * update)


class LayerDog(OwnOptimizer):
    """Distance from the start over norms of gradients, of each tensor (Ivgi et al. 2023)."""

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        start = state.setdefault("start", parameter.detach().clone())
        distance = state.setdefault("distance", 1e-3 * (1 + parameter.norm()))
        distance.copy_(torch.maximum(distance, (parameter - start).norm()))
        total = state.setdefault("total", torch.zeros_like(distance)).add_(grad.square().sum())
        parameter.sub_(distance / (total + 1e-8).sqrt() * grad)


class OwnList(Optimizer):
    """Steps the parameters that it was made with, not those of its groups."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        self.parameters = list(params)
        super().__init__(self.parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.sub_(self.defaults["lr"] * parameter.grad / (1 + parameter.grad.norm()))
        return loss


class Dog(Optimizer):
    """The same of all parameters together, which the state of the first one has."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        stepped = [p for p in parameters if p.grad is not None]
        for parameter in stepped:
            self.state[parameter].setdefault("start", parameter.detach().clone())
        moves = [p - self.state[p]["start"] for p in stepped]
        sums = self.state[stepped[0]]
        distance = float(torch.nn.utils.get_total_norm(moves))
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in stepped]))
        sums["distance"] = max(sums.get("distance", 1e-3), distance)
        sums["total"] = sums.get("total", 0.0) + norm**2
        for parameter in stepped:
            parameter.sub_(sums["distance"] / math.sqrt(sums["total"] + 1e-8) * parameter.grad)
        return loss


class ClipsAll(OwnOptimizer):
    """SGD that clips by the norm of all gradients, as many write it into an optimizer's step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        super().step()
        return loss

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        parameter.sub_(group["lr"] * grad)


class Prodigy(Optimizer):
    """Adam that estimates its rate from all parameters (Mishchenko and Defazio 2023)."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-3) -> None:
        sums = {"d": d0, "d0": d0, "d_numerator": 0.0, "k": 0}
        super().__init__(params, {"lr": lr, **sums})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        first_group = self.param_groups[0]
        d = first_group["d"]
        numerator = 0.95 * first_group["d_numerator"]
        denominator = 0.0
        stepped = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    stepped.append((group, parameter))
        for group, parameter in stepped:
            grad, state = parameter.grad, self.state[parameter]
            if not state:
                state["start"] = parameter.detach().clone()
                state |= {key: torch.zeros_like(grad) for key in ("m", "v", "s")}
            rate = d * group["lr"]
            numerator += d / group["d0"] * rate * float((grad * (state["start"] - parameter)).sum())
            state["m"].mul_(0.9).add_(grad, alpha=0.1 * d)
            state["v"].mul_(0.95).add_(grad.square(), alpha=0.05 * d * d)
            state["s"].mul_(0.95).add_(grad, alpha=d / group["d0"] * rate)
            denominator += float(state["s"].abs().sum())
        if denominator > 0:
            d = max(d, numerator / denominator)
        for group, parameter in stepped:
            state = self.state[parameter]
            parameter.addcdiv_(
                state["m"], state["v"].sqrt() + d * 1e-8, value=-group["d"] * group["lr"]
            )
        for group in self.param_groups:
            group |= {"d": d, "d_numerator": numerator, "k": group["k"] + 1}
        return loss


class ScheduleFree(OwnOptimizer):
    """AdamW whose weights are averages, with others in training (Defazio et al. 2024)."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr, is_training=True, weight_sum=0.0)

    @torch.no_grad()
    def _move(self, is_training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["is_training"] is is_training:
                continue
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight)
            group["is_training"] = is_training

    def train(self) -> None:
        self._move(True, 1 - 0.9)

    def eval(self) -> None:
        self._move(False, 1 - 1 / 0.9)

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        assert group["is_training"]
        step = state["step"] = state.get("step", 0) + 1
        z = state.setdefault("z", parameter.detach().clone())
        second = state.setdefault("exp_avg_sq", torch.zeros_like(grad)).lerp_(grad.square(), 0.01)
        scaled = grad / ((second / (1 - 0.99**step)).sqrt() + 1e-3)
        parameter.lerp_(z, 1 / step)
        parameter.add_(scaled, alpha=group["lr"] * (0.9 * (1 - 1 / step) - 1))
        z.sub_(group["lr"] * scaled)


class Sam(Optimizer):
    """A step up the gradient, a second backward there, and the step of another optimizer from
    where it was (Foret et al. 2020).
    """

    def __init__(self, params: Any, base: Callable[..., Optimizer], rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = base(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None, "SAM needs a closure"
        closure = torch.enable_grad()(closure)
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        stepped = [p for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in stepped])
        moves = [self.param_groups[0]["rho"] / (norm + 1e-12) * p.grad for p in stepped]
        starts = [p.detach().clone() for p in stepped]
        for parameter, move in zip(stepped, moves, strict=True):
            parameter.add_(move)
        self.zero_grad()
        closure()
        for parameter, start in zip(stepped, starts, strict=True):
            parameter.copy_(start)
        self.base.step()
        return loss


def _muon_per_head(module: nn.Module) -> Optimizer:
    projections, others = [], []
    for name, parameter in module.named_parameters():
        of_heads = name.endswith("qkv.weight")
        (projections if of_heads else others).append(parameter)
    matrices, vectors = split_by_dims(others)
    groups = [
        {"params": projections, "num_heads": 3 * NUM_HEADS},
        {"params": matrices, "num_heads": 1},
        {"params": vectors, "num_heads": 1},
    ]
    return MuonPerHead(groups, lr=0.02)


def _transformers_adafactor(module: nn.Module) -> Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(module.parameters(), scale_parameter=True, warmup_init=True)


# Each may have any plan.
PAPER_OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "lion": lambda module: Lion(module.parameters(), lr=0.003),
    "sophia": lambda module: Sophia(module.parameters()),
    "adan": lambda module: Adan(module.parameters()),
    "ademamix": lambda module: AdEMAMix(module.parameters()),
    "came": lambda module: Came(module.parameters()),
    "sm3": lambda module: Sm3(module.parameters()),
    "novograd": lambda module: NovoGrad(module.parameters()),
    "centralized": lambda module: Centralized(module.parameters()),
    "dog of layers": lambda module: LayerDog(module.parameters()),
    "own list": lambda module: OwnList(module.parameters()),
    "transformers adafactor": _transformers_adafactor,
    "adam-mini": lambda module: AdamMini(module.named_parameters(), num_heads=NUM_HEADS),
    "muon per head": _muon_per_head,
}

# Each looks at several parameters, or needs more of a step than gradients.
JOINT_OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "prodigy": lambda module: Prodigy(module.parameters()),
    "dog": lambda module: Dog(module.parameters()),
    "clips all": lambda module: ClipsAll(module.parameters()),
    "schedule-free": lambda module: ScheduleFree(module.parameters()),
    "sam": lambda module: Sam(module.parameters(), torch.optim.AdamW),
    "lbfgs": lambda module: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3),
}


def _of_torch(name: str, **settings: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda module: getattr(torch.optim, name)(module.parameters(), **settings)


TORCH_OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Adadelta": _of_torch("Adadelta", lr=1.0, eps=1e-3),
    "Adagrad": _of_torch("Adagrad", lr=0.02, eps=1e-3, initial_accumulator_value=0.1),
    "Adam": _of_torch("Adam", lr=0.01, amsgrad=True, eps=1e-4),
    "Adamax": _of_torch("Adamax", lr=0.01, eps=1e-4),
    "AdamW fused": _of_torch("AdamW", lr=0.01, eps=1e-4, fused=True),
    "ASGD": _of_torch("ASGD", lr=0.05, t0=2, weight_decay=0.01),
    "NAdam": _of_torch("NAdam", lr=0.01, eps=1e-4),
    "RAdam": _of_torch("RAdam", lr=0.01, eps=1e-4, decoupled_weight_decay=True),
    "RMSprop": _of_torch("RMSprop", lr=0.01, eps=1e-3, centered=True, momentum=0.9),
    "Rprop": _of_torch("Rprop", lr=0.001),
    "SGD": _of_torch("SGD", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
}
