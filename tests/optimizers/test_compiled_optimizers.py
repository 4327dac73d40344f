"""Optimizers that compile their update: trying a copy leaves the compiled function usable."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from optimizers.matrix_optimizers import OwnOptimizer
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy
from alpa_strategy.planner.optimizer_info import inspect_optimizer


def _update(parameter: Tensor, grad: Tensor, rate: float) -> Tensor:
    return parameter - rate * grad


class CompiledSgd(OwnOptimizer):
    """SGD whose update is compiled at every step, as torchao's are; Dynamo has them in a cache."""

    def update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        update = torch.compile(_update, backend="eager", fullgraph=True, dynamic=False)
        parameter.copy_(update(parameter.detach(), grad, group["lr"]))


def test_a_trial_leaves_the_compiled_update() -> None:
    parameter = nn.Parameter(torch.ones(4, 6))
    optimizer = CompiledSgd([parameter], lr=0.5)
    assert inspect_optimizer(optimizer).element_wise

    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(parameter, torch.full((4, 6), 0.5))


class OneLayer(pl.LightningModule):
    """A layer that torchao's AdamW steps with state in 8 bits: it has enough elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 64)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        from torchao.optim import AdamW8bit

        return AdamW8bit(self.parameters(), lr=1e-2)


def _train(parallel: str | None, devices: int) -> Tensor:
    torch.manual_seed(3)
    module = OneLayer()
    loader = DataLoader(TensorDataset(torch.randn(16, 128)), batch_size=4)
    strategy: Any = "auto"
    if parallel is not None:
        strategy = AlpaStrategy(parallel=parallel, batch_scope="global", verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=3, **QUIET
    )
    trainer.fit(module, loader)
    return module.layer.weight.detach().clone()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["data", "zero3"])
def test_torchao(pool, parallel: str) -> None:
    pytest.importorskip("torchao", reason="an extra of its own: [float8]")
    (expected,) = pool.run(1, _train, None, 1, init_group=False)
    for weight in pool.run(2, _train, parallel, 2):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-5)
