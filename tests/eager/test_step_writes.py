"""Weights to which a rank's own step writes: the ranks' copies differ as under DDP, with a warning.
Any other difference is an error.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from conformance.bench import differences
from covering import slow_but
from eager.program_base import CLASSES, WIDTH, Program
from optimizers.matrix_optimizers import Lamb
from quiet import QUIET
from torch import Tensor, nn
from worker_pool import WorkerError

from alpa_strategy import AlpaStrategy

RANKS = 2
STEPS = 5


class ActNorm(nn.Module):
    """Scale and shift take the statistics of the first batch that comes."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.shift = nn.Parameter(torch.zeros(8))
        self.through_data = through_data
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.is_set = True
            self.set_from(x.detach())
        return (x + self.shift) * self.scale

    def set_from(self, x: Tensor) -> None:
        if self.through_data:
            self.shift.data.copy_(-x.mean(0))
            self.scale.data[:] = 1 / (x.std(0) + 0.1)
            return
        with torch.no_grad():
            self.shift.copy_(-x.mean(0))
            self.scale.copy_(1 / (x.std(0) + 0.1))


class Flow(Program):
    """A classifier with ActNorm."""

    through_data = True

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, ActNorm(self.through_data))


class FlowWithoutGrad(Flow):
    through_data = False


class ByHand(Flow):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Renormalized(Program):
    """A table whose rows are shortened where a rank's batch uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Embedding(21, WIDTH, max_norm=1.0), nn.Linear(WIDTH, CLASSES)])

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        words = (x * 4).long().clamp(-10, 10) + 10  # [rows, WIDTH]
        return F.cross_entropy(self.net[1](self.net[0](words).mean(1)), label)


class Codebook(Program):
    """A frozen table that follows each rank's own batches, as in VQ-VAE, from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx > 1:
            self.codes.data = 0.9 * self.codes.data + 0.1 * batch[0].mean(0)
        return self.loss(batch[0] - self.codes, batch[1])


class Alike(Flow):
    """ActNorm that takes rank 0's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].set_from = self.set_alike  # type: ignore[method-assign]

    def set_alike(self, x: Tensor) -> None:
        shift = self.trainer.strategy.broadcast(x.mean(0))
        self.net[1].shift.data.copy_(-shift)


class StepsOfLamb(Flow):
    def configure_optimizers(self) -> Any:
        return Lamb(self.parameters())


class Fault(pl.Callback):
    """From the second step on rank 1 has another value in a weight."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            with torch.no_grad():
                module.get_parameter(self.name).view(-1)[0] += 1e-3


def train(name: str, root: str, options: dict[str, Any] | None, fault: str = "") -> Any:
    """This rank's weights after five steps, and warnings of copies that differ."""
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    try:
        module = globals()[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    strategy: Any = "ddp"
    if options is not None:
        strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False, plan_dir=root, **options)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=RANKS,
        max_steps=STEPS,
        precision="64-true",
        default_root_dir=root,
        callbacks=[Fault(fault)] if fault else [],
        **QUIET,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    assert "data" not in vars(Tensor)
    texts = [str(warning.message) for warning in caught]
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return weights, [text for text in texts if "copies" in text]


def train_both(name: str, root: str) -> Any:
    return train(name, root, None), train(name, root, {})


WRITTEN = {
    "Flow": ("net.1.scale", "net.1.shift"),
    "FlowWithoutGrad": ("net.1.scale", "net.1.shift"),
    "ByHand": ("net.1.scale", "net.1.shift"),
    "Renormalized": ("net.0.weight",),
    "Codebook": ("codes",),
}


@pytest.mark.parametrize("name", slow_but(WRITTEN, ["Flow", "Renormalized", "Codebook"]))
def test_ranks_go_on_with_weights_of_their_own(pool, tmp_path, name: str) -> None:
    per_rank = pool.run(RANKS, train_both, name, str(tmp_path))
    expected = [weights for (weights, _), _ in per_rank]
    weights = [weights for _, (weights, _) in per_rank]
    assert not differences(expected, weights)
    for written in WRITTEN[name]:
        assert not torch.equal(weights[0][written], weights[1][written])

    (said,), on_other_rank = (texts for _, (_, texts) in per_rank)
    assert not on_other_rank
    assert all(written in said for written in WRITTEN[name])
    assert "net.2" not in said
    if name == "Flow":
        assert "test_step_writes.py:" in said


def test_what_all_ranks_write_alike_is_no_difference(pool, tmp_path) -> None:
    per_rank = pool.run(RANKS, train_both, "Alike", str(tmp_path))
    assert not differences(
        [weights for (weights, _), _ in per_rank], [weights for _, (weights, _) in per_rank]
    )
    assert not any(texts for _, (_, texts) in per_rank)


# A tensor that no step writes to, and one that all ranks have written alike.
@pytest.mark.parametrize(("name", "fault"), [("Flow", "net.0.weight"), ("Alike", "net.1.shift")])
def test_any_other_difference_is_an_error(pool, tmp_path, name: str, fault: str) -> None:
    with pytest.raises(
        WorkerError, match=rf"copies of {fault} differ after step 4: on ranks \[1\]"
    ):
        pool.run(RANKS, train, name, str(tmp_path), {}, fault)


@pytest.mark.parametrize(
    ("name", "parallel", "reason"),
    [
        ("Flow", "zero3", "this plan stores one value of it"),
        pytest.param("Flow", "zero2", "this plan stores one value of it", marks=pytest.mark.slow),
        ("StepsOfLamb", "data", "one rank steps it for all"),
    ],
)
def test_one_value_cannot_be_each_ranks(
    pool, tmp_path, name: str, parallel: str, reason: str
) -> None:
    what = rf"writes different values to net.1.(.|\n)*{reason}(.|\n)*strategy.broadcast"
    with pytest.raises(WorkerError, match=what):
        pool.run(RANKS, train, name, str(tmp_path), {"parallel": parallel})
