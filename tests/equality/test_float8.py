"""torchao's float8 linears, emulated on CPUs: divided as linears are, with DDP's results, priced as
they run.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import lightning
import pytest
import torch
from equality.harness import record_model
from torch import Tensor, nn

from alpa_strategy import ClusterSpec, PlanOptions, make_plan

pytest.importorskip("torchao.float8", reason="an extra of its own: [float8]")
STEPS = 3


class Float8MLP(lightning.LightningModule):
    """Two float8 linears between two of full precision, as torchao's own recipes have it."""

    def __init__(self, recipe: str | None, emulate: bool = True, width: int = 32) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 1)
        if recipe is not None:
            config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
            convert_to_float8_training(self.inner, config=config)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (self.last(self.inner(self.first(x))) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def example_batch(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        width = self.first.in_features
        return torch.randn(rows, width, generator=generator), torch.randn(
            rows, 1, generator=generator
        )


def train(
    recipe: str | None, strategy: dict[str, Any] | None, ranks: int, root: str
) -> dict[str, Any]:
    return record_model(
        Float8MLP, {"recipe": recipe}, strategy, STEPS, ranks, None, 1, root, "32-true"
    )


def runs(pool: Any, root: Any, recipe: str, **options: Any) -> list[dict[str, Any]]:
    strategy = {"cluster": "pcie_8gpu", "plan_dir": str(root / "plans"), **options}
    return pool.run(2, train, recipe, strategy, 2, str(root))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_captured_data_parallel_is_what_ddp_computes(pool, tmp_path, recipe):
    """Scales are those of a rank's samples in both: losses and weights agree to float32's
    rounding.
    """
    captured = runs(pool, tmp_path, recipe, parallel="data", capture="require")
    written = runs(pool, tmp_path, recipe, parallel="data", capture="never")
    for step in range(STEPS):
        # a captured step's loss is that of the global batch, an eager one's that of the rank
        mean = sum(run["losses"][step] for run in written) / 2
        assert captured[0]["losses"][step] == pytest.approx(mean, rel=1e-5)
    for name, weight in captured[0]["state"].items():
        torch.testing.assert_close(weight, written[0]["state"][name], rtol=1e-4, atol=1e-6)
        assert torch.equal(weight, captured[1]["state"][name])


def test_tensor_parallel_products_differ_from_one_device_by_float8_rounding(pool, tmp_path):
    """One by columns and one by rows, as plain linears are; parts are scaled by themselves.

    Scales of rows are powers of two, so that parts may be rounded as one device rounds the whole.
    """
    full_precision = pool.run(1, train, None, None, 2, str(tmp_path), init_group=False)[0]
    one = pool.run(1, train, "rowwise", None, 2, str(tmp_path), init_group=False)[0]
    for run in runs(pool, tmp_path, "rowwise", parallel="tensor", batch_scope="global"):
        assert {run["modes"]["inner.0.weight"], run["modes"]["inner.2.weight"]} == {"S0", "S1"}
        assert run["losses"] == pytest.approx(one["losses"], rel=2e-2)
        assert run["losses"] != pytest.approx(full_precision["losses"], rel=1e-5)


def test_compiled_float8_products_are_priced_below_those_of_bf16():
    """And eager ones above: scales and casts are kernels of their own then."""

    def seconds(recipe: str | None, compile: bool) -> float:
        with torch.device("meta"):
            module = Float8MLP(recipe, emulate=False, width=4096).bfloat16()
            batch = (
                torch.zeros(8192, 4096, dtype=torch.bfloat16),
                torch.zeros(8192, 1, dtype=torch.bfloat16),
            )
        one_gpu = ClusterSpec.load("dgx_h100", {"num_nodes": 1, "devices_per_node": 1})
        plan = make_plan(
            module, batch, one_gpu, PlanOptions.from_user(batch_scope="global", compile=compile)
        )
        return plan.predicted.compute_seconds

    assert seconds("tensorwise", True) < 0.85 * seconds(None, True)
    assert seconds("tensorwise", False) > seconds(None, False)


def train_compiled(*args: Any) -> tuple[dict[str, Any], list[str]]:
    """`train`, and what it warned of compiling."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train(*args)
    return run, [
        str(warning.message)
        for warning in caught
        if str(warning.message).startswith("alpa: compile")
    ]


# Inductor writes and compiles C++.
@pytest.mark.parametrize(
    "compile", [{"backend": "aot_eager"}, pytest.param(True, marks=pytest.mark.slow)], ids=str
)
def test_float8_products_are_compiled(pool, tmp_path, compile):
    """With the ops around them, forward and backward: their casts are to fuse."""
    options = {"cluster": "pcie_8gpu", "plan_dir": str(tmp_path / "plans"), "parallel": "data"}
    plain = pool.run(2, train, "tensorwise", options, 2, str(tmp_path))
    compiled = pool.run(
        2, train_compiled, "tensorwise", {**options, "compile": compile}, 2, str(tmp_path)
    )
    for (run, said), own in zip(compiled, plain, strict=True):
        assert said == []
        assert run["losses"] == pytest.approx(own["losses"], rel=1e-2)
