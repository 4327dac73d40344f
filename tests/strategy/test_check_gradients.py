"""`check_gradients` tells a fault of one rank or of a sum from values that one device would have as
well.
"""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from covering import in_tiers
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from worker_pool import WorkerError

from alpa_strategy import AlpaStrategy
from alpa_strategy.comm import mesh
from alpa_strategy.errors import OptionError
from alpa_strategy.lightning.digests import report

ROWS, STEPS = 4, 4
WRITTEN = {"capture": "never", "parallel": "data"}
WRITTEN_PARTS = {"capture": "never", "parallel": "zero3"}
PIPELINE = {"num_stages": 2, "num_microbatches": 2}


class Net(pl.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.last(self.first(batch[0]).tanh()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


class ByHand(Net):
    """Runs its own backward."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Device(pl.Callback):
    """From the third step on rank 1 computes a gradient of `first.weight` that is not finite."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank == 1:
            module.first.weight.register_hook(lambda grad: grad * float("inf"))


class Link(pl.Callback):
    """From the third step on the sums of gradients that rank 1 receives have another value in their
    midst.
    """

    value = float("nan")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank == 1:
            start = self.start = mesh.AxisComm.start_all_reduce

            def faulty(axis: Any, tensor: Tensor) -> Any:
                pending = start(axis, tensor)
                wait = pending.wait

                def waited() -> Tensor:
                    result = wait()
                    if result.numel() > 6:
                        result.view(-1)[3] = self.value
                    return result

                pending.wait = waited
                return pending

            mesh.AxisComm.start_all_reduce = faulty  # type: ignore[method-assign]

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if hasattr(self, "start"):
            mesh.AxisComm.start_all_reduce = self.start  # type: ignore[method-assign]


class Wrong(Link):
    value = 0.5


def train(root: str, fault: str, net: str, options: dict[str, Any]) -> list[str]:
    """What rank 0 is warned of gradients."""
    torch.manual_seed(0)
    x = torch.randn(2 * ROWS * STEPS, 6)
    if fault == "rows":
        x[2 * ROWS * 2 + 1 :: 2] = float("nan")  # rank 1's from its third batch on
    data = TensorDataset(x)
    sampler: Any = DistributedSampler(data, 2, torch.distributed.get_rank(), shuffle=False)
    callbacks = {"device": Device, "link": Link, "wrong": Wrong}
    checks = {"check_gradients": True, "check_replicas_every": 0}
    # Plans are made once for all tests, whose folders lie side by side.
    plan_dir = Path(root).parent / "plans"
    trainer = pl.Trainer(
        strategy=AlpaStrategy(
            cluster="pcie_8gpu", plan_dir=plan_dir, verbose=False, **checks, **options
        ),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        default_root_dir=root,
        callbacks=[callbacks[fault]()] if fault in callbacks else [],
        **QUIET,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(
            globals()[net](1e30 if fault == "own" else 0.1), DataLoader(data, ROWS, sampler=sampler)
        )
    return [str(each.message) for each in caught if "alpa: step" in str(each.message)]


def reports(
    pool: Any, root: Any, fault: str, options: dict[str, Any], net: str = "Net"
) -> list[str]:
    first, second = pool.run(2, train, str(root), fault, net, options)
    assert not second
    return first


RUNS = {
    "captured": {"placements": {"*": "R*"}},
    "zero2": {"parallel": "zero2"},
    "zero3": {"parallel": "zero3"},
    "tensor": {"parallel": "tensor"},
    "written": WRITTEN,
    "written parts": WRITTEN_PARTS,
    "pipeline": PIPELINE,
}


@pytest.mark.parametrize(("run", "fault"), in_tiers(product(RUNS, ("none", "own"))))
def test_only_what_is_wrong_is_said_and_is_no_error(pool, tmp_path, run: str, fault: str) -> None:
    """What one device would have is said once."""
    if fault == "none":
        assert reports(pool, tmp_path, "none", RUNS[run]) == []
        return
    (said,) = reports(pool, tmp_path, "own", RUNS[run])
    assert "step 2:" in said or "step 3:" in said
    if run != "pipeline":
        assert "the training's own, as it would be on one device" in said


@pytest.mark.parametrize("run", ["captured", "zero2", "written", "written parts"])
def test_rows_of_one_rank_are_told(pool, tmp_path, run: str) -> None:
    (said,) = reports(pool, tmp_path, "rows", RUNS[run])
    assert "step 3:" in said
    assert "The batch of ranks [1] holds values that are not finite" in said
    if "written" in run:
        assert (
            "gradients of ranks [1] alone are not finite before they are summed (rank 1: first that"
            " of last." in said
        )


@pytest.mark.parametrize("net", ["Net", "ByHand"])
def test_a_rank_that_computes_wrongly_is_named(pool, tmp_path, net: str) -> None:
    for options in [WRITTEN] if net == "ByHand" else [WRITTEN, RUNS["captured"]]:
        (said,) = reports(pool, tmp_path, "device", options, net)
        assert "step 3: gradients of ranks [1] alone are not finite" in said
        assert "rank 1: first that of first.weight" in said
        assert "batch" not in said


@pytest.mark.parametrize("run", ["captured", "written"])
def test_a_sum_that_is_not_finite_is_told_from_its_summands(pool, tmp_path, run: str) -> None:
    (said,) = reports(pool, tmp_path, "link", RUNS[run])
    assert "step 3: every rank's own gradients are finite, that of" in said
    assert "a link or device computes wrongly" in said


@pytest.mark.parametrize("run", ["captured", "written"])
def test_copies_of_a_gradient_that_differ_are_an_error(pool, tmp_path, run: str) -> None:
    with pytest.raises(
        WorkerError, match=r"copies of the gradient of \w+\.\w+ differ at step 3: on ranks \[1\]"
    ):
        reports(pool, tmp_path, "wrong", RUNS[run])


def test_a_loss_alone_is_named() -> None:
    said = report([(True, None, None, False), (True, None, None, False)], divided=True)
    assert (
        said
        == "the loss is not finite on ranks [0, 1]; all gradients of the ranks' own are finite."
    )


def test_it_is_on_or_off() -> None:
    with pytest.raises(OptionError, match="check_gradients=2 is neither true nor false"):
        AlpaStrategy(check_gradients=2)  # type: ignore[arg-type]
