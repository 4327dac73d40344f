"""Evaluation on unsharded parameters or on shards: the same numbers, outputs and hook calls as a
plain Trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from covering import slow_but
from models import MLP
from quiet import QUIET
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from alpa_strategy import AlpaStrategy

TOLERANCE = 1e-9
ROWS = 8  # of the global batch
NUM_ELEMENTS = 46_020  # of the model that is evaluated without a training
ONE_STAGE = [
    {"parallel": "zero3"},
    {"parallel": "tensor"},
    {"parallel": "zero2"},
    {"parallel": "data"},
]
PIPELINE = {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"}
BIG = {
    "d_hidden": 64,
    "num_layers": 8,
}  # 206 kB of parameters, and plans that need 485 to 583 kB for a training step
NO_ROOM = {"memory_limit": 600e3}  # for them whole: each is gathered where it is used
NO_ROOM_BESIDE_A_STEP = {"memory_limit": 650e3}
SHARDED = [
    {**strategy, **NO_ROOM}
    for strategy in ({"parallel": "zero3"}, {"parallel": "tensor"}, PIPELINE)
]


def name_of(strategy: dict[str, Any]) -> str:
    return strategy.get("parallel", "pipeline") + ("-shards" if "memory_limit" in strategy else "")


class Evaluated(MLP):
    """Logs in every way, returns nested outputs, keeps what the hooks and steps saw."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[Any] = []
        self.weights: list[tuple[int, ...]] = []
        self.groups: list[int] = []  # of processes, after each loop

    def on_validation_end(self) -> None:
        self.groups.append(len(torch.distributed.distributed_c10d._world.pg_map))

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        x, y = batch
        prediction = self.net(x)
        loss = torch.nn.functional.mse_loss(prediction, y)
        self.log("val_loss", loss, sync_dist=True)
        self.log(
            "val_root", (prediction - y).square().mean(1).sqrt().mean(), on_step=True, on_epoch=True
        )
        self.log("val_sum", (prediction > 0).sum().double(), reduce_fx="sum", sync_dist=True)
        self.log(
            "val_max", prediction.max(), reduce_fx="max", sync_dist=True, add_dataloader_idx=True
        )
        return {
            "prediction": prediction,
            "nested": [loss, "text", (x.mean(1),)],
            "dataloader_idx": dataloader_idx,
        }

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        assert len(outputs["prediction"]) == len(batch[0])
        assert outputs["dataloader_idx"] == dataloader_idx
        self.seen.append((outputs["prediction"], outputs["nested"][2][0], batch[0].mean(1)))
        self.weights.append(tuple(self.net[0].weight.shape))


