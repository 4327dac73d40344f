"""Parameters that are prefetched, and gradients whose sums are overlapped with the backward, change
no bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from covering import slow_but
from models import MODELS
from quiet import QUIET
from torch import Tensor
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy, ClusterSpec
from alpa_strategy.comm.reshard import Sums

SIZES = {"vocab_size": 64, "d_model": 128, "num_layers": 2, "seq_len": 64}
ROWS = 16


def train(
    root: str, prefetched_bytes: int | None, precision: str
) -> tuple[dict[str, Tensor], int, int]:
    """Three steps in ZeRO-3: (final weights, sums that were overlapped with the backward, planned
    bytes ahead).

    prefetched_bytes: in the place of the planned, from the plan that `root` has.
    """
    begun, add = [], Sums.add

    def counted(sums: Sums, *arguments: Any) -> None:
        begun.append(None)
        add(sums, *arguments)

    # Where they were faster, both ranks would rather compute all.
    slow = ClusterSpec.load(
        "pcie_8gpu", {"device.peak_flops.bfloat16": 1e11, "device.peak_flops.float64": 1e11}
    )
    strategy = AlpaStrategy(cluster=slow, parallel="zero3", plan_dir=f"{root}/plans", verbose=False)
    if prefetched_bytes is not None:
        plan = json.loads(Path(f"{root}/{precision}.json").read_text())
        plan["stages"][0]["ahead_bytes"] = prefetched_bytes
        edited = Path(root) / f"{precision}_{prefetched_bytes}.json"
        edited.write_text(json.dumps(plan))
        strategy = AlpaStrategy(cluster=slow, parallel="zero3", plan=edited, verbose=False)
    torch.manual_seed(3)
    module = MODELS["gpt"](**SIZES)
    batch = module.example_batch(6 * ROWS)
    rows = []
    for i in range(6 * ROWS):
        rows.append([leaf[i] for leaf in batch])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision=precision,
        max_steps=3,
        default_root_dir=root,
        **QUIET,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sums, "add", counted)
        trainer.fit(module, DataLoader(rows, batch_size=ROWS))
    assert strategy.plan is not None
    if prefetched_bytes is None and trainer.global_rank == 0:
        strategy.plan.save(f"{root}/{precision}.json")
    with strategy.whole_parameters():
        weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return weights, len(begun), strategy.plan.stages[0].prefetched_bytes


@pytest.mark.parametrize("precision", slow_but(("64-true", "bf16-mixed"), ("bf16-mixed",)))
def test_nothing_but_time_depends_on_what_is_under_way(
    pool, tmp_path: Path, precision: str
) -> None:
    planned = pool.run(2, train, str(tmp_path), None, precision)
    assert planned[0][2] > 0
    assert planned[0][1] > 0
    for ahead in (0, 2**30):
        for (weights, begun, used), (others, _, _) in zip(
            pool.run(2, train, str(tmp_path), ahead, precision), planned, strict=True
        ):
            assert used == ahead
            assert (begun > 0) == (ahead > 0)
            assert all(torch.equal(weights[name], others[name]) for name in others)
