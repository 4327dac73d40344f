"""Hooks between a step's forward and its backward that change parameters: the backward is that of a
plain module.
"""

from __future__ import annotations

from itertools import product

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from covering import in_tiers
from models import MLP
from quiet import QUIET
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy


class Constrained(MLP):
    """As pykeen's constrainers: other data, which the backward does not see, or the same data with
    other values.
    """

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def constrain(self, *_: object) -> None:
        weight = self.net[2].weight
        if self.in_place:
            weight.data.mul_(0.97)
        else:
            weight.data = F.normalize(weight.data, dim=1)


class InHook(Constrained):
    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.constrain()


class InZeroGrad(Constrained):
    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.constrain()


def trained(kind: str, in_place: bool, options: dict | None, folder: str) -> list[torch.Tensor]:
    """The weights after four steps; options None: under DDP."""
    torch.manual_seed(0)
    module = {"before the backward": InHook, "before zero_grad": InZeroGrad}[kind](in_place)
    strategy = (
        "ddp" if options is None else AlpaStrategy(**options, cluster="pcie_8gpu", plan_dir=folder)
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=4, precision="64-true", **QUIET
    )
    data = TensorDataset(
        *(each.double() for each in MLP().example_batch(32, torch.Generator().manual_seed(1)))
    )
    trainer.fit(module, DataLoader(data, batch_size=4))
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("kind", "in_place"),
    in_tiers(product(("before the backward", "before zero_grad"), (False, True))),
)
def test_the_backward_is_that_of_what_the_forward_used(
    pool, tmp_path, kind: str, in_place: bool
) -> None:
    expected, _ = pool.run(2, trained, kind, in_place, None, str(tmp_path))
    for parallel in ("zero2", "zero3"):
        for capture in ("require", "never"):
            options = {"parallel": parallel, "capture": capture}
            for found in pool.run(2, trained, kind, in_place, options, str(tmp_path)):
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