def loaders(model: MLP, sizes: list[int], world_size: int, rank: int) -> list[DataLoader]:
    """One loader a size: rows in the order of a DistributedSampler; world_size 1: the global
    batches of two ranks.
    """
    made = []
    for number, num_rows in enumerate(sizes):
        data = TensorDataset(
            *model.example_batch(num_rows, torch.Generator().manual_seed(3 + number))
        )
        if world_size == 1:
            starts = range(0, num_rows, ROWS)
            order = [
                i
                for s in starts
                for r in range(2)
                for i in range(s + r, min(s + ROWS, num_rows), 2)
            ]
            made.append(DataLoader(data, batch_size=ROWS, sampler=order))
        else:
            sampler = DistributedSampler(data, world_size, rank, shuffle=False)
            made.append(DataLoader(data, batch_size=ROWS // world_size, sampler=sampler))
    return made


def fit(
    kind: str,
    root: str,
    strategy: dict[str, Any] | str | None,
    sizes: list[int],
    kwargs: dict[str, Any],
    stream: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Train once in fp64 with validation on loaders of given sizes; no strategy: plain Trainer."""
    world_size = 1 if strategy is None else torch.distributed.get_world_size()
    rank = 0 if strategy is None else torch.distributed.get_rank()
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    try:
        model = globals()[kind](**kwargs)
        train, *validation = loaders(model, [3 * ROWS, *sizes], world_size, rank)
    finally:
        torch.set_default_dtype(torch.float32)
    if stream:
        validation = [
            DataLoader(Rows(v.dataset, world_size, rank), batch_size=ROWS // world_size)
            for v in validation
        ]
    parallel: dict[str, Any] = {"devices": 1}
    if isinstance(strategy, str):
        parallel = {"devices": world_size, "strategy": strategy}
    elif strategy is not None:
        options = {
            "cluster": "pcie_8gpu",
            "plan_dir": f"{root}/plans",
            "verbose": False,
            **strategy,
        }
        parallel = {"devices": world_size, "strategy": AlpaStrategy(**options)}
    trainer = pl.Trainer(
        accelerator="cpu",
        precision="64-true",
        **QUIET,
        default_root_dir=root,
        num_sanity_val_steps=0,
        **{"max_epochs": 2, **parallel, **arguments},
    )
    trainer.fit(model, train, validation)
    return {
        "state": {k: v.detach().clone() for k, v in model.state_dict().items()},
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "seen": getattr(model, "seen", []),
        "weights": getattr(model, "weights", []),
        "groups": getattr(model, "groups", []),
        "syncs": [m.sync_on_compute for m in model.modules() if isinstance(m, torchmetrics.Metric)],
    }


def assert_same(runs: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    """Weights and metrics of every rank, and rows of all ranks together, are those of the plain
    Trainer.
    """
    for run in runs:
        torch.testing.assert_close(run["state"], reference["state"], rtol=TOLERANCE, atol=TOLERANCE)
        assert run["metrics"].keys() == reference["metrics"].keys()
    for name, expected in reference["metrics"].items():
        of_ranks = [run["metrics"][name] for run in runs]
        if not name.startswith("train"):
            # Synchronized: the same on all ranks.
            assert of_ranks == pytest.approx([expected] * len(runs), rel=TOLERANCE), name
        assert fmean(of_ranks) == pytest.approx(expected, rel=TOLERANCE), name
    for step, expected in enumerate(reference["seen"]):
        for position, whole in enumerate(expected):
            rows = torch.cat([run["seen"][step][position] for run in runs])
            torch.testing.assert_close(rows, whole, rtol=TOLERANCE, atol=TOLERANCE)


# Where parameters fit whole on a device, metrics below are of that kind by default, and the
# conformance suite has several loaders. Shards of either kind are gathered alike.
SLOW_STRATEGIES = [*ONE_STAGE, SHARDED[1]]


@pytest.mark.parametrize(
    "strategy",
    [
        PIPELINE,
        SHARDED[0],
        SHARDED[2],
        *(pytest.param(strategy, marks=pytest.mark.slow) for strategy in SLOW_STRATEGIES),
    ],
    ids=name_of,
)
def test_validation_of_several_loaders_with_a_smaller_last_batch(
    pool, tmp_path: Path, strategy: dict
) -> None:
    sizes = [2 * ROWS + 4, ROWS]
    reference = fit("Evaluated", str(tmp_path), None, sizes, BIG)
    runs = pool.run(2, fit, "Evaluated", str(tmp_path), strategy, sizes, BIG)
    assert_same(runs, reference)
    assert {"val_loss/dataloader_idx_1", "val_root_epoch/dataloader_idx_0"} <= reference[
        "metrics"
    ].keys()
    for run in runs:
        assert len(run["groups"]) == 2
        assert len(set(run["groups"])) == 1


class Plain(MLP):
    """No hooks."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("val_loss", loss)
        return loss


class Uncapturable(MLP):
    """Looks at values in Python."""

    def __init__(self, always: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.always, self.seen = always, []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        if self.always or batch_idx == 0:
            self.seen.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)

    def on_train_end(self) -> None:
        self.seen.clear()


# Shards of either kind are gathered alike.
@pytest.mark.parametrize(
    "strategy",
    slow_but([{"parallel": "zero3"}, *SHARDED], [{"parallel": "zero3"}, *SHARDED[1:]]),
    ids=name_of,
)
def test_steps_that_no_graph_can_hold(pool, tmp_path: Path, strategy: dict) -> None:
    reference = fit("Uncapturable", str(tmp_path), None, [5 * ROWS], {"always": True, **BIG})
    assert_same(
        pool.run(
            2, fit, "Uncapturable", str(tmp_path), strategy, [5 * ROWS], {"always": True, **BIG}
        ),
        reference,
    )


class Metrics(MLP):
    """Torchmetrics of every kind of state, in training and validation; one step of each loop cannot
    be captured.
    """

    def __init__(self, written: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # whether the second validation step must run in eager mode
        self.written = written
        kinds = {
            "mean": torchmetrics.MeanMetric,
            "sum": torchmetrics.SumMetric,
            "cat": torchmetrics.CatMetric,
        }
        kinds |= {"max": torchmetrics.MaxMetric, "mse": torchmetrics.MeanSquaredError}
        self.kinds = torch.nn.ModuleDict(
            {
                f"{loop}_{name}": kind().set_dtype(torch.float64)
                for loop in ("t", "v")
                for name, kind in kinds.items()
            }
        )
        pair = {
            "mse": torchmetrics.MeanSquaredError(),
            "rmse": torchmetrics.MeanSquaredError(squared=False),
        }
        self.pair = torchmetrics.MetricCollection(pair, prefix="pair_").set_dtype(torch.float64)

    def update(self, loop: str, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        prediction = self.net(x)
        errors = (prediction - y).abs().mean(1)
        for name in ("mean", "sum", "cat", "max"):
            self.kinds[f"{loop}_{name}"].update(errors)
        self.kinds[f"{loop}_mse"].update(prediction, y)
        for name in ("mean", "sum", "max", "mse"):
            self.log(f"{loop}_{name}", self.kinds[f"{loop}_{name}"], on_step=False, on_epoch=True)
        return torch.nn.functional.mse_loss(prediction, y), prediction

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.update("t", batch)[0]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, prediction = self.update("v", batch)
        self.pair.update(prediction, batch[1])
        self.log_dict(self.pair, on_step=False, on_epoch=True)
        if self.written and batch_idx == 1:
            assert loss.item() > 0
            float(loss)

    def on_validation_epoch_end(self) -> None:
        self.log("v_cat_sum", self.kinds["v_cat"].compute().sum())
        self.kinds["v_cat"].reset()


def fit_with_ddp(root: str, sizes: list[int], kwargs: dict[str, Any]) -> dict[str, Any]:
    return fit("Metrics", root, "ddp", sizes, kwargs)


@pytest.mark.parametrize(
    ("strategy", "written"),
    [
        pytest.param({"parallel": "zero3"}, True, id="zero3", marks=pytest.mark.slow),
        pytest.param({"parallel": "zero3", **NO_ROOM}, False, id="zero3-shards"),
        pytest.param(
            {"parallel": "zero3", **NO_ROOM_BESIDE_A_STEP}, True, id="zero3-shards-then-whole"
        ),
        pytest.param(PIPELINE, True, id="pipeline"),
        pytest.param({**PIPELINE, **NO_ROOM}, False, id="pipeline-shards", marks=pytest.mark.slow),
    ],
)
def test_metrics_have_the_values_of_ddp(
    pool, tmp_path: Path, strategy: dict, written: bool
) -> None:
    sizes, kwargs = [3 * ROWS], {"written": written, **BIG}
    expected = pool.run(2, fit_with_ddp, str(tmp_path), sizes, kwargs)
    per_rank = pool.run(2, fit, "Metrics", str(tmp_path), strategy, sizes, kwargs)
    assert {"t_sum", "v_mse", "v_cat_sum", "pair_rmse"} <= expected[0]["metrics"].keys()
    for run in per_rank:
        assert run["metrics"] == pytest.approx(expected[0]["metrics"], rel=TOLERANCE)
        assert run["syncs"] == [True] * len(run["syncs"])


class Rows(IterableDataset):
    """A stream that gives each rank other rows, and the last rank fewer."""

    def __init__(self, data: TensorDataset, world_size: int, rank: int) -> None:
        self.data = data
        self.world_size = world_size
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        last = len(self.data) - ROWS if self.rank == self.world_size - 1 else len(self.data)
        return (self.data[i] for i in range(self.rank, last, self.world_size))


def fit_on_a_stream(root: str, strategy: dict[str, Any] | str) -> dict[str, Any]:
    return fit("Metrics", root, strategy, [3 * ROWS], {"written": False, **BIG}, stream=True)


def test_a_stream_that_ends_sooner_on_one_rank(pool, tmp_path: Path) -> None:
    """With unsharded parameters, and where these do not fit."""
    expected = pool.run(2, fit_on_a_stream, str(tmp_path), "ddp")
    for plan in ({"parallel": "zero3"}, {"parallel": "zero3", **NO_ROOM}):
        per_rank = pool.run(2, fit_on_a_stream, str(tmp_path), plan)
        for run, other in zip(per_rank, expected, strict=True):
            # This one is logged outside of a step, in float32, and its rows come in another order.
            for name, value in run["metrics"].items():
                rounding = 1e-6 if name == "v_cat_sum" else TOLERANCE
                assert value == pytest.approx(other["metrics"][name], rel=rounding), name


class Predicting(Plain):
    """Predicts nested outputs with what the batch says; tests as it validates."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", super().validation_step(batch, batch_idx), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        x, _ = batch
        prediction = self.net(x)
        return {
            "row": prediction,
            "pair": (prediction.T, [x.sum(1), "text"]),
            "loader": dataloader_idx,
        }


def evaluate_without_fit(
    root: str, strategy: dict[str, Any] | str | None, sizes: list[int], uneven: bool = False
) -> dict[str, Any]:
    """validate, test and predict of one trainer, on a model that was never trained; `uneven`: each
    rank has batches of
    another size, from the first one on."""
    world_size = 1 if strategy is None else torch.distributed.get_world_size()
    rank = 0 if strategy is None else torch.distributed.get_rank()
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    try:
        model = Predicting(d_in=64, d_hidden=64, num_layers=12)
        data = loaders(model, sizes, world_size, rank)
        if uneven:
            data = [DataLoader(loader.dataset, batch_size=4 - rank) for loader in data]
    finally:
        torch.set_default_dtype(torch.float32)
    parallel: dict[str, Any] = {"devices": 1}
    if strategy is not None:
        options = {
            "cluster": "pcie_8gpu",
            "plan_dir": f"{root}/plans",
            "verbose": False,
            **strategy,
        }
        parallel = {"devices": world_size, "strategy": AlpaStrategy(**options)}
    seen: list[int] = []
    trainer = pl.Trainer(
        accelerator="cpu",
        precision="64-true",
        callbacks=[Sizes(seen)],
        default_root_dir=root,
        **QUIET,
        **parallel,
    )
    validated = trainer.validate(model, data, verbose=False)
    tested = trainer.test(model, data, verbose=False)
    return {
        "metrics": [validated, tested],
        "seen": seen,
        "predictions": trainer.predict(model, data),
    }


class Sizes(pl.Callback):
    """Notes how many elements of the parameters this rank keeps; the module can be called between
    the steps.
    """

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        assert sum(p.numel() for p in pl_module.parameters()) == NUM_ELEMENTS
        assert pl_module.net(torch.zeros(1, 64, dtype=torch.float64)).isfinite().all()
        run = getattr(trainer.strategy, "run", None)
        with nullcontext() if run is None else run.full_parameters.suspended():
            self.seen.append(sum(p.data.numel() for p in self.parameters))

    def on_test_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.parameters = list(pl_module.parameters())


@pytest.mark.parametrize("memory_limit", [330_000, float("inf")], ids=["too_big", "fits"])
def test_evaluation_of_a_model_that_was_never_trained(
    pool, tmp_path: Path, memory_limit: float
) -> None:
    """The weights are 368 kB: with a limit of 330 kB they must be in shards."""
    sizes = [ROWS, ROWS + 4]
    reference = evaluate_without_fit(str(tmp_path), None, sizes)
    runs = pool.run(2, evaluate_without_fit, str(tmp_path), {"memory_limit": memory_limit}, sizes)
    assert set(reference["seen"]) == {NUM_ELEMENTS}
    for run in runs:
        assert all((size == NUM_ELEMENTS) == (memory_limit > 330_000) for size in run["seen"])
        assert [step["loader"] for loader in run["predictions"] for step in loader] == [0, 1, 1]
    name = "test_loss/dataloader_idx_1"
    assert runs[0]["metrics"][1][1][name] == pytest.approx(
        reference["metrics"][1][1][name], rel=TOLERANCE
    )
    for number, loader in enumerate(reference["predictions"]):
        for step, expected in enumerate(loader):
            own = [run["predictions"][number][step] for run in runs]
            same = {"rtol": TOLERANCE, "atol": TOLERANCE}
            torch.testing.assert_close(torch.cat([o["row"] for o in own]), expected["row"], **same)
            torch.testing.assert_close(
                torch.cat([o["pair"][0] for o in own], dim=1), expected["pair"][0], **same
            )
            torch.testing.assert_close(
                torch.cat([o["pair"][1][0] for o in own]), expected["pair"][1][0], **same
            )


def test_ranks_whose_batches_differ(pool, tmp_path: Path) -> None:
    """On a model that was never trained and does not fit: what each rank gets is what it would get
    alone.
    """
    sizes = [13, 6]
    expected = pool.run(
        2, evaluate_without_fit, str(tmp_path), {"memory_limit": float("inf")}, sizes, True
    )
    per_rank = pool.run(
        2, evaluate_without_fit, str(tmp_path), {"memory_limit": 330_000}, sizes, True
    )
    for run, other in zip(per_rank, expected, strict=True):
        assert all(size < NUM_ELEMENTS for size in run["seen"])
        for number, metrics in enumerate(run["metrics"][1]):  # the others are not synchronised
            name = f"test_loss/dataloader_idx_{number}"
            assert metrics[name] == pytest.approx(other["metrics"][1][number][name], rel=TOLERANCE)
        rows = [
            [step["row"] for loader in one["predictions"] for step in loader]
            for one in (run, other)
        ]
        torch.testing.assert_close(*rows, rtol=TOLERANCE, atol=TOLERANCE)
