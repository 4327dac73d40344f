"""Attributes that the step reads may change during training: the step is captured again, the numbers stay eager's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import MLP
from test_training import assert_same, train
from torch import Tensor

from alpa_strategy.errors import RuntimeMismatchError


class Annealed(MLP):
    """Its loss has a factor that a hook changes, a mask that is changed in place, and a layer that is frozen late."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.beta, self.mask = 0.5, torch.ones(4, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.beta * ((self.net(x) - y) * self.mask).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.beta = (0.5, 0.5, 0.8, 0.5)[batch_idx]
        if batch_idx == 3:
            self.mask[0] = 0.0


class AnnealedOnOneRank(Annealed):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if torch.distributed.get_rank() == 1 and batch_idx == 2:
            self.beta = 1.0


KINDS = {"Annealed": Annealed, "AnnealedOnOneRank": AnnealedOnOneRank}


def run_train(kind: str, root: str, strategy: dict[str, Any]) -> dict[str, Any]:
    return train(KINDS[kind], root, strategy)


@pytest.mark.parametrize("parallel", ["data", "zero3"])
def test_numbers_and_masks_that_change(pool, tmp_path: Path, parallel: str) -> None:
    reference = train(Annealed, str(tmp_path), None)
    for run in pool.run(2, run_train, "Annealed", str(tmp_path), {"parallel": parallel}):
        assert_same(run, reference)


def outcome(root: str) -> str:
    import alpa_strategy.lightning.run as run

    run.MEET_SECONDS = 1.0
    with pytest.raises(RuntimeMismatchError) as caught:
        train(AnnealedOnOneRank, root, {"parallel": "data"})
    return caught.value.problem
