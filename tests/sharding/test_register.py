"""A rule from outside: registered for a custom op it decides how the op is planned, and the run
equals one process.

Imports only public names of the package.
"""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import (
    AlpaError,
    AlpaStrategy,
    ClusterSpec,
    PlanOptions,
    make_plan,
    prove_sharding,
    register_sharding,
)

ROWS, WIDTH = 8, 16


@torch.library.custom_op("alpa_outside::scaled_linear", mutates_args=())
def scaled_linear(x: Tensor, weight: Tensor, shift: Tensor | None, scale: float) -> Tensor:
    y = scale * (x @ weight.t())
    return y if shift is None else y + shift


@scaled_linear.register_fake
def _(x, weight, shift, scale):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save(ctx, inputs, output):
    x, weight, shift, ctx.scale = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_shift = shift is not None


def _backward(ctx, grad):
    x, weight = ctx.saved_tensors
    rows = grad.flatten(0, -2)
    shift = rows.sum(0) if ctx.has_shift else None
    return ctx.scale * (grad @ weight), ctx.scale * (rows.t() @ x.flatten(0, -2)), shift, None


scaled_linear.register_autograd(_backward, setup_context=_save)

RULE = "[*b, k], [n, k], +[n]? -> [*b, n]"


@torch.library.custom_op("alpa_outside::backwards", mutates_args=())
def backwards(x: Tensor) -> Tensor:
    return x.flip(0)


@torch.library.custom_op("alpa_outside::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@noise.register_fake
def _(x):
    return torch.empty_like(x)


class Outside(pl.LightningModule):
    """Two of the custom op, with a pointwise op between them."""

    def __init__(self, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype) / 4)

        self.up, self.up_shift = parameter(2 * width, width), parameter(2 * width)
        self.down, self.down_shift = parameter(width, 2 * width), parameter(width)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        hidden = scaled_linear(x, self.up, self.up_shift, 0.5).tanh()
        return nn.functional.mse_loss(
            scaled_linear(hidden, self.down, self.down_shift, 2.0), x.sin()
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy: AlpaStrategy | None, world_size: int) -> dict[str, Tensor]:
    """Parameters after four steps on the same batches, whoever runs them."""
    register_sharding(
        "alpa_outside::scaled_linear", RULE
    )  # a worker has only just imported this file
    module = Outside()
    x = torch.randn(
        4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    parallel = {} if strategy is None else {"strategy": strategy}
    trainer = pl.Trainer(accelerator="cpu", devices=world_size, max_epochs=1, **parallel, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(x), ROWS))
    if strategy is not None:
        ops = {
            name: texts
            for name, texts in trainer.strategy.plan.stages[0].strategies.items()
            if "scaled" in name
        }
        assert any(
            "@bias_on_first" in text for texts in ops.values() for text in map(str, texts)
        ), ops
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def train_in_shards(folder: str) -> dict[str, Tensor]:
    placements = {"up": "S0", "down": "S1"}
    options = {
        "plan_dir": folder,
        "verbose": False,
        "cluster": "pcie_8gpu",
        "batch_scope": "global",
    }
    return train(AlpaStrategy(placements=placements, **options), 2)


@pytest.fixture
def rule():
    """The rule, for one test."""
    register_sharding("alpa_outside::scaled_linear", RULE)


def plan_for_four(width: int = 2048, kind: type[Outside] = Outside, batch_scope: str = "rank"):
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 4})
    options = PlanOptions(num_stages=1, num_microbatches=1, batch_scope=batch_scope)
    return make_plan(kind(width, torch.float32), (torch.randn(4096, width),), cluster, options)


def ways(plan) -> set[str]:
    """How the custom op is divided."""
    return {
        str(way)
        for name, ways in plan.stages[0].strategies.items()
        if "scaled_linear" in name
        for way in ways
    }


def test_a_registered_rule_divides_the_op(rule):
    plan = plan_for_four()
    assert any("S" in way for way in ways(plan)), plan.stages[0].strategies
    assert not any("no rule for alpa_outside" in note for note in plan.notes)


