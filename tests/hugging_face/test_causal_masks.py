"""Causal attention of transformers is captured without a mask, which fast kernels lack."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from alpa_strategy import capture_step

transformers = pytest.importorskip("transformers")


class Causal(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            n_embd=16, n_layer=1, n_head=2, vocab_size=31, bos_token_id=0, eos_token_id=0
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # Without a cache transformers asks whether the positions, which it makes, are packed.
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss


def test_positions_that_are_known_need_no_mask() -> None:
    step = capture_step(Causal(), torch.randint(0, 31, (2, 8)))
    attention = torch.ops.aten.scaled_dot_product_attention.default
    (call,) = [op.call for op in step.ops if op.call.target is attention]
    mask = call.args[3]
    assert mask is None
