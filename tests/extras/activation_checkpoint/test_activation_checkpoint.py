"""Forwards that are recomputed in the backward: gradients are bitwise the same, and side effects of
the second run are undone.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alpa_strategy.errors import OptionError, RuntimeMismatchError
from alpa_strategy.extras.activation_checkpoint import (
    ActivationBudget,
    ModuleCheckpoint,
    modules_to_checkpoint,
    saved_for_backward_bytes,
)

WIDTH = 8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(F.gelu(self.fc(x)))


class Drops(Residual):
    """Torch's, NumPy's and Python's random numbers, and those of a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + np.random.rand()
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return F.dropout(super().forward(x), 0.3) * scale * (1 + noise)


class Normed(Residual):
    """Statistics of a norm, of a power iteration, counts in buffers and in Python; all are used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.fc = nn.utils.parametrizations.spectral_norm(self.fc)
        self.register_buffer("calls", torch.ones(2, 2))
        self.count = 0
        self.seen = []
        self.kinds = {"all": []}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.seen.append(self.count)
        self.kinds["all"].append(self.count)
        self.mean = x.mean(0)
        return (
            super().forward(self.norm(x))
            * self.calls.sum()
            * len(self.seen)
            * len(self.kinds["all"])
            + self.mean
        )


class Talkative(Residual):
    """Keyword arguments, one tensor twice, results that are no tensors, a list that it appends
    to.
    """

    def forward(
        self, x: Tensor, *, scale: Tensor, twin: Tensor, kept: list[Any], debug: str = "no"
    ) -> Any:
        kept.append(x.detach())
        sign = 1 if twin is x else -1
        return {"out": super().forward(x) * scale * sign * len(kept), "debug": debug}


class Twice(Residual):
    """Once to be trained, once to be looked at, in another mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if isinstance(block, Talkative):
                kept: list[Any] = [0]
                made = block(x, scale=1 + x.mean(), twin=x, kept=kept, debug="yes")
                assert len(kept) == 2
                assert made["debug"] == "yes"
                x = made["out"]
            elif isinstance(block, Twice):
                x = block(block(x))
                block.eval()
                x = x + block(x)
                block.train()
            else:
                x = block(x)
        return x