class Noisy(Outside):
    def training_step(self, batch, batch_idx):
        return super().training_step([batch[0] + noise(batch[0])], batch_idx)


def test_the_plan_says_which_op_could_have_a_rule(rule):
    plan = plan_for_four(64, Noisy, "global")
    assert any('register_sharding("alpa_outside::noise", ...)' in note for note in plan.notes), (
        plan.notes
    )


def test_a_changed_rule_is_planned_again(rule):
    # Otherwise the op runs for each rank.
    before = plan_for_four(256, batch_scope="global").fingerprint
    assert plan_for_four(256, batch_scope="global").fingerprint == before
    register_sharding("alpa_outside::scaled_linear", "[*b!, k!], [n!, k!], [n!]? -> [*b!, n!]")
    after = plan_for_four(256, batch_scope="global")
    assert after.fingerprint != before
    assert not any("S" in way for way in ways(after))


def test_two_ranks_train_like_one_process(pool, tmp_path):
    alone = train(None, 1)
    for parameters in pool.run(2, train_in_shards, str(tmp_path), init_group=False):
        for name, expected in alone.items():
            torch.testing.assert_close(parameters[name], expected, rtol=1e-9, atol=1e-12)


def test_rules_are_proved_on_an_example(rule):
    def example():
        x, weight, shift = (
            torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((4, 5, 6), (7, 6), (7,))
        )
        return x, weight, shift, 0.5

    proved = prove_sharding("alpa_outside::scaled_linear", example())
    assert {"S0,R*,R*->S0", "R*,S0,S0->S2", "S2,S1,R*->P@bias_on_first"} <= set(proved)
    register_sharding(
        "alpa_outside::scaled_linear", "[*b, k], [n, k], [n]? -> [*b, n]"
    )  # the shift is added n times
    with pytest.raises(AlpaError, match="S2,S1,R\\*->P on 2 devices"):
        prove_sharding("alpa_outside::scaled_linear", example())
    register_sharding("alpa_outside::backwards", "[n] -> [n]")  # rows change places
    with pytest.raises(AlpaError, match="S0->S0"):
        prove_sharding("alpa_outside::backwards", (torch.randn(6),))


def test_lines_for_several_ranks_hold_together():
    register_sharding("alpa_outside::backwards", "[n!] -> [n!]", "[n!, k] -> [n!, k]")
    assert "S1->S1" in prove_sharding("alpa_outside::backwards", (torch.randn(6, 5),))
    with pytest.raises(AlpaError, match="forward and backward"):  # it has no backward
        prove_sharding("alpa_outside::backwards", (torch.randn(6, 5).requires_grad_(),))
    with pytest.raises(
        AlpaError, match=r"no sharding rule of alpa_outside::backwards fits its call on \[6, 5, 4\]"
    ):
        prove_sharding("alpa_outside::backwards", (torch.randn(6, 5, 4),))


@pytest.mark.parametrize(
    ("op", "rules", "problem"),
    [
        ("alpa_outside::unheard_of", ["[n] -> [n]"], "there is no op"),
        ("scaled_linear", ["[n] -> [n]"], "there is no op"),
        ("alpa_outside::backwards", [], "without a rule"),
        ("alpa_outside::backwards", ["[n]"], "no '->'"),
        ("alpa_outside::backwards", ["[n b] -> [n]"], "no index"),
        ("alpa_outside::backwards", ["[n], [n] -> [n]"], "takes 1 tensors, the rule has 2"),
        ("alpa_outside::backwards", ["[n] -> [n], [n]"], "returns 1 tensors, the rule has 2"),
        ("alpa_outside::backwards", ["[n] -> [n, k]"], "write k!"),
        ("alpa_outside::backwards", ["[n, n] -> [n]"], "n stands twice"),
        ("alpa_outside::backwards", ["[n@fraction] -> []"], "local implementations"),
        ("aten::add_.Tensor", ["[*b], [*b] -> [*b]"], "changes its arguments"),
    ],
)
def test_a_wrong_rule_is_refused_at_once(op, rules, problem):
    with pytest.raises(AlpaError, match=problem):
        register_sharding(op, *rules)
