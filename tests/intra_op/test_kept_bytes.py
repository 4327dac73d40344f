"""What a plan says is saved for the backward, against the storages that autograd really keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alpa_strategy import ClusterSpec, PlanOptions, make_plan

WIDTH = 64
ROWS = 256
TOKENS = 96


def softmax(hidden: Tensor) -> Tensor:
    return F.softmax(hidden, dim=-1)


ACTIVATIONS = (
    torch.relu,
    F.gelu,
    F.silu,
    torch.tanh,
    torch.sigmoid,
    torch.exp,
    F.elu,
    F.leaky_relu,
    softmax,
)


class Layers(pl.LightningModule):
    def __init__(self, layers: int, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def linear(activation: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: Tensor) -> Tensor:
            return activation(self.linear(hidden))

    return Layer


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


def attention(mask: str) -> Callable[[], nn.Module]:
    """With a mask that every layer makes of nothing, or a bias that it learns."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.bias = nn.Parameter(torch.zeros(TOKENS, TOKENS)) if mask == "learned" else None

        def forward(self, hidden: Tensor) -> Tensor:
            query = (
                self.linear(hidden).unflatten(-1, (4, -1)).transpose(1, 2)
            )  # [rows, heads, tokens, width]
            seen = self.bias
            if mask == "flags":
                seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=hidden.device).tril()
            elif mask == "numbers":
                seen = torch.full((TOKENS, TOKENS), -torch.inf, device=hidden.device).triu(1)
            made = F.scaled_dot_product_attention(query, query, query, attn_mask=seen)
            return hidden + made.transpose(1, 2).flatten(2)

    return Layer


def really_kept(module: Layers, batch: Tensor) -> int:
    """Bytes of the storages that the graph of a step keeps, without the parameters'."""
    given = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda t: t
    ):
        module.training_step(batch, 0)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(num_bytes for key, num_bytes in storages.items() if key not in given)


CASES = {activation.__name__: (linear(activation), (ROWS, WIDTH)) for activation in ACTIVATIONS}
CASES |= {
    f"attention, {mask}": (attention(mask), (4, TOKENS, WIDTH))
    for mask in ("flags", "numbers", "learned")
}
CASES["convolution"] = conv, (16, 4, 16, 16)


@pytest.mark.parametrize("name", CASES)
def test_what_a_layer_keeps_is_what_autograd_keeps(name: str) -> None:
    """Of four layers more: what is there once, and the largest op's own, is the same."""
    make, shape = CASES[name]
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 1})
    cluster = replace(cluster, device=replace(cluster.device, name="cpu"))  # where it is looked at
    batch, options = (
        torch.randn(shape),
        PlanOptions(remat=False, accumulate_grad_batches=2),
    )  # with gradients always
    few, many = Layers(4, make), Layers(8, make)
    planned = [
        make_plan(each, batch, cluster, options).predicted.peak_bytes for each in (few, many)
    ]
    stored = 2 * sum(p.numel() * 4 for p in few.parameters())  # as many more, with gradients
    kept = really_kept(many, batch) - really_kept(few, batch)
    assert planned[1] - planned[0] - stored == pytest.approx(kept, rel=0.02)
