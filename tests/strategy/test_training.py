"""What surrounds the steps: validation, checkpoints, accumulation, clipping, batches of another
shape, batch scopes.

Each compares with a plain single-process Trainer on the global batches, or with a run of the same
strategy.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from covering import in_tiers
from models import MLP
from quiet import QUIET
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from alpa_strategy import AlpaStrategy
from alpa_strategy.comm.collectives import all_gather_object

TOLERANCE = 1e-9
ROWS = 8  # of the global batch


class Validated(MLP):
    """The MLP with BatchNorm-free validation that logs over ranks and keeps what it saw."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shapes: list[tuple[int, ...]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shapes.append(tuple(self.net[0].weight.shape))
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(x), y), sync_dist=True)


class Phased(MLP):
    """Its step takes another path every third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        if batch_idx % 3 == 2:
            loss = 2 * loss
        self.log("train_loss", loss)
        return loss


def train(
    kind: type[MLP],
    root: str,
    strategy: dict[str, Any] | None,
    num_rows: int = 4 * ROWS,
    world_size: int = 2,
    ckpt_path: str | None = None,
    save: str | None = None,
    validate: bool = False,
    **trainer_arguments: Any,
) -> dict[str, Any]:
    """Train once in fp64 without shuffling; without `strategy`: plain Trainer on global batches."""
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    try:
        model = kind()
        data = TensorDataset(*model.example_batch(num_rows, torch.Generator().manual_seed(3)))
    finally:
        torch.set_default_dtype(torch.float32)
    loader = _loader(data, strategy, world_size)
    parallel: dict[str, Any] = {"devices": 1}
    if strategy is not None:
        # Plans are made once for all tests, whose folders lie side by side.
        plan_dir = Path(root).parent / "plans"
        defaults = {"cluster": "pcie_8gpu", "plan_dir": plan_dir, "verbose": False}
        strategy_of_run = AlpaStrategy(**{**defaults, **strategy})
        parallel = {"devices": world_size, "strategy": strategy_of_run}
    trainer = pl.Trainer(
        accelerator="cpu",
        precision="64-true",
        **QUIET,
        default_root_dir=root,
        **{"max_epochs": 1, **parallel, **trainer_arguments},
    )
    trainer.fit(
        model, loader, loader if validate else None, ckpt_path=ckpt_path, weights_only=False
    )
    if save:
        trainer.save_checkpoint(save)
    return {
        "state": {k: v.detach().clone() for k, v in model.state_dict().items()},
        "metrics": _mean_of_ranks({k: float(v) for k, v in trainer.callback_metrics.items()}),
        "shapes": getattr(model, "shapes", []),
        "optimizer": trainer.optimizers[0].state_dict(),
        "steps": trainer.global_step,
    }


def _mean_of_ranks(metrics: dict[str, float]) -> dict[str, float]:
    """Average over the ranks, each of which logs the values of its own batches."""
    of_ranks = all_gather_object(metrics)
    means = {}
    for name in metrics:
        means[name] = fmean([of_rank[name] for of_rank in of_ranks])
    return means


def _loader(data: TensorDataset, strategy: dict[str, Any] | None, world_size: int) -> DataLoader:
    """Return the loader of this rank, or of the plain Trainer: samples in the ranks' order."""
    if strategy is None:
        order = []
        for start in range(0, len(data), ROWS):
            for rank in range(world_size):
                rows = _rows(start, len(data), world_size)
                order += [rank + world_size * row for row in rows]
        return DataLoader(data, batch_size=ROWS, sampler=order)
    if strategy.get("batch_scope") == "global":
        return DataLoader(data, batch_size=ROWS)
    rank = torch.distributed.get_rank()
    sampler = DistributedSampler(data, world_size, rank, shuffle=False)
    return DataLoader(data, batch_size=ROWS // world_size, sampler=sampler)


def _rows(start: int, num_rows: int, world_size: int) -> range:
    return range(start // world_size, min(start + ROWS, num_rows) // world_size)


def assert_same(run: dict[str, Any], reference: dict[str, Any]) -> None:
    for name, expected in reference["state"].items():
        torch.testing.assert_close(run["state"][name], expected, rtol=TOLERANCE, atol=TOLERANCE)
    for name, expected in reference["metrics"].items():
        assert run["metrics"][name] == pytest.approx(expected, rel=TOLERANCE)
    assert run["steps"] == reference["steps"]


ZERO3, TENSOR = {"parallel": "zero3"}, {"parallel": "tensor"}
# One device's numbers: metrics that are no means over ranks.
GLOBAL_ZERO3 = {"parallel": "zero3", "batch_scope": "global"}


@pytest.mark.parametrize(
    ("parallel", "option"),
    in_tiers(
        product(("zero3", "zero2", "tensor"), ("accumulate_grad_batches", "gradient_clip_val"))
    ),
)
def test_accumulation_and_clipping(pool, tmp_path: Path, parallel: str, option: str) -> None:
    strategy = {"parallel": parallel}
    arguments = {option: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}[option]}
    reference = train(MLP, str(tmp_path), None, **arguments)
    for run in pool.run(2, run_train, "MLP", str(tmp_path), strategy, arguments):
        assert_same(run, reference)


def test_clip_by_value(pool, tmp_path: Path) -> None:
    arguments = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    reference = train(MLP, str(tmp_path), None, **arguments)
    assert_same(pool.run(2, run_train, "MLP", str(tmp_path), ZERO3, arguments)[0], reference)


def test_validation_sees_whole_parameters(pool, tmp_path: Path) -> None:
    arguments = {"validate": True, "max_epochs": 2}
    reference = train(Validated, str(tmp_path), None, **arguments)
    for run in pool.run(2, run_train, "Validated", str(tmp_path), ZERO3, arguments):
        assert_same(run, reference)
        assert set(run["shapes"]) == {(16, 8)}


@pytest.mark.parametrize("strategy", [ZERO3, TENSOR], ids=lambda s: s["parallel"])
def test_checkpoints_are_ordinary_and_resume_anywhere(pool, tmp_path: Path, strategy: dict) -> None:
    """alpa -> file -> alpa, and alpa -> file -> plain Trainer, equal the plain training that was
    never interrupted.
    """
    root = str(tmp_path)
    reference = train(MLP, root, None, max_epochs=2)
    strategy = {**strategy, "checkpoint": "single"}
    half = pool.run(2, run_train, "MLP", root, strategy, {"save": f"{root}/half.ckpt"})
    again = {"ckpt_path": f"{root}/half.ckpt", "max_epochs": 2}
    assert half[0]["steps"] == 4
    assert_same(train(MLP, root, None, **again), reference)
    resumed = pool.run(2, run_train, "MLP", root, strategy, again)[0]
    assert_same(resumed, reference)
    for number, state in reference["optimizer"]["state"].items():
        torch.testing.assert_close(
            resumed["optimizer"]["state"][number], state, rtol=TOLERANCE, atol=TOLERANCE
        )


def test_a_checkpoint_in_the_middle_of_training(pool, tmp_path: Path) -> None:
    """A callback saves while parameters are sharded; the file is what a plain Trainer would have
    written.
    """
    plain, alpa = tmp_path / "plain", tmp_path / "alpa"
    train(MLP, str(plain), None, callbacks=[SaveMidway()])
    pool.run(2, run_with_midway_checkpoint, str(alpa))
    expected = torch.load(plain / "midway.ckpt", weights_only=False)
    stored = torch.load(alpa / "midway.ckpt", weights_only=False)
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(stored[key], expected[key], rtol=TOLERANCE, atol=TOLERANCE)
    assert stored.keys() == expected.keys()


def test_a_smaller_last_batch_and_a_branch_on_batch_idx(pool, tmp_path: Path) -> None:
    arguments = {"num_rows": 3 * ROWS + 4}
    reference = train(Phased, str(tmp_path), None, **arguments)
    for run in pool.run(2, run_train, "Phased", str(tmp_path), ZERO3, arguments):
        assert_same(run, reference)


@pytest.mark.parametrize("parallel", ["auto", "data", "zero3"])
def test_global_batches(pool, tmp_path: Path, parallel: str) -> None:
    """Every rank loads the global batch; the last one has an odd number of rows."""
    arguments = {"num_rows": 2 * ROWS + 5}
    reference = train(MLP, str(tmp_path), None, world_size=1, **arguments)
    strategy = {"batch_scope": "global", "parallel": parallel}
    for run in pool.run(2, run_train, "MLP", str(tmp_path), strategy, arguments):
        assert_same(run, reference)


def run_train(
    kind: str, root: str, strategy: dict[str, Any], arguments: dict[str, Any]
) -> dict[str, Any]:
    return train(globals()[kind], root, strategy, **arguments)


class SaveMidway(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "midway.ckpt")


def run_with_midway_checkpoint(root: str) -> None:
    train(MLP, root, {**ZERO3, "checkpoint": "single"}, callbacks=[SaveMidway()])


class Measured(MLP):
    """Logs torchmetrics objects, a number, a dict, and returns more than the loss; batches are
    dicts.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mean_error = torchmetrics.MeanMetric().set_dtype(torch.float64)
        self.worst = torchmetrics.MaxMetric()
        errors = {
            "mse": torchmetrics.MeanSquaredError(),
            "rmse": torchmetrics.MeanSquaredError(squared=False),
        }
        self.errors = torchmetrics.MetricCollection(errors, prefix="train_").set_dtype(
            torch.float64
        )
        self.last = self.errors.clone(prefix="last_")

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        prediction = self.net(x)
        loss = torch.nn.functional.mse_loss(prediction, y)
        self.mean_error.update((prediction - y).abs().mean(1))
        self.worst.update((prediction - y).abs())
        self.log("mean_error", self.mean_error, on_step=False, on_epoch=True)
        self.log("worst", self.worst, on_step=True, on_epoch=True)
        self.log_dict({"twice": 2 * loss, "one": 1.0}, on_step=True, on_epoch=True)
        self.errors.update(prediction, y)  # two metrics that share one state
        self.log_dict(self.errors, on_step=False, on_epoch=True)
        self.log_dict(self.last(prediction, y))
        return {"loss": loss, "prediction": prediction.detach()}


class Viewed(MLP):
    """Its loss pulls weights to where they are: to a view of them, made before the training."""

    def __init__(self) -> None:
        super().__init__()
        self.view = next(p for p in self.parameters() if p.dim() == 2).data

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        weight = next(p for p in self.parameters() if p.dim() == 2)
        loss = (
            torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]) + (weight * self.view).mean()
        )
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("view", self.view.norm())


@pytest.mark.parametrize("strategy", [{}, ZERO3, TENSOR], ids=str)
def test_a_view_of_a_weight_shows_what_the_weight_is(
    pool, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    reference = train(Viewed, str(tmp_path), None)
    for run in pool.run(2, run_train, "Viewed", str(tmp_path), strategy, {}):
        assert_same(run, reference)


def test_torchmetrics_dicts_and_numbers_are_logged_alike(pool, tmp_path: Path) -> None:
    reference = train(Measured, str(tmp_path), None)
    assert {"mean_error", "worst_epoch", "twice_epoch", "one_step"} <= reference["metrics"].keys()
    assert {"train_mse", "train_rmse", "last_mse", "last_rmse"} <= reference["metrics"].keys()
    for run in pool.run(2, run_train, "Measured", str(tmp_path), GLOBAL_ZERO3, {}):
        assert_same(run, reference)


def fit_twice_and_validate(root: str) -> tuple[float, float, tuple[int, ...]]:
    """A second fit of one trainer goes on, and evaluation outside of fit works."""
    torch.manual_seed(7)
    model = Validated()
    data = TensorDataset(*model.example_batch(16, torch.Generator().manual_seed(3)))
    strategy = AlpaStrategy(
        cluster="pcie_8gpu", plan_dir=f"{root}/plans", verbose=False, parallel="zero3"
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision="bf16-mixed",
        max_epochs=1,
        **QUIET,
        default_root_dir=root,
    )
    loader = DataLoader(data, batch_size=4)
    first = trainer.validate(model, loader, verbose=False)[0]["val_loss"]
    trainer.fit(model, loader)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, loader)
    last = trainer.validate(model, loader, verbose=False)[0]["val_loss"]
    assert trainer.global_step == 6
    return first, last, tuple(model.net[0].weight.shape)


def test_fit_twice_and_validate(pool, tmp_path: Path) -> None:
    (first, last, shape), other = pool.run(2, fit_twice_and_validate, str(tmp_path))
    assert last < first
    assert shape == (16, 8)
    assert other == (first, last, shape)


class Remembers(MLP):
    """Computes with a buffer that it changes afterwards, and logs and keeps what it was."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("queue", torch.ones(6, self.d_out))
        self.register_buffer("last", torch.zeros(6, self.d_out))
        self.register_buffer("level", torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        z = self.net(x)
        loss = (z - y).square().mean() + self.level.clone() * (
            z @ self.queue.clone().T
        ).square().mean()
        self.log("train_loss", loss)
        self.log("level", self.level)
        with torch.no_grad():
            self.last.copy_(self.queue)
            self.queue.mul_(0.5).add_(z.mean(0))
            self.level *= 0.9
        return loss


def run_remembers(root: str, strategy: dict[str, Any]) -> dict[str, Any]:
    return train(Remembers, root, strategy)


@pytest.mark.parametrize(
    "strategy", [{"parallel": "data"}, {"num_stages": 2}], ids=["data", "stages"]
)
def test_buffers_are_as_they_were_until_the_backward(
    pool, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    reference = train(Remembers, str(tmp_path), None)
    # The buffers are made of all samples on one device, of rank 0's under DDP.
    strategy = {**strategy, "batch_scope": "global"}
    for run in pool.run(2, run_remembers, str(tmp_path), strategy):
        assert_same(run, reference)


def test_micro_batches_of_a_training_without_a_seed(tmp_path: Path) -> None:
    """The random numbers around micro-batches come of the seed that torch has by itself."""
    torch.manual_seed(67_280_421_310_721)
    model = Phased()
    loader = DataLoader(TensorDataset(*model.example_batch(16)), batch_size=ROWS)
    strategy = AlpaStrategy(
        num_microbatches=2,
        batch_scope="global",
        cluster="pcie_8gpu",
        plan_dir=str(tmp_path),
        verbose=False,
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=str(tmp_path),
        **QUIET,
    )
    trainer.fit(model, loader)
    assert trainer.global_step == 2
