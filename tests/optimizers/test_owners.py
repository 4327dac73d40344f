"""Optimizers that need full tensors train under any plan as on one device: fp64, 5 steps, 1e-9."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from covering import in_tiers, slow_but
from equality.harness import assert_same, record_model
from optimizers.matrix_optimizers import OPTIMIZERS, PLANS, with_optimizer
from recipe_models import MODELS

PLANS_OF_FOUR = {
    "zero3 x tensor": {"parallel": ("zero3", "tensor"), "logical_mesh": (2, 2)},
    "stages of zero2": {"num_stages": 2, "num_microbatches": 2, "parallel": "zero2"},
}


def train(
    model: str, optimizer: str, strategy: dict[str, Any] | None, world_size: int
) -> dict[str, Any]:
    """`record_model` of a model with an optimizer."""
    model_class = with_optimizer(MODELS[model], optimizer)
    return record_model(model_class, {}, strategy, 5, world_size)


@pytest.fixture(scope="session")
def one_device(pool):
    """Runs of one device by (model, optimizer, number of ranks whose samples it has)."""
    results: dict[Any, Any] = {}

    def get(model: str, optimizer: str, world_size: int) -> Any:
        key = (model, optimizer, world_size)
        if key not in results:
            (results[key],) = pool.run(
                1, train, model, optimizer, None, world_size, init_group=False
            )
        return results[key]

    return get


EXPERTS = {"placements": {"blocks.*.mlp.fc": "S0", "blocks.*.mlp.proj": "S0"}}

MUON_MODELS = ("recipe_moe", "recipe_wide_resnet")


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        # Muon has a GPT under the others below.
        *slow_but(
            product(MUON_MODELS, PLANS),
            (("recipe_wide_resnet", "tensor"),),
        ),
        ("recipe_moe", "experts"),
        # GPT is on four ranks below.
        *slow_but(product(MUON_MODELS, PLANS_OF_FOUR), ()),
    ],
)
def test_muon_with_adam(pool, one_device, tmp_path, model: str, plan: str) -> None:
    """GPT is below. Experts are a batch of matrices."""
    options = {**PLANS, **PLANS_OF_FOUR, "experts": EXPERTS}[plan]
    # BatchNorm's statistics are those of a micro-batch.
    if model == "recipe_wide_resnet" and "num_microbatches" in options:
        options = {**options, "num_microbatches": 1}
    world_size = 4 if plan in PLANS_OF_FOUR else 2
    strategy = {**options, "cluster": "pcie_8gpu", "plan_dir": str(tmp_path)}
    for run in pool.run(world_size, train, model, "muon", strategy, world_size):
        assert_same(run, one_device(model, "muon", world_size))
        if plan == "experts":
            assert run["modes"]["blocks.0.mlp.fc"] == "S0"


class WithoutKeyBias(MODELS["gpt"]):  # type: ignore[misc]
    """GPT without the bias of a key, whose gradient is zero but for rounding: softmax does not
    change when all scores of a query do by the same number.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.blocks:
            block.qkv.bias = None


MODELS["gpt without the bias of a key"] = WithoutKeyBias


def model_for(optimizer: str) -> str:
    """Return the model on which plans and one device agree to 1e-9.

    Adafactor divides a gradient by its own size, so it makes steps of rounding errors where the
    gradient is zero, and scales all of a tensor's step by their norm (see the test below).
    """
    return "gpt without the bias of a key" if optimizer == "adafactor" else "gpt"


def train_in_pieces(pieces: int) -> dict[str, Any]:
    """`record_model` of GPT with Adafactor on one device, which accumulates gradients."""
    model_class = with_optimizer(MODELS["gpt"], "adafactor")
    return record_model(model_class, {}, None, 5, 1, num_microbatches=pieces)


def test_adafactor_amplifies_rounding_of_a_gradient_that_is_zero(pool) -> None:
    """One device and the same device in two micro-batches: no plan is the cause."""
    (at_once,) = pool.run(1, train_in_pieces, 1, init_group=False)
    (in_two,) = pool.run(1, train_in_pieces, 2, init_group=False)
    for name in ("blocks.0.qkv.bias", "blocks.1.qkv.bias"):
        _, key, _ = at_once["gradients"][0][name].chunk(3)
        assert key.abs().max() < 1e-15
        _, difference, _ = (at_once["state"][name] - in_two["state"][name]).chunk(3)
        assert difference.abs().max() > 1e-6
    others = [name for name in at_once["state"] if not name.endswith("qkv.bias")]
    largest = max((at_once["state"][n] - in_two["state"][n]).abs().max().item() for n in others)
    assert 1e-9 < largest < 1e-7


@pytest.mark.parametrize(("optimizer", "plan"), in_tiers(product(OPTIMIZERS, PLANS)))
def test_two_ranks(pool, one_device, tmp_path, optimizer: str, plan: str) -> None:
    strategy = {**PLANS[plan], "cluster": "pcie_8gpu", "plan_dir": str(tmp_path)}
    model = model_for(optimizer)
    for run in pool.run(2, train, model, optimizer, strategy, 2):
        assert_same(run, one_device(model, optimizer, 2))
        if plan in ("zero3", "tensor"):
            assert any(modes.startswith("S") for modes in run["modes"].values())


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    slow_but(product(("muon", "shampoo"), PLANS_OF_FOUR), (("muon", "zero3 x tensor"),)),
)
def test_four_ranks(pool, one_device, tmp_path, optimizer: str, plan: str) -> None:
    strategy = {**PLANS_OF_FOUR[plan], "cluster": "pcie_8gpu", "plan_dir": str(tmp_path)}
    for run in pool.run(4, train, "gpt", optimizer, strategy, 4):
        assert_same(run, one_device("gpt", optimizer, 4))
