"""DPO and GRPO train for real on two ranks, and compute what one process computes on all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from quiet import QUIET

from alpa_strategy.lightning.eager_run import EagerRun
from alpa_strategy.recipe import build_data, build_model, build_trainer, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
RANKS = 2


class Watch(lightning.Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.is_written = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.metrics.append(
            {name: float(value) for name, value in trainer.callback_metrics.items()}
        )
        self.is_written = isinstance(getattr(trainer.strategy, "run", None), EagerRun)


def train(name: str, ranks: int, folder: str, overrides: list[str]) -> dict[str, Any]:
    """A recipe's metrics at each step and its last weights: under the strategy, or plain where
    `ranks` is 1.
    """
    quiet = [f"trainer.{key}={str(value).lower()}" for key, value in QUIET.items()]
    ways = (
        ["trainer.strategy=auto"]
        if ranks == 1
        else ["strategy.verbose=false", "strategy.cluster=localhost"]
    )
    where = [f"trainer.devices={ranks}", f"trainer.default_root_dir={folder}"]
    recipe = load_recipe(RECIPES / f"{name}.yaml", [*overrides, *quiet, *ways, *where])
    torch.manual_seed(0)
    module = build_model(recipe)
    trainer = build_trainer(recipe)
    watch = Watch()
    trainer.callbacks.append(watch)
    trainer.fit(module, datamodule=build_data(recipe))
    weights = {key: value.detach().clone() for key, value in module.state_dict().items()}
    return {"metrics": watch.metrics, "weights": weights, "is_written": watch.is_written}


SHORT = {
    "dpo_tiny": ["trainer.max_steps=6", "trainer.precision=64-true", "model.policy.num_layers=1"],
    "grpo_tiny": ["trainer.max_steps=8", "trainer.precision=64-true", "model.policy.num_layers=1"],
}


@pytest.mark.parametrize("name", SHORT)
def test_two_ranks_compute_what_one_process_does(pool, tmp_path, name: str) -> None:
    all_rows = [
        *SHORT[name],
        "data.num_samples=8",
    ]  # an epoch is a batch: samplers may share rows out as they like
    plain = pool.run(1, train, name, 1, str(tmp_path), [*all_rows, "data.batch_size=8"])[0]
    per_rank = pool.run(RANKS, train, name, RANKS, str(tmp_path), [*all_rows, "data.batch_size=4"])
    for rank in per_rank:
        assert rank["is_written"] == (
            name == "grpo_tiny"
        )  # it generates, and updates twice a batch
        for expected, metrics in zip(plain["metrics"], rank["metrics"], strict=True):
            assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-9)
        for key, value in plain["weights"].items():
            torch.testing.assert_close(rank["weights"][key], value, rtol=1e-8, atol=1e-9)
            assert torch.equal(rank["weights"][key], per_rank[0]["weights"][key])


@pytest.mark.parametrize(
    ("name", "metric", "least"),
    [
        # By default two ranks compute what one process does, above.
        pytest.param("grpo_tiny", "reward", 0.75, marks=pytest.mark.slow),
        pytest.param("dpo_tiny", "accuracy", 0.9, marks=pytest.mark.slow),
    ],
)
def test_what_is_preferred_becomes_likelier(
    pool, tmp_path, name: str, metric: str, least: float
) -> None:
    steps = {"dpo_tiny": 40, "grpo_tiny": 80}[name]
    metrics = pool.run(RANKS, train, name, RANKS, str(tmp_path), [f"trainer.max_steps={steps}"])[0][
        "metrics"
    ]
    assert metrics[0][metric] < 0.55
    assert sum(each[metric] for each in metrics[-5:]) / 5 > least
