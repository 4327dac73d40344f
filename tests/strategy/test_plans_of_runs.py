"""Plans of running jobs: found again, made anew, given by file; errors reach every rank as one
message.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from models import MLP
from quiet import QUIET
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy
from alpa_strategy.errors import AlpaError
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import details_of_file
from alpa_strategy.page.page import models_of, page_path


class Branching(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        return loss if loss > 1 else 2 * loss


class NormScaled(torch.optim.Optimizer):
    """Needs all parameters together: the step is scaled by their norm."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            norm = torch.nn.utils.get_total_norm(group["params"])
            for p in group["params"]:
                p -= group["lr"] * norm * p.grad
        return loss


class WithNormScaled(MLP):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return NormScaled(self.parameters())


def run(
    kind: str,
    root: str,
    strategy: dict[str, Any],
    rows: tuple[int, ...] = (8, 8),
    hidden: int = 16,
    same: bool = False,
) -> str:
    """Two steps; the error that this rank ended with, or "trained". rows: this rank's per batch;
    same: on all ranks.
    """
    model = globals()[kind](d_hidden=hidden)
    rank = torch.distributed.get_rank()
    data = TensorDataset(
        *model.example_batch(2 * rows[rank], torch.Generator().manual_seed(0 if same else rank))
    )
    strategy = {"cluster": "pcie_8gpu", "plan_dir": f"{root}/plans", "verbose": False, **strategy}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AlpaStrategy(**strategy),
        max_epochs=1,
        use_distributed_sampler=False,
        **QUIET,
        default_root_dir=root,
    )
    try:
        trainer.fit(model, DataLoader(data, batch_size=rows[rank]))
    except AlpaError as error:
        return str(error)
    return "trained"


def plans(root: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in (root / "plans").glob("*.json")}


def test_a_plan_is_found_again_until_something_changes(pool, tmp_path: Path) -> None:
    root = str(tmp_path)
    assert pool.run(2, run, "MLP", root, {}) == ["trained"] * 2
    first = plans(tmp_path)
    assert len(first) == 1
    path = tmp_path / "plans" / next(iter(first))
    # Two steps are too few to be measured: the page has the plan alone.
    (model,) = models_of(page_path(path).read_text())
    assert not model["detailed"]
    assert details_of_file(path, Plan.load(path)) is None
    assert pool.run(2, run, "MLP", root, {}) == ["trained"] * 2
    assert plans(tmp_path) == first
    assert pool.run(2, run, "MLP", root, {"parallel": "zero3"}) == ["trained"] * 2
    assert len(plans(tmp_path)) == 2
    (name,) = first
    file = tmp_path / "plans" / name
    whole = file.read_text()
    file.write_text(whole[:200])
    assert pool.run(2, run, "MLP", root, {}) == ["trained"] * 2
    assert json.loads(file.read_text())["stages"] == json.loads(whole)["stages"]
    # The same file by hand, for another model: refused with the part that differs, on every rank.
    given = {"plan": str(file)}
    assert pool.run(2, run, "MLP", root, given) == ["trained"] * 2
    for message in pool.run(2, run, "MLP", root, given, (8, 8), 24):
        assert "parameters" in message
        assert "changed" in message


def test_errors_are_one_clear_message_on_every_rank(pool, tmp_path: Path) -> None:
    root = str(tmp_path)
    # without "require", both would run in eager steps
    captured = {"capture": "require"}
    for message in pool.run(2, run, "Branching", root, captured):
        assert "test_plans_of_runs.py" in message
        assert "What to do" in message
    for message in pool.run(2, run, "MLP", root, captured, (8, 6)):
        assert "rank 0" in message
        assert "rank 1" in message
    for message in pool.run(2, run, "WithNormScaled", root, {"placements": {"*weight": "S0"}}):
        assert "NormScaled" in message
    for message in pool.run(2, run, "MLP", root, {"logical_mesh": [3]}):
        assert "3" in message
    for message in pool.run(2, run, "MLP", root, {"batch_scope": "global"}):
        assert "which are to load the same rows" in message  # each rank drew its local samples
    for message in pool.run(2, run, "WithNormScaled", root, {"parallel": "zero3"}):
        assert "NormScaled updates parameters by other parameters' gradients" in message


def test_an_edited_plan_is_refused_and_a_stored_one_made_anew(pool, tmp_path: Path) -> None:
    """Without the check this edit trains: a partial output bias is taken for the sum."""
    root = str(tmp_path)
    assert pool.run(2, run, "MLP", root, {}) == ["trained"] * 2
    (path,) = (tmp_path / "plans").glob("*.json")
    data = json.loads(path.read_text())
    (stage,) = data["stages"]
    name = next(op for op in stage["strategies"] if op.startswith("linear"))
    stage["strategies"][name] = "S0,R,R->S0"  # the stars dropped
    path.write_text(json.dumps(data))
    (tmp_path / "mine.json").write_text(json.dumps(data))
    messages = pool.run(2, run, "MLP", root, {"plan": f"{root}/mine.json"})
    assert all(
        f"strategies[{name!r}]" in text and "is no way to compute" in text for text in messages
    ), messages
    assert pool.run(2, run, "MLP", root, {}) == ["trained"] * 2
    assert json.loads(path.read_text())["stages"][0]["strategies"][name] != "S0,R,R->S0"


def test_an_optimizer_that_needs_whole_parameters_gets_them(pool, tmp_path: Path) -> None:
    assert pool.run(2, run, "WithNormScaled", str(tmp_path), {}) == ["trained"] * 2


def test_measured_costs(pool, tmp_path: Path) -> None:
    assert pool.run(2, run, "MLP", str(tmp_path), {"cluster": None}) == ["trained"] * 2
    assert len(list((tmp_path / ".alpa" / "costs").glob("*.json"))) == 2
