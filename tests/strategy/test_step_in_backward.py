"""Where nothing else fits, parameters are updated within the backward: the same training with less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from models import GPT
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from worker_pool import WorkerError

from alpa_strategy import AlpaStrategy, ClusterSpec, PlanOptions, make_plan
from alpa_strategy.cli import main
from alpa_strategy.errors import DoesNotFitError

ROWS = 4
SIZES = {"vocab_size": 64, "d_model": 64, "num_heads": 4, "num_layers": 4, "seq_len": 4}


class Tied(pl.LightningModule):
    """GPT with weight decay for matrices only, a schedule per step, and a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(**SIZES)
        self.unused = torch.nn.Linear(4, 4)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, targets = batch
        loss = torch.nn.functional.cross_entropy(self.gpt(tokens).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Detached(Tied):
    """An op's backward needs a weight's value and gives it no gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, _targets = batch
        hidden = self.gpt.wte(tokens) @ self.gpt.blocks[0].proj.weight.detach().T
        return super().training_step(batch, batch_idx) + hidden.square().mean()


class Looking(pl.Callback):
    """A user's callback that wants every gradient."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert all(p.grad is not None for p in pl_module.gpt.parameters())


class Losses(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *unused: Any) -> None:
        pl_module.losses.append(float(trainer.callback_metrics["train_loss"]))


def train(
    root: str, kind: str, strategy: dict[str, Any] | None, world_size: int, looks: bool = False, **arguments: Any
) -> dict[str, Any]:
    data = TensorDataset(*GPT(**SIZES).example_batch(4 * ROWS, torch.Generator().manual_seed(3)))
    if strategy is None:
        parts = [s + r + world_size * i for s in range(0, 4 * ROWS, ROWS) for r in range(world_size)
                 for i in range(ROWS // world_size)]  # fmt: skip
        loader: Any = DataLoader(data, batch_size=ROWS, sampler=parts)
        parallel: dict[str, Any] = {"devices": 1}
    else:
        given = AlpaStrategy(cluster="pcie_8gpu", plan_dir=f"{root}/plans", verbose=False, **strategy)
        parallel = {"devices": world_size, "strategy": given}
        sampler = DistributedSampler(data, shuffle=False)
        loader = DataLoader(data, batch_size=ROWS // world_size, sampler=sampler)
    trainer = pl.Trainer(
        accelerator="cpu", precision="64-true", logger=False, enable_checkpointing=False, max_epochs=1,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=root,
        callbacks=[Losses(), *([Looking()] if looks else [])], **parallel, **arguments,
    )  # fmt: skip
    torch.manual_seed(3)
    model = globals()[kind]()
    trainer.fit(model, loader)
    plan = None if strategy is None else trainer.strategy.plan
    return {
        "losses": model.losses,
        "state": {k: v.detach().clone() for k, v in model.state_dict().items()},
        "optimizer": trainer.optimizers[0].state_dict()["state"],
        "in_backward": plan is not None and plan.stages[0].steps_in_backward,
        "notes": () if plan is None else plan.notes,
    }


def state_bytes() -> int:
    """Parameters and Adam's moments in float64, whole."""
    return sum(p.numel() for p in Tied().gpt.parameters()) * 8 * 3


LIMIT = state_bytes() / 2 * 1.42  # with gradients and what an op needs, 1.46


def assert_same(run: dict[str, Any], reference: dict[str, Any]) -> None:
    assert run["losses"] == pytest.approx(reference["losses"], rel=1e-9)
    for name, expected in reference["state"].items():
        torch.testing.assert_close(run["state"][name], expected, rtol=1e-9, atol=1e-9)
    for number, state in reference["optimizer"].items():
        torch.testing.assert_close(run["optimizer"][number], state, rtol=1e-9, atol=1e-9)


def test_it_is_the_same_training(pool, tmp_path: Path) -> None:
    reference = train(str(tmp_path), "Tied", None, 2)
    for run in pool.run(2, train, str(tmp_path), "Tied", {"memory_limit": LIMIT}, 2):
        assert run["in_backward"]
        assert any("within the backward" in note for note in run["notes"])
        assert_same(run, reference)
    roomy = pool.run(2, train, str(tmp_path), "Tied", {"memory_limit": 10 * LIMIT}, 2)[0]
    assert not roomy["in_backward"]


@pytest.mark.parametrize(
    ("kind", "arguments", "reason"),
    [
        ("Tied", {"gradient_clip_val": 0.1}, "gradients are clipped"),
        ("Tied", {"accumulate_grad_batches": 2}, "accumulated over several batches"),
        ("Tied", {"looks": True}, "Looking.on_before_optimizer_step may look at gradients"),
        ("Detached", {}, "detach"),
    ],
    ids=["clipping", "accumulation", "callback", "detached weight"],
)
def test_it_is_not_done_where_somebody_could_tell(
    pool, tmp_path: Path, kind: str, arguments: dict, reason: str
) -> None:
    with pytest.raises(WorkerError, match=f"(?s)no plan fits.*{reason}"):
        pool.run(2, train_with, str(tmp_path), kind, {"memory_limit": LIMIT}, 2, arguments)


def train_with(root: str, kind: str, strategy: dict[str, Any], world_size: int, arguments: dict[str, Any]) -> Any:
    return train(root, kind, strategy, world_size, **arguments)


class Hooked(GPT):
    """Its own hook wants every gradient."""

    def on_after_backward(self) -> None:
        assert all(p.grad is not None for p in self.parameters())


def planned(kind: type[GPT] = GPT, **options: Any) -> Any:
    """What is planned without a Trainer for the same limit as above."""
    module = kind(**SIZES).double()
    cluster = ClusterSpec.load("pcie_8gpu").with_nodes(1, 2)
    return make_plan(module, module.example_batch(ROWS // 2), cluster, PlanOptions(memory_limit=LIMIT, **options))


def test_it_is_planned_without_a_trainer_too() -> None:
    plan = planned()
    assert plan.stages[0].steps_in_backward
    assert plan.predicted.peak_bytes <= LIMIT


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (GPT, {"accumulate_grad_batches": 2}, "accumulated over several batches"),
        (GPT, {"num_stages": 2, "num_microbatches": 2, "remat": False}, "pipeline"),
        (Hooked, {}, "Hooked.on_after_backward may look at gradients"),
    ],
    ids=["accumulation", "pipeline", "hook"],
)
def test_the_error_says_what_stands_against_it(kind: type[GPT], options: dict[str, Any], reason: str) -> None:
    with pytest.raises(DoesNotFitError, match=reason):
        planned(kind, **options)


def test_a_recipes_trainer_decides_what_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`alpa plan` looks at the same settings of the Trainer as the training does."""
    monkeypatch.chdir(tmp_path)
    recipe = Path(__file__).parents[2] / "recipes" / "gpt_tiny.yaml"
    command = ["plan", str(recipe), "--cluster", "pcie_8gpu", "cluster.num_nodes=1", "cluster.devices_per_node=2"]
    command += ["data.batch_size=1", "model.sequence_length=16", "data.sequence_length=16"]
    limit = 7.0e6
    assert main([*command, f"plan.memory_limit={limit}"]) == 0
    assert "within the backward" in capsys.readouterr().out
    assert main([*command, f"plan.memory_limit={limit}", "trainer.gradient_clip_val=1.0"]) == 2
    assert "gradients are clipped" in capsys.readouterr().err
