"""Optimizers that look at more than single elements, as their users write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Options of plans for two devices under which optimizers are tried.
PLANS: dict[str, dict[str, Any]] = {
    "data": {"parallel": "data"},
    "zero1": {"parallel": "zero1"},
    "zero2": {"parallel": "zero2"},
    "zero3": {"parallel": "zero3"},
    "tensor": {"parallel": "tensor"},
    "stages": {"num_stages": 2, "num_microbatches": 2},
}


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the closure's loss, computed with gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class OwnOptimizer(torch.optim.Optimizer):
    """Calls `update(parameter, gradient, state, group)` for every parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 0.02, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    self.update(parameter, parameter.grad, state, group)
        return loss

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


def orthogonalized(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """Newton-Schulz of [..., m, n], in the dtype of `matrix`."""
    x = matrix / (torch.linalg.matrix_norm(matrix, keepdim=True) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class HybridMuon(OwnOptimizer):
    """Muon for groups with `use_muon`, Adam for the others: one class, as in Keller Jordan's
    code. A tensor of three dims is a batch of matrices.
    """

    def __init__(self, params: Any, lr: float = 0.02, use_muon: bool = False) -> None:
        super().__init__(params, lr, use_muon=use_muon)

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        parameter.mul_(1 - 0.1 * group["lr"])
        momentum = state.setdefault("momentum", torch.zeros_like(grad))
        if group["use_muon"]:
            momentum.lerp_(grad, 0.1)
            update = grad.lerp(momentum, 0.9)
            matrices = update if update.dim() == 3 else update.flatten(1)
            parameter.sub_(group["lr"] * orthogonalized(matrices).view_as(update))
            return
        square = state.setdefault("square", torch.zeros_like(grad))
        momentum.lerp_(grad, 0.1)
        square.lerp_(grad.square(), 0.05)
        parameter.addcdiv_(momentum, square.sqrt() + 1e-8, value=-group["lr"])


class Shampoo(OwnOptimizer):
    """A preconditioner for each dim, in a list."""

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if "preconditioners" not in state:
            state["step"] = 0
            sizes = grad.shape
            state["preconditioners"] = [1e-3 * torch.eye(n, dtype=grad.dtype) for n in sizes]
        state["step"] += 1
        update = grad
        for dim, preconditioner in enumerate(state["preconditioners"]):
            rows = grad.movedim(dim, 0).reshape(len(preconditioner), -1)
            preconditioner += rows @ rows.T
            values, vectors = torch.linalg.eigh(preconditioner)
            root = vectors @ torch.diag(values.clamp(min=1e-12) ** (-0.5 / grad.dim())) @ vectors.T
            update = torch.tensordot(root, update, dims=([1], [dim])).movedim(0, dim)
        parameter.sub_(group["lr"] * update)


class Lamb(OwnOptimizer):
    """Adam whose step has the norm of the parameter."""

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        first = state.setdefault("first", torch.zeros_like(grad)).lerp_(grad, 0.1)
        second = state.setdefault("second", torch.zeros_like(grad)).lerp_(grad.square(), 0.05)
        update = first / (second.sqrt() + 1e-6) + 0.01 * parameter
        trust = parameter.norm() / update.norm()
        trust = torch.where(trust.isfinite() & (trust > 0), trust, torch.ones_like(trust))
        parameter.sub_(group["lr"] * trust * update)


def muon_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices by Muon, the rest by Adam."""
    matrices, others = split_by_dims(module.parameters())
    return [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]


def split_by_dims(parameters: Iterable[nn.Parameter]) -> tuple[list[Any], list[Any]]:
    """Return (parameters with at least two dims, the others)."""
    everything = list(parameters)
    matrices = [parameter for parameter in everything if parameter.dim() > 1]
    return matrices, [parameter for parameter in everything if parameter.dim() <= 1]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "muon": lambda module: HybridMuon(muon_groups(module)),
    "shampoo": lambda module: Shampoo(module.parameters()),
    "lamb": lambda module: Lamb(module.parameters()),
    "adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=0.02),
}


def with_optimizer(model_class: type, optimizer: str | Callable[[nn.Module], Any]) -> type:
    """Return the class of modules that train with one of `OPTIMIZERS`, or with what a function
    makes for a module.
    """
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer

    class WithOptimizer(model_class):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return make(self)

    return WithOptimizer


def runs_of_one_device(pool: Any, train: Callable[..., dict[str, Any]]) -> Callable[[str], Any]:
    """Return a function from an optimizer's name to its run on one device, which trains once.

    Args:
        pool: of workers.
        train: called with the optimizer, no strategy, and the two ranks whose samples it has.
    """
    results: dict[str, Any] = {}

    def get(optimizer: str) -> Any:
        if optimizer not in results:
            (results[optimizer],) = pool.run(1, train, optimizer, None, 2, init_group=False)
        return results[optimizer]

    return get