@contextmanager
def kept_tensors() -> Iterator[list[Tensor]]:
    """What autograd keeps in the block."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        yield kept


def outcome(
    kind: type[nn.Module], again: bool, before: Callable[[nn.Module], None] | None = None
) -> dict[str, Any]:
    """Gradients, buffers, Python's attributes and the next random numbers after two steps; bytes
    that autograd kept.
    """
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    net = Net(kind).double()
    given = torch.randn(5, WIDTH, dtype=torch.float64)

    with ModuleCheckpoint(net).installed(modules_to_checkpoint(net, True) if again else {}):
        for _ in range(2):
            with kept_tensors() as kept:
                loss = net(given).square().mean()
            if before is not None:
                before(net)
            loss.backward()
    own = {id(p) for p in net.parameters()}
    plain = {
        f"{n}.{k}": v
        for n, m in net.named_modules()
        for k, v in vars(m).items()
        if k in ("count", "seen", "kinds")
    }
    return {
        "grads": {name: p.grad for name, p in net.named_parameters()},
        "buffers": dict(net.named_buffers()),
        "plain": plain,
        "drawn": (torch.rand(1), np.random.rand(), random.random()),
        "bytes": sum(
            {t.data_ptr(): t.untyped_storage().nbytes() for t in kept if id(t) not in own}.values()
        ),
    }


@pytest.mark.parametrize("kind", [Residual, Drops, Normed, Talkative, Twice])
def test_gradients_and_side_effects_are_bitwise_the_same(
    kind: type[nn.Module],
) -> None:
    kept, again = outcome(kind, False), outcome(kind, True)
    for part in ("grads", "buffers"):
        assert kept[part].keys() == again[part].keys()
        assert all(torch.equal(value, again[part][name]) for name, value in kept[part].items()), (
            part
        )
    assert kept["plain"] == again["plain"]
    assert kept["drawn"] == again["drawn"]
    assert again["bytes"] < 0.7 * kept["bytes"]


def test_what_was_changed_before_the_backward_is_an_error() -> None:
    def step(net: nn.Module) -> None:
        with torch.no_grad():
            net.blocks[1].fc.weight.add_(1)

    with pytest.raises(RuntimeMismatchError, match=r"blocks\.1 computes with is changed"):
        outcome(Residual, True, step)


class InPlace(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


def test_what_changes_its_arguments_is_never_chosen() -> None:
    with pytest.raises(RuntimeMismatchError, match=r"blocks\.0 computes with is changed"):
        outcome(InPlace, True)
    net = Net(InPlace)
    modules = modules_to_checkpoint(net, None)
    room = ActivationBudget(net, modules, 0.0)
    with ModuleCheckpoint(net, room).installed(modules):
        for _ in range(3):
            loss = net(torch.ones(2, WIDTH)).sum()
            assert room.ends_in(loss) is None
            loss.backward()


def test_a_module_that_is_called_often_is_counted_often() -> None:
    net = Net(Residual)
    net.blocks = nn.ModuleList([net.blocks[0]])
    modules, own = modules_to_checkpoint(net, None), list(net.parameters())

    def step() -> Tensor:
        x = net.embed(torch.ones(64, WIDTH))
        for _ in range(6):
            x = net.blocks[0](x)
        return x.square().mean()

    every = saved_for_backward_bytes(step(), (), own)
    for share, is_short in ((0.9, True), (2.5, False)):
        room, found = ActivationBudget(net, modules, share * every), []
        with ModuleCheckpoint(net, room).installed(modules):
            for _ in range(3):
                loss = step()
                found.append(saved_for_backward_bytes(loss, (), own))
                room.ends_in(loss)
                loss.backward()
        assert found[0] == every
        for kept in found[1:]:
            if is_short:
                assert kept < every / 2
            else:
                assert kept == every


def test_copies_and_evaluation_run_as_they_do() -> None:
    net = Net(Residual)
    with ModuleCheckpoint(net).installed(modules_to_checkpoint(net, True)):
        twin = copy.deepcopy(net)
        with kept_tensors() as kept:
            twin(torch.ones(2, WIDTH))
        assert any(t.shape == (2, 4 * WIDTH) for t in kept)
        with torch.no_grad():
            assert torch.equal(net(torch.ones(2, WIDTH)), twin(torch.ones(2, WIDTH)))
    assert all("forward" not in vars(module) for module in net.modules())


def test_half_precision_is_kept() -> None:
    grads = []
    for remat in (False, True):
        torch.manual_seed(0)
        net = Net(Residual)
        with ModuleCheckpoint(net).installed(modules_to_checkpoint(net, True) if remat else {}):
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(torch.ones(2, WIDTH)).sum()
            loss.backward()
        grads.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("which", ["net", "blocks"])
def test_compiled_modules_too(which: str) -> None:
    results = []
    for remat in (False, True):
        torch.manual_seed(0)
        net = Net(Residual)
        if which == "blocks":
            net.blocks = nn.ModuleList(
                torch.compile(block, backend="aot_eager") for block in net.blocks
            )
        with ModuleCheckpoint(net).installed(modules_to_checkpoint(net, True) if remat else {}):
            if which == "net":
                net.compile(backend="aot_eager")
            with kept_tensors() as kept:
                loss = net(torch.ones(2, WIDTH)).sum()
        loss.backward()
        results.append(
            ([p.grad for p in net.parameters()], sum(t.shape == (2, 4 * WIDTH) for t in kept))
        )
    (grads, num_wide), (grads_again, num_again) = results
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))
    assert num_wide > num_again == 0


class Whole(nn.Module):
    """As users nest them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.layer1 = nn.Sequential(Residual(), Residual())
        self.stages = nn.ModuleDict({"a": nn.ModuleList([Residual(), nn.Linear(WIDTH, WIDTH)])})
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)


@pytest.mark.parametrize(
    ("remat", "names"),
    [
        (True, ["layer1.0", "layer1.1", "stages.a.0"]),
        (("stages.*",), ["stages.a.0", "stages.a.1"]),
        (("layer1", "layer1.1.fc", "head"), ["layer1", "head"]),
        (("*.fc",), ["layer1.0.fc", "layer1.1.fc", "stages.a.0.fc"]),
    ],
)
def test_which_modules(remat: Any, names: list[str]) -> None:
    assert list(modules_to_checkpoint(Whole(), remat)) == names


@pytest.mark.parametrize(("module", "remat"), [(Residual(), True), (Whole(), ("gelu_*",))])
def test_a_wish_that_nothing_meets_is_an_error(module: nn.Module, remat: Any) -> None:
    with pytest.raises(OptionError, match="remat="):
        modules_to_checkpoint(module, remat)
