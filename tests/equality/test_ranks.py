"""By default every rank has the numbers that DDP gives it, whatever the plan: losses, logs,
gradients and weights, in fp64, to 1e-9.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from covering import in_tiers, slow_but
from equality.programs import MORE_PROGRAMS, PROGRAMS
from quiet import QUIET
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset
from worker_pool import WorkerError

STEPS = 5
ALL = {**PROGRAMS, **MORE_PROGRAMS}
PLANS = {
    "data": {"parallel": "data"},
    "zero3": {"parallel": "zero3"},
    "tensor": {"parallel": "tensor"},
    "stages": {"num_stages": 2},
    "microbatches": {"num_stages": 2, "num_microbatches": 2},
}
FOUR_RANK_PLANS = {
    "data x tensor": {"parallel": ("data", "tensor"), "logical_mesh": (2, 2)},
    "zero3": {"parallel": "zero3"},
    "stages": {"num_stages": 2},
}


class Batches(Dataset):
    """The samples of one rank's batches, one after the other; other leaves are the collation's."""

    def __init__(self, program: Any, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.batches = [program.example(generator) for _ in range(STEPS)]
        self.size = len(pytree.tree_leaves(self.batches[0])[0])

    def __len__(self) -> int:
        return STEPS * self.size

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, indices: list[int]) -> Any:
        return copy.deepcopy(self.batches[indices[0] // self.size])


class Recorder(pl.Callback):
    """Each step's loss and logs."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(outputs["loss"]))
        self.logs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(
    name: str, strategy: dict[str, Any] | None, root: str, accumulate: int = 1
) -> dict[str, Any]:
    """Train a program under DDP (`strategy` is None) or Alpa; return what this rank sees.

    Args:
        accumulate: `accumulate_grad_batches`.
    """
    from alpa_strategy import AlpaStrategy
    from alpa_strategy.comm.collectives import world_size

    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    try:
        module = ALL[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    recorder = Recorder()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=world_size(),
        strategy="ddp" if strategy is None else AlpaStrategy(**strategy),
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
        callbacks=[recorder],
        default_root_dir=root,
        **QUIET,
    )
    data = Batches(ALL[name], torch.distributed.get_rank())
    trainer.fit(module, DataLoader(data, batch_size=data.size, collate_fn=data.collate))
    plan = getattr(trainer.strategy, "plan", None)
    return {
        "losses": recorder.losses,
        "logs": recorder.logs,
        "state": {key: value.detach().clone() for key, value in module.state_dict().items()},
        "buffers": [name for name, _ in module.named_buffers()],
        "is_eager": plan is not None and plan.is_eager,
        "is_pipelined": plan is not None and plan.is_pipelined,
    }


@pytest.fixture(scope="session")
def under_ddp(pool, tmp_path_factory):
    runs: dict[tuple[str, int, int], list[dict[str, Any]]] = {}

    def get(name: str, num_ranks: int, accumulate: int = 1) -> list[dict[str, Any]]:
        key = (name, num_ranks, accumulate)
        if key not in runs:
            root = str(tmp_path_factory.mktemp("ddp"))
            runs[key] = pool.run(num_ranks, train, name, None, root, accumulate)
        return runs[key]

    return get


def assert_same(run: dict[str, Any], reference: dict[str, Any], rank: int) -> None:
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(run["losses"], reference["losses"], **close)
    for logs, expected in zip(run["logs"], reference["logs"], strict=True):
        torch.testing.assert_close(logs, expected, **close)
    for name, expected in reference["state"].items():
        # A pipeline's buffers are rank 0's on all ranks, as they are in DDP's next forward.
        is_buffer = name in run["buffers"]
        if not is_buffer or rank == 0 or not run["is_pipelined"]:
            torch.testing.assert_close(run["state"][name], expected, **close)


@pytest.mark.parametrize(("name", "plan"), in_tiers(product(PROGRAMS, PLANS)))
def test_two_ranks(pool, under_ddp, tmp_path, name, plan):
    strategy = {**PLANS[plan], "cluster": "pcie_8gpu", "plan_dir": str(tmp_path)}
    runs = pool.run(2, train, name, strategy, str(tmp_path))
    for rank, (run, reference) in enumerate(zip(runs, under_ddp(name, 2), strict=True)):
        assert not run["is_eager"]
        assert_same(run, reference, rank)


@pytest.mark.parametrize(
    ("name", "plan"), in_tiers(product(("BatchNorms", "Recurrent"), ("data", "zero3", "tensor")))
)
def test_accumulated_batches(pool, under_ddp, tmp_path, name, plan):
    """Buffers of ranks go on by themselves until gradients are averaged."""
    strategy = {**PLANS[plan], "cluster": "pcie_8gpu", "plan_dir": str(tmp_path)}
    runs = pool.run(2, train, name, strategy, str(tmp_path), 2)
    for rank, (run, reference) in enumerate(zip(runs, under_ddp(name, 2, 2), strict=True)):
        assert not run["is_eager"]
        assert_same(run, reference, rank)


# Statistics, pairs and loads of all samples; the others are on two ranks.
@pytest.mark.parametrize("name", slow_but(PROGRAMS, ("BatchNorms", "Contrastive", "LoadBalancing")))
def test_four_ranks(pool, under_ddp, tmp_path, name):
    strategy = {
        **FOUR_RANK_PLANS["data x tensor"],
        "cluster": "pcie_8gpu",
        "plan_dir": str(tmp_path),
    }
    runs = pool.run(4, train, name, strategy, str(tmp_path))
    for rank, (run, reference) in enumerate(zip(runs, under_ddp(name, 4), strict=True)):
        assert not run["is_eager"]
        assert_same(run, reference, rank)


# A shape that depends on data.
EAGER = ("CentreLoss",)
REFUSALS = {
    **{(name, plan): "capture" for name in EAGER for plan in ("stages", "microbatches")},
    # Edges [2, E] have no dim of samples.
    ("LinkPrediction", "microbatches"): "no sum over rows",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "plan"),
    [*((2, plan) for plan in PLANS), *((4, plan) for plan in FOUR_RANK_PLANS)],
)
@pytest.mark.parametrize("name", MORE_PROGRAMS)
def test_more_programs(pool, under_ddp, tmp_path, record_property, name, num_ranks, plan):
    plans = PLANS if num_ranks == 2 else FOUR_RANK_PLANS
    strategy = {**plans[plan], "cluster": "pcie_8gpu", "plan_dir": str(tmp_path)}
    if (name, plan) in REFUSALS:
        with pytest.raises(WorkerError, match=REFUSALS[name, plan]):
            pool.run(num_ranks, train, name, strategy, str(tmp_path))
        return
    runs = pool.run(num_ranks, train, name, strategy, str(tmp_path))
    record_property("is_captured", not runs[0]["is_eager"])
    assert runs[0]["is_eager"] == (name in EAGER)
    for rank, (run, reference) in enumerate(zip(runs, under_ddp(name, num_ranks), strict=True)):
        assert_same(run, reference, rank)
