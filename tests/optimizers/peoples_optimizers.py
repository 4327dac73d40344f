"""Optimizers as people write them in one file, after the papers: LARS, SOAP, GaLore, 8-bit Adam,
Muon with Adam in one class; and classes that hold other optimizers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from optimizers.matrix_optimizers import OwnOptimizer, orthogonalized, split_by_dims
from torch import Tensor, nn
from torch.optim import Optimizer


class Lars(OwnOptimizer):
    """SGD with momentum whose step is scaled by the norms of weight and gradient (You et al. 2017).
    Vectors are not scaled.
    """

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if parameter.dim() > 1:
            grad = grad + 1e-3 * parameter
            weight_norm, grad_norm = parameter.norm(), grad.norm()
            if weight_norm > 0 and grad_norm > 0:
                grad = grad * (0.1 * weight_norm / grad_norm)
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
        momentum.mul_(0.9).add_(grad)
        parameter.sub_(group["lr"] * momentum)


class Soap(OwnOptimizer):
    """Adam in the eigenbasis of Shampoo's preconditioners (Vyas et al. 2024). The first step only
    makes the bases, which are renewed every few steps; vectors are left to Adam.

    As in the authors' code, bases are computed in single precision.
    """

    def __init__(self, params: Any, lr: float = 0.01, precondition_frequency: int = 2) -> None:
        super().__init__(params, lr, precondition_frequency=precondition_frequency)

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        is_first = "step" not in state
        if is_first:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(grad)
            state["exp_avg_sq"] = torch.zeros_like(grad)
            state["GG"] = [torch.zeros(n, n, dtype=grad.dtype) for n in _matrix_dims(grad)]
            state["Q"] = None
        if not is_first:
            state["step"] += 1
            projected = _rotated(grad, state["Q"])
            state["exp_avg"].lerp_(grad, 0.1)
            state["exp_avg_sq"].lerp_(projected.square(), 0.05)
            step = _rotated(state["exp_avg"], state["Q"]) / (state["exp_avg_sq"].sqrt() + 1e-8)
            parameter.sub_(group["lr"] * _rotated(step, [basis.mT for basis in state["Q"]]))
        for dim, gram in enumerate(state["GG"]):
            rows = grad.movedim(dim, 0).flatten(1)
            gram.lerp_(rows @ rows.mT, 0.05)
        if state["Q"] is None or state["step"] % group["precondition_frequency"] == 0:
            state["Q"] = [torch.linalg.eigh(gram.float())[1].to(gram) for gram in state["GG"]]


def _matrix_dims(grad: Tensor) -> Sequence[int]:
    """Return the sizes of the dims that have preconditioners."""
    return grad.shape if grad.dim() > 1 else ()


def _rotated(tensor: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """Return the tensor with every dim in its basis."""
    for dim, basis in enumerate(bases):
        tensor = torch.tensordot(tensor, basis, dims=([dim], [0])).movedim(-1, dim)
    return tensor


class Projector:
    """The subspace of GaLore's state: an object in the optimizer's state."""

    def __init__(self, rank: int, update_every: int) -> None:
        self.rank = rank
        self.update_every = update_every
        self.basis: Tensor | None = None

    def project(self, grad: Tensor, step: int) -> Tensor:
        if step % self.update_every == 0:
            left, _, _ = torch.linalg.svd(grad.float(), full_matrices=False)
            self.basis = left[:, : self.rank].to(grad)
        return self.basis.mT @ grad

    def project_back(self, low: Tensor) -> Tensor:
        return self.basis @ low


class Galore(OwnOptimizer):
    """Adam on gradients in a subspace, for groups that have a rank (Zhao et al. 2024)."""

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        step = state.setdefault("step", 0)
        if "rank" in group:
            if "projector" not in state:
                state["projector"] = Projector(group["rank"], group["update_proj_gap"])
            grad = state["projector"].project(grad, step)
        first = state.setdefault("exp_avg", torch.zeros_like(grad)).lerp_(grad, 0.1)
        second = state.setdefault("exp_avg_sq", torch.zeros_like(grad)).lerp_(grad.square(), 0.05)
        state["step"] = step + 1
        update = first / (second.sqrt() + 1e-6)
        if "rank" in group:
            update = state["projector"].project_back(update)
        parameter.sub_(group["lr"] * update)


class Adam8bit(OwnOptimizer):
    """Adam whose moments are stored in 8 bits with a scale for each block of elements, of tensors
    that have enough elements (Dettmers et al. 2021).
    """

    def __init__(self, params: Any, lr: float = 0.01, block_size: int = 64) -> None:
        super().__init__(params, lr)
        self.block_size = block_size

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if parameter.numel() < 4 * self.block_size or parameter.numel() % self.block_size:
            first = state.setdefault("exp_avg", torch.zeros_like(grad)).lerp_(grad, 0.1)
            second = state.setdefault("exp_avg_sq", torch.zeros_like(grad))
            second.lerp_(grad.square(), 0.05)
        else:
            first = self._stored(state, "exp_avg", grad, 0.1)
            second = self._stored(state, "exp_avg_sq", grad.square(), 0.05)
        parameter.sub_(group["lr"] * first / (second.clamp(min=0).sqrt() + 1e-3))

    def _stored(self, state: dict[str, Any], name: str, value: Tensor, weight: float) -> Tensor:
        """Return the new moment, and store it in 8 bits."""
        blocks = value.reshape(-1, self.block_size)
        if name in state:
            moment = state[name].to(value) / 127 * state[f"{name}_scale"]
        else:
            moment = torch.zeros_like(blocks)
        moment.lerp_(blocks, weight)
        scale = moment.abs().amax(1, keepdim=True).clamp(min=1e-30)
        state[name] = (moment / scale * 127).round().to(torch.int8)
        state[f"{name}_scale"] = scale
        return moment.view_as(value)


class Blocks(Tensor):
    """A tensor in 8 bits with a scale for each block, as one object: torchao writes states so."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Blocks:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes = codes
        self.scale = scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> Blocks:
        return Blocks(parts["codes"], parts["scale"])

    def in_full(self) -> Tensor:
        """Return the moment, `[blocks, elements of a block]`."""
        codes = self.codes.reshape(len(self.scale), -1)
        return codes.to(self.scale) / 127 * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = (torch.ops.aten.clone, torch.ops.aten.detach, torch.ops.aten._to_copy)
        if func.overloadpacket not in copies:
            raise NotImplementedError(f"{func} of {cls.__name__}")
        return Blocks(args[0].codes.clone(), args[0].scale.clone())


