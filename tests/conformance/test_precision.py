"""Precisions: 50 steps as under "ddp", one stage and pipelined, a scaler that all ranks agree on,
plans that follow.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from models import GPT
from quiet import QUIET
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import SetupError
from alpa_strategy.lightning.master_weights import MasterWeights
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.optimizer_info import inspect_optimizer
from alpa_strategy.planner.planner import make_plan

STEPS = 50
PLANS = {
    "data": {"parallel": "data"},
    "zero3": {"parallel": "zero3"},
    "tensor": {"parallel": "tensor"},
    "pipelined": {"num_stages": 2, "num_microbatches": 2},
    "written": {"capture": "never", "parallel": "data"},
    "written in shards": {"capture": "never", "parallel": "zero3"},
}
CAPTURED = list(PLANS)[:4]
MASTERS = "bf16-true, fp32 masters"
TOLERANCES = {
    "32-true": 1e-4,
    "bf16-mixed": 2e-2,
    "16-mixed": 5e-3,
    "bf16-true": 5e-2,
    MASTERS: 2e-2,
    "16-true": 2e-2,
    "64-true": 1e-9,
}


class Losses(pl.Callback):
    """The loss of every step, of all ranks together, and the loss scale."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.scales: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *unused: Any
    ) -> None:
        loss = outputs["loss"].detach().double()
        torch.distributed.all_reduce(loss)
        self.seen.append(float(loss) / torch.distributed.get_world_size())
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scales.append(scaler.get_scale() if scaler is not None else 1.0)


class Tiny(GPT):
    """A GPT whose step makes tensors of the default dtype, too."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(
            num_layers=2,
            vocab_size=32,
            optimizer=optimizer,
            lr=3e-3 if optimizer == "adamw" else 0.05,
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.ones(3).mean() + torch.linspace(0, 1, 3).sum() * 1e-3


class Overflows(Tiny):
    """Gradients of the first layer overflow fp16 in the fourth step, on the rows of one rank
    only.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, _ = batch
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            rows = (tokens[:, 0] >= 0).cumsum(0) == 1  # the first row of the batch
            loss = loss + (self.wte(tokens).sum((1, 2)) * rows).sum() * 1e38
        return loss


class SaveAt(pl.Callback):
    """A checkpoint after one step."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def train(
    kind: str,
    plan: dict[str, Any] | None,
    precision: str,
    root: str,
    steps: int = STEPS,
    clipping: str = "norm",
    save_at: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train on two ranks; `plan=None` is DDP; `resume`: from what was saved after step
    `save_at`.
    """
    torch.manual_seed(5)
    optimizer = (
        "sgd" if precision == "16-true" else "adamw"
    )  # Adam's eps is 0 in fp16, for DDP as well
    module = {"Tiny": Tiny, "Overflows": Overflows}[kind](optimizer)
    data = TensorDataset(*module.example_batch(64, torch.Generator().manual_seed(3)))
    options: dict[str, Any] = {"cluster": "pcie_8gpu", "verbose": False, "plan_dir": root}
    plugins = []
    if precision == "16-mixed":  # with the name alone, Lightning takes bf16 on CPUs
        plugins = [
            MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))
        ]
    if precision == MASTERS:
        precision = "bf16-true"
        if plan is None:
            plugins = [MasterWeights()]
        else:
            options["master_weights"] = True
    losses, path = Losses(), f"{root}/saved.ckpt"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp" if plan is None else AlpaStrategy(**options, **plan),
        precision=None if plugins else precision,
        plugins=plugins,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[losses, SaveAt(save_at or -1, path)],
        gradient_clip_val=1.0 if clipping == "norm" else 1e-3,
        gradient_clip_algorithm=clipping,
        **QUIET,
        default_root_dir=root,
    )
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=path if resume else None)
    dtypes = {str(p.dtype) for p in module.parameters()}
    return {"losses": losses.seen, "scales": losses.scales, "dtypes": dtypes}


@pytest.fixture(scope="session")
def ddp(pool, tmp_path_factory):
    """DDP's runs by precision, computed once."""
    results: dict[str, Any] = {}

    def get(precision: str) -> Any:
        if precision not in results:
            root = str(tmp_path_factory.mktemp("ddp"))
            results[precision] = pool.run(2, train, "Tiny", None, precision, root)[0]
        return results[precision]

    return get


CASES = [(precision, plan) for precision in ("bf16-mixed", "16-mixed") for plan in CAPTURED]
CASES += [(MASTERS, plan) for plan in PLANS]
CASES += [
    (precision, plan)
    for precision in ("64-true", "bf16-true", "16-true")
    for plan in ("zero3", "pipelined")
]
# Every precision but float64, in which most other tests train, and bf16-mixed, which
# equality/test_precision_bytes.py has: a diagonal of the cross product. The rest is slow.
DIAGONAL = {
    ("16-mixed", "pipelined"),
    (MASTERS, "written in shards"),
    ("bf16-true", "zero3"),
    ("16-true", "pipelined"),
}


