"""The tiny recipes train for real, and the routing of the mixture of experts computes what it
says.
"""

from pathlib import Path

import pytest
import torch
from recipe_models import MoE
from torch.nn import functional as F

from alpa_strategy.recipe import build_data, build_model, build_trainer, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


def train(recipe: str, overrides: list[str], plan_dir: str) -> list[float]:
    """Losses of a training of a recipe under the strategy, on as many ranks as call this."""
    from lightning import Callback

    class Losses(Callback):
        def __init__(self) -> None:
            self.values: list[float] = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            self.values.append(float(outputs["loss"]))

    quiet = [
        "trainer.enable_progress_bar=false",
        "trainer.enable_model_summary=false",
        "strategy.verbose=false",
    ]
    options = [f"strategy.plan_dir={plan_dir}", "strategy.cluster=localhost"]
    loaded = load_recipe(RECIPES / f"{recipe}.yaml", [*overrides, *quiet, *options])
    torch.manual_seed(0)
    model = build_model(loaded)
    trainer = build_trainer(loaded)
    losses = Losses()
    trainer.callbacks.append(losses)
    trainer.fit(model, datamodule=build_data(loaded))
    return losses.values


SHORT = ["model.num_layers=2", "trainer.max_steps=25", "data.batch_size=4"]
CASES = [("moe_tiny", 2, SHORT, 1.5)]
# equality/test_recipe_ranks.py and test_recipe_models.py compare steps of the others by default.
LONG = [
    ("vit_tiny", 2, ["trainer.max_steps=40"], 0.3),
    ("wide_resnet_tiny", 2, ["trainer.max_steps=40"], 1.2),
    ("deepseek_tiny", 2, SHORT, 1.5),
    ("ddpm_tiny", 2, ["trainer.max_steps=15"], 0.3),
    ("moe_tiny", 4, [], 2.5),
    ("moe_tiny", 2, [*SHORT, "model.capacity_factor=null"], 1.5),
    ("wide_resnet_tiny", 4, [], 1.8),
    ("gpt_tiny", 4, [], 2.5),
    ("llama_tiny", 2, [*SHORT, "model.num_layers=1"], 2.0),
    ("mixtral_tiny", 2, [*SHORT, "model.num_layers=1"], 1.5),
    ("lora_tiny", 2, ["trainer.max_steps=20", "data.batch_size=4", "model.base.num_layers=1"], 1.0),
    ("clip_tiny", 2, ["trainer.max_steps=30"], 0.4),
]


@pytest.mark.parametrize(
    ("recipe", "world_size", "overrides", "fall"),
    [pytest.param(*c, marks=pytest.mark.slow) for c in (*CASES, *LONG)],
)
def test_loss_falls(pool, tmp_path, recipe, world_size, overrides, fall):
    pytest.importorskip("sklearn")
    overrides = [f"trainer.devices={world_size}", *overrides]
    # Each rank has the losses of its own batches.
    of_ranks = pool.run(world_size, train, recipe, overrides, str(tmp_path))
    losses = [sum(of_step) / world_size for of_step in zip(*of_ranks, strict=True)]
    first, last = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
    assert last < first - fall


@pytest.mark.parametrize("skew", [0.0, 3.0])
@pytest.mark.parametrize("capacity_factor", [None, 4.0])
def test_experts_are_the_weighted_sum_of_each_tokens_two_best(capacity_factor, skew):
    """Dropless, or with room for everybody, whatever the load."""
    torch.manual_seed(0)
    model = MoE(
        1,
        16,
        2,
        4,
        8,
        16,
        group_size=32,
        capacity_factor=capacity_factor,
        block_size=8,
        init_std=0.3,
    ).double()
    experts = model.blocks[0].mlp
    x = torch.randn(4, 16, 16, dtype=torch.float64)
    x[..., 0] += skew
    weights, chosen = experts.gate(x).softmax(-1).topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.zeros_like(x)
    for index in range(4):
        y = F.gelu(x @ experts.fc[index], approximate="tanh") @ experts.proj[index]
        expected += y * ((chosen == index) * weights).sum(-1, keepdim=True)
    torch.testing.assert_close(experts(x)[0], expected)


def test_a_full_expert_leaves_later_and_second_choices_out():
    """Every token wants expert 0 first and expert 1 second; there is room for a quarter of the
    tokens in each.
    """
    torch.manual_seed(0)
    model = MoE(1, 16, 2, 8, 8, 16, group_size=16, capacity_factor=1.0, init_std=0.3).double()
    experts = model.blocks[0].mlp
    with torch.no_grad():
        experts.gate.weight.zero_()
        experts.gate.weight[0, 0], experts.gate.weight[1, 0] = 2.0, 1.0
    x = torch.randn(1, 16, 16, dtype=torch.float64)
    x[..., 0] = 1.0
    y, balance = experts(x)
    used = y[0].abs().sum(-1) > 0
    assert used.tolist() == [True] * 4 + [False] * 12  # capacity: 2 x 16 / 8 = 4
    gates = experts.gate(x).softmax(-1)[0, 0]
    assert balance.item() == pytest.approx(8 * gates[0].item())  # all load on expert 0