torch.serialization.add_safe_globals([Blocks])


class AdamOfBlocks(Adam8bit):
    """8-bit Adam whose moments are tensors of a class that wraps codes and scales."""

    def _stored(self, state: dict[str, Any], name: str, value: Tensor, weight: float) -> Tensor:
        blocks = value.reshape(-1, self.block_size)
        moment = state[name].in_full() if name in state else torch.zeros_like(blocks)
        moment.lerp_(blocks, weight)
        scale = moment.abs().amax(1, keepdim=True).clamp(min=1e-30)
        codes = (moment / scale * 127).round().to(torch.int8)
        state[name] = Blocks(codes.view_as(value), scale)
        return moment.view_as(value)


class MuonWithAuxAdam(Optimizer):
    """As in Keller Jordan's code: groups with all of their settings and no others, no defaults."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:
            if group["use_muon"]:
                assert group.keys() == {"params", "lr", "momentum", "use_muon"}
            else:
                assert group.keys() == {"params", "lr", "betas", "use_muon"}
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                state = self.state[parameter]
                grad = parameter.grad
                if group["use_muon"]:
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(grad))
                    momentum.lerp_(grad, 1 - group["momentum"])
                    # Into the gradient, as there.
                    update = grad.lerp_(momentum, group["momentum"])
                    parameter.sub_(group["lr"] * orthogonalized(update))
                    continue
                first = state.setdefault("exp_avg", torch.zeros_like(grad))
                second = state.setdefault("exp_avg_sq", torch.zeros_like(grad))
                first.lerp_(grad, 1 - group["betas"][0])
                second.lerp_(grad.square(), 1 - group["betas"][1])
                parameter.sub_(group["lr"] * first / (second.sqrt() + 1e-6))
        return loss


class Chained(Optimizer):
    """Several optimizers as one, which share their groups with it. As many people write it, it does
    not call `Optimizer.__init__`.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.defaults: dict[str, Any] = {}
        self.state: dict[Any, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {f"optimizer_{i}": o.state_dict() for i, o in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for index, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state_dict[f"optimizer_{index}"])


class Combined(Optimizer):
    """Two optimizers with groups and state of one, which has called `Optimizer.__init__`."""

    def __init__(self, *, matrices: Optimizer, others: Optimizer) -> None:
        super().__init__([*matrices.param_groups, *others.param_groups], {})
        self.matrices = matrices
        self.others = others
        for held in (matrices, others):
            held.state = self.state
        self._share_groups()

    def _share_groups(self) -> None:
        first = len(self.matrices.param_groups)
        self.matrices.param_groups = self.param_groups[:first]
        self.others.param_groups = self.param_groups[first:]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.matrices.step(closure)
        self.others.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.matrices.state = self.others.state = self.state
        self._share_groups()


class Lookahead(Optimizer):
    """Goes back to slow weights every few steps (Zhang et al. 2019), around any optimizer."""

    def __init__(self, base_optimizer: Optimizer, alpha: float = 0.5, k: int = 2) -> None:
        self.base_optimizer = base_optimizer
        self.param_groups = base_optimizer.param_groups
        self.defaults = base_optimizer.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["lookahead_alpha"], group["lookahead_k"] = alpha, k
            group["lookahead_step"] = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            for parameter in group["params"]:
                slow = self.state[parameter].get("slow")
                if slow is None:
                    self.state[parameter]["slow"] = parameter.detach().clone()
                elif group["lookahead_step"] % group["lookahead_k"] == 0:
                    slow.lerp_(parameter.detach(), group["lookahead_alpha"])
                    parameter.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        slow = [
            [self.state[parameter].get("slow") for parameter in group["params"]]
            for group in self.param_groups
        ]
        return {"base": self.base_optimizer.state_dict(), "slow": slow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base_optimizer.load_state_dict(state_dict["base"])
        self.param_groups = self.base_optimizer.param_groups
        for group, slow in zip(self.param_groups, state_dict["slow"], strict=True):
            for parameter, value in zip(group["params"], slow, strict=True):
                self.state[parameter] = {} if value is None else {"slow": value}


def _galore(module: nn.Module) -> Optimizer:
    matrices, others = split_by_dims(module.parameters())
    low_rank = {"params": matrices, "rank": 4, "update_proj_gap": 2}
    return Galore([low_rank, {"params": others}], lr=0.01)


def _muon_with_aux_adam(module: nn.Module) -> Optimizer:
    matrices, others = split_by_dims(module.parameters())
    muon = {"params": matrices, "lr": 0.02, "momentum": 0.95, "use_muon": True}
    adam = {"params": others, "lr": 0.01, "betas": (0.9, 0.95), "use_muon": False}
    return MuonWithAuxAdam([muon, adam])


def _chained(module: nn.Module) -> Optimizer:
    matrices, others = split_by_dims(module.parameters())
    return Chained([torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)])


def _combined(module: nn.Module) -> Optimizer:
    matrices, others = split_by_dims(module.parameters())
    return Combined(matrices=Lars(matrices), others=torch.optim.AdamW(others, lr=0.01))


PEOPLES_OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "lars": lambda module: Lars(module.parameters()),
    "soap": lambda module: Soap(module.parameters()),
    "galore": _galore,
    "8-bit": lambda module: Adam8bit(module.parameters()),
    "8-bit in a class": lambda module: AdamOfBlocks(module.parameters()),
    "muon with aux adam": _muon_with_aux_adam,
    "chained": _chained,
    "combined": _combined,
    "lookahead": lambda module: Lookahead(torch.optim.AdamW(module.parameters(), lr=0.01)),
    "lookahead of a chain": lambda module: Lookahead(_chained(module)),
}