def cases():
    for case in CASES:
        yield pytest.param(*case, marks=() if case in DIAGONAL else pytest.mark.slow)


@pytest.mark.parametrize(("precision", "plan"), cases())
def test_losses_of_50_steps_are_those_of_ddp(
    pool, ddp, tmp_path, precision: str, plan: str
) -> None:
    reference = ddp(precision)
    for run in pool.run(2, train, "Tiny", PLANS[plan], precision, str(tmp_path)):
        assert len(run["losses"]) == STEPS
        assert run["dtypes"] == reference["dtypes"]
        for mine, theirs in zip(run["losses"], reference["losses"], strict=True):
            assert math.isclose(mine, theirs, rel_tol=TOLERANCES[precision])
        assert run["scales"] == reference["scales"]
    assert reference["losses"][-1] < 0.9 * reference["losses"][0]


def captured_plans():
    """Parameters in shards; the others are slow."""
    for plan in CAPTURED:
        marks = () if plan == "zero3" else pytest.mark.slow
        yield pytest.param(plan, marks=marks)


@pytest.mark.parametrize("plan", list(captured_plans()))
def test_all_ranks_skip_a_step_whose_gradients_overflow_on_one(pool, tmp_path, plan: str) -> None:
    """Gradients are clipped by value without the scale; the scaler's state is resumed."""
    given = ("16-mixed", str(tmp_path), 6, "value")
    expected = pool.run(2, train, "Overflows", None, *given)[0]
    assert expected["scales"] == [4096.0] * 3 + [2048.0] * 3
    runs = pool.run(2, train, "Overflows", PLANS[plan], *given, 4)
    resumed = pool.run(2, train, "Overflows", PLANS[plan], *given, 4, True)
    for run, rest in zip(runs, resumed, strict=True):
        assert run["scales"] == expected["scales"]
        for mine, theirs in zip(run["losses"][4:], expected["losses"][4:], strict=True):
            assert math.isclose(mine, theirs, rel_tol=TOLERANCES["16-mixed"])
        assert (rest["scales"], rest["losses"]) == (run["scales"][4:], run["losses"][4:])


def test_plans_follow_the_precision() -> None:
    """Half the bytes a parameter: half the memory of parameters, gradients and Adam's state, and
    fewer seconds.
    """
    cluster = ClusterSpec.load("p3_16xlarge_x8", {"num_nodes": 1, "devices_per_node": 2})
    bytes_of, seconds_of = {}, {}
    for dtype in (torch.float64, torch.float32, torch.float16):
        module = GPT(d_model=256, num_heads=4, num_layers=2, vocab_size=512, seq_len=64).to(dtype)
        optimizer = inspect_optimizer(module.configure_optimizers())
        assert optimizer.state_bytes == 2 * dtype.itemsize
        plan = make_plan(
            module, module.example_batch(8), cluster, PlanOptions(parallel="data"), optimizer
        )
        bytes_of[dtype], seconds_of[dtype] = plan.predicted.peak_bytes, plan.predicted.step_seconds
    assert 1.8 < bytes_of[torch.float64] / bytes_of[torch.float32] < 2.1
    assert 1.7 < bytes_of[torch.float32] / bytes_of[torch.float16] < 2.1
    assert seconds_of[torch.float64] > seconds_of[torch.float32] > seconds_of[torch.float16]


def test_masters_are_fp32_and_their_updates_are_not_lost(pool, tmp_path) -> None:
    """An update of a thousandth is nothing to a bf16 weight of 1: pure bf16 stands still where
    masters move.
    """
    moved = [
        pool.run(2, weight_after_small_updates, *given, str(tmp_path))[0]
        for given in ((True, {}), (False, {}))
    ]
    sharded = pool.run(2, weight_after_small_updates, True, {"parallel": "zero3"}, str(tmp_path))
    assert moved == [("torch.float32", pytest.approx(0.98, abs=1e-5)), ("torch.bfloat16", 1.0)]
    assert sharded == [("torch.float32", pytest.approx(0.98, abs=1e-5))] * 2


class Scale(pl.LightningModule):
    """A weight of ones whose gradient is one everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, 64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.weight.dtype == torch.bfloat16
        return (self.weight * batch[0].mean(0)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def weight_after_small_updates(masters: bool, plan: dict[str, Any], root: str) -> tuple[str, float]:
    """dtype and first element of the weight after 20 updates of 1e-3."""
    module = Scale()
    strategy = AlpaStrategy(
        cluster="pcie_8gpu", verbose=False, plan_dir=root, master_weights=masters, **plan
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision="bf16-true",
        max_steps=20,
        max_epochs=-1,
        **QUIET,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 64)), batch_size=4))
    return str(module.weight.dtype), float(module.weight.detach()[0, 0])


def test_masters_of_nothing_are_refused(tmp_path) -> None:
    with pytest.raises(SetupError, match='use precision="bf16-true"'):
        pl.Trainer(
            accelerator="cpu",
            strategy=AlpaStrategy(master_weights=True),
            precision="bf16-mixed",
            **QUIET,
        )
