"""The recipes' models, small, in the form that `equality.harness.record` trains (with an
`example_batch`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from models import MODELS
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "recipes"))

from moe import MoE
from wide_resnet import WideResNet


class SmallMoE(MoE):
    """Two blocks, four experts, a row is a group. `dropless`: the routing without capacity."""

    def __init__(
        self, dropless: bool = False, num_layers: int = 2, optimizer: str = "adamw", **rest: Any
    ) -> None:
        super().__init__(
            num_layers=num_layers,
            hidden=16,
            num_heads=2,
            num_experts=4,
            vocab_size=32,
            sequence_length=8,
            group_size=8,
            mlp_factor=2,
            capacity_factor=None if dropless else 1.25,
            balance_weight=0.1,
            block_size=4,
            init_std=0.2,
            lr=1e-2,
            **rest,
        )

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        window = torch.randint(32, (batch_size, 9), generator=generator)
        return window[:, :-1], window[:, 1:]


class SmallWideResNet(WideResNet):
    """Two blocks at two resolutions, images of 8 x 8."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(
            (1, 1), channels=4, width=2, num_classes=10, in_channels=1, small_images=True, lr=0.05
        )

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        images = torch.randn(batch_size, 1, 8, 8, generator=generator, dtype=self.head.weight.dtype)
        return images, torch.randint(10, (batch_size,), generator=generator)


MODELS |= {"recipe_moe": SmallMoE, "recipe_wide_resnet": SmallWideResNet}
