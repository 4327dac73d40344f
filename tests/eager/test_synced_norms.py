"""BatchNorm over all ranks, requested by the Trainer or by modules: eager and captured steps are
those of one device.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from alpa_strategy import AlpaStrategy

RANKS = 2
ROWS = 6
STEPS = 5


class Images(pl.LightningModule):
    """Convolutions and norms of all kinds; some keep no statistics."""

    momentum: float | None = 0.2

    def __init__(self, converted: bool) -> None:
        super().__init__()
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 5, 3, bias=False),
            nn.BatchNorm2d(5, momentum=self.momentum),
            nn.Flatten(),
            nn.Linear(5 * 16, 6, bias=False),
            nn.BatchNorm1d(6, affine=False),
            nn.Linear(6, 6, bias=False),
            nn.BatchNorm1d(6, track_running_stats=False),
        )
        self.net = nn.SyncBatchNorm.convert_sync_batchnorm(net) if converted else net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Reads(Images):
    """A step that cannot be captured, with a norm that averages over all steps."""

    momentum = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > -1.0 else 2 * loss


def train(
    name: str, root: str, ranks: int, options: dict[str, Any], converted: bool, asked: bool
) -> Any:
    """Return the final state, the losses, and whether steps were eager."""
    torch.manual_seed(3)
    model = globals()[name](converted).double()
    rows = TensorDataset(
        torch.randn(RANKS * ROWS * STEPS, 3, 8, 8).double(),
        torch.randn(RANKS * ROWS * STEPS, 6).double(),
    )
    losses: list[float] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            losses.append(float(trainer.callback_metrics["loss"]))

    strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False, **options)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        sync_batchnorm=asked,
        max_epochs=2,
        default_root_dir=root,
        callbacks=[Watch()],
        **QUIET,
    )
    # A sampler of our own: the Trainer would shuffle on several ranks, and not on one.
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    sampler = DistributedSampler(rows, ranks, rank, shuffle=False)
    loader = DataLoader(rows, ROWS * RANKS // ranks, sampler=sampler)
    trainer.fit(model, loader, loader)
    return (
        {n: v.clone() for n, v in model.state_dict().items()},
        losses,
        strategy.plan.is_eager,
    )


def alone(name: str, root: str) -> Any:
    """One device on all ranks' samples, each step's in another order, for which no mean asks."""
    return train(name, root, 1, {}, False, False)[:2]


CASES = {
    "asked of the Trainer": ("Reads", {}, False, True),
    "converted": ("Reads", {}, True, False),
    "zero3": ("Images", {"capture": "never", "parallel": "zero3"}, False, True),
    "captured, converted": ("Images", {"capture": "require"}, True, True),
}


@pytest.mark.parametrize("case", CASES)
def test_statistics_are_those_of_all_ranks_rows(pool, tmp_path, case: str) -> None:
    name, options, converted, asked = CASES[case]
    (state, losses), *_ = pool.run(1, alone, name, str(tmp_path / "one"))
    per_rank = pool.run(RANKS, train, name, str(tmp_path / "two"), RANKS, options, converted, asked)
    for each, logged, is_written in per_rank:
        torch.testing.assert_close(each, state, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(logged, losses, rtol=1e-9, atol=1e-9)
        assert is_written == (options != {"capture": "require"})


def test_a_norm_of_a_rank_alone_stays_so(pool, tmp_path) -> None:
    """The plain BatchNorms of an eager step stay local without a request."""
    (state, _), *_ = pool.run(1, alone, "Reads", str(tmp_path / "one"))
    found, _ = pool.run(RANKS, train, "Reads", str(tmp_path / "two"), RANKS, {}, False, False)
    assert not torch.allclose(found[0]["net.1.running_var"], state["net.1.running_var"], rtol=1e-9)
