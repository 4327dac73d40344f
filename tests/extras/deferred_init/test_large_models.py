"""Modules built without memory (configure_model, init_module, the meta device) train as those that
were built whole.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from covering import slow_but
from models import GPT
from quiet import QUIET
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from alpa_strategy import AlpaStrategy

ROWS = 8
SIZES = {"vocab_size": 128, "d_model": 64, "num_heads": 4, "num_layers": 2, "seq_len": 8}


class Configured(pl.LightningModule):
    """GPT that is built in configure_model and initialises itself twice, as many do; tied; a mask;
    an unused layer.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.kwargs, self.gpt = kwargs, None
        self.deferred, self.drawn = 0, 0.0

    def configure_model(self) -> None:
        if self.gpt is not None:
            return
        self.gpt = GPT(**self.kwargs)
        self.unused = nn.Linear(128, 128)
        self.register_buffer("mask", torch.tril(torch.ones(256, 256)))
        self.apply(self._init_weights)
        self.gpt.wpe.weight.data.mul_(0.5)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.05)

    def on_fit_start(self) -> None:
        self.deferred = sum(p.is_meta for p in self.parameters())
        self.drawn = float(torch.rand(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, targets = batch
        logits = self.gpt(tokens)
        loss = (
            nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            + 0 * self.mask.sum()
        )
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class BuiltAtOnce(Configured):
    """The same, built in __init__."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.configure_model()


def train(
    root: str,
    kind: type[Configured],
    strategy: dict[str, Any] | None,
    world_size: int = 1,
    seed: int = 3,
    **arguments: Any,
) -> dict[str, Any]:
    """Two steps in fp64; state, metrics, and how many parameters had no memory before the first
    batch.
    """
    data = TensorDataset(*GPT(**SIZES).example_batch(2 * ROWS, torch.Generator().manual_seed(3)))
    per_rank = ROWS // world_size
    if strategy is None:
        order = [
            s + r + world_size * i
            for s in (0, ROWS)
            for r in range(world_size)
            for i in range(per_rank)
        ]
        loader = DataLoader(data, batch_size=ROWS, sampler=order)
        parallel: dict[str, Any] = {"devices": 1}
    else:
        strategy = {
            "cluster": "pcie_8gpu",
            "plan_dir": f"{root}/plans",
            "verbose": False,
            **strategy,
        }
        parallel = {"devices": world_size, "strategy": AlpaStrategy(**strategy)}
        sampler = DistributedSampler(data, world_size, int(os.environ["RANK"]), shuffle=False)
        loader = DataLoader(data, batch_size=per_rank, sampler=sampler)
    trainer = pl.Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=1,
        default_root_dir=root,
        **QUIET,
        **parallel,
        **{k: v for k, v in arguments.items() if k not in ("ckpt_path", "save", "init_module")},
    )
    torch.manual_seed(seed)
    if arguments.get("init_module"):
        with trainer.init_module():
            model = kind(**SIZES)
    else:
        model = kind(**SIZES)
    trainer.fit(model, loader, ckpt_path=arguments.get("ckpt_path"), weights_only=False)
    if arguments.get("save"):
        trainer.save_checkpoint(arguments["save"])
    return {
        "state": {k: v.detach().clone() for k, v in model.state_dict().items()},
        "loss": float(trainer.callback_metrics["train_loss"]),
        "deferred": model.deferred,
        "drawn": model.drawn,
        "optimizer": trainer.optimizers[0].state_dict()["state"],
    }


# The process group is left to the Trainer: modules are built before it is there.
def run_train(
    root: str, kind: str, strategy: dict[str, Any], world_size: int, arguments: dict[str, Any]
) -> Any:
    seed = 3 + (int(os.environ["RANK"]) if arguments.pop("own_seeds", False) else 0)
    return train(root, globals()[kind], strategy, world_size, seed, **arguments)


def assert_same(run: dict[str, Any], reference: dict[str, Any]) -> None:
    assert run["state"].keys() == reference["state"].keys()
    for name, expected in reference["state"].items():
        torch.testing.assert_close(run["state"][name], expected, rtol=1e-9, atol=1e-9)
    assert run["loss"] == pytest.approx(reference["loss"], rel=1e-9)
    for number, state in reference["optimizer"].items():
        torch.testing.assert_close(run["optimizer"][number], state, rtol=1e-9, atol=1e-9)


PIPELINE = {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"}
STRATEGIES = [{"parallel": "zero3"}, {"parallel": "tensor"}, {"parallel": "data"}, PIPELINE]


@pytest.mark.parametrize(
    "strategy",
    slow_but(STRATEGIES, (STRATEGIES[0], PIPELINE)),
    ids=lambda s: s.get("parallel", "pipeline"),
)
def test_configure_model(pool, tmp_path: Path, strategy: dict) -> None:
    reference = train(str(tmp_path), Configured, None, 2)
    for run in pool.run(
        2, run_train, str(tmp_path), "Configured", strategy, 2, {}, init_group=False
    ):
        assert_same(run, reference)
        assert run["deferred"] >= 8
        assert run["drawn"] == reference["drawn"]


def test_init_module_and_ranks_without_a_common_seed(pool, tmp_path: Path) -> None:
    """What rank 0 would have drawn is what all train with."""
    reference = train(str(tmp_path), BuiltAtOnce, None, 2, init_module=True)
    arguments = {"init_module": True, "own_seeds": True}
    for run in pool.run(
        2,
        run_train,
        str(tmp_path),
        "BuiltAtOnce",
        {"parallel": "zero3"},
        2,
        arguments,
        init_group=False,
    ):
        assert_same(run, reference)
        assert run["deferred"] >= 8
