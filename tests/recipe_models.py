"""The recipes' models, small, in the form that `equality.harness.record` trains (with an
`example_batch`), and in the form of `equality.test_ranks` (with an `example` of one rank's batch).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from models import MODELS
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "recipes"))

from clip import CLIP
from deepseek import DeepSeek
from llama import Llama
from lora import LoRA
from mixtral import Mixtral
from moe import MoE
from unet import DDPM
from vit import ViT
from wide_resnet import WideResNet

RANK_SAMPLES = 4


def token_batch(num: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Rows of 8 tokens of 32, and the same shifted by one."""
    window = torch.randint(32, (num, 9), generator=generator)
    return window[:, :-1], window[:, 1:]


def random_images(
    num: int, size: int, generator: torch.Generator | None, channels: int = 1
) -> Tensor:
    return torch.randn(num, channels, size, size, generator=generator, dtype=torch.float64)


class OnTokens:
    """Examples of language models."""

    @staticmethod
    def example(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return token_batch(RANK_SAMPLES, generator)

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        return token_batch(batch_size, generator)


class OnImages:
    """Examples of models of images 8 x 8 with labels."""

    @staticmethod
    def example(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = random_images(RANK_SAMPLES, 8, generator)
        return images, torch.randint(10, (RANK_SAMPLES,), generator=generator)

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        images = random_images(batch_size, 8, generator)
        return images, torch.randint(10, (batch_size,), generator=generator)


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
        return token_batch(batch_size, generator)


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


TINY_LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_hidden": 24,
    "vocab_size": 32,
    "sequence_length": 8,
    "init_std": 0.2,
}


class SmallLlama(OnTokens, Llama):
    """Two blocks, two queries a key."""

    def __init__(self) -> None:
        super().__init__(**TINY_LLAMA, lr=1e-2)


class SmallLoRA(OnTokens, LoRA):
    """The same with a frozen base."""

    def __init__(self) -> None:
        super().__init__(TINY_LLAMA, rank=2, lr=1e-2)


class SmallMixtral(OnTokens, Mixtral):
    """Two blocks of four experts; a row is a group."""

    def __init__(self) -> None:
        super().__init__(
            num_layers=2,
            hidden=16,
            num_heads=4,
            num_kv_heads=2,
            expert_hidden=12,
            vocab_size=32,
            sequence_length=8,
            num_experts=4,
            group_size=8,
            balance_weight=0.1,
            init_std=0.2,
            lr=1e-2,
        )


class SmallDeepSeek(OnTokens, DeepSeek):
    """A dense block and one of six experts in three groups; a row is a group of tokens."""

    def __init__(self) -> None:
        super().__init__(
            num_layers=2,
            hidden=16,
            num_heads=2,
            latent=8,
            head_dim=6,
            rotary_dim=4,
            mlp_hidden=24,
            expert_hidden=8,
            num_experts=6,
            num_shared=1,
            num_choices=2,
            num_groups=3,
            groups_per_token=2,
            vocab_size=32,
            sequence_length=8,
            group_size=8,
            balance_weight=0.1,
            init_std=0.2,
            lr=1e-2,
        )


class SmallViT(OnImages, ViT):
    """Two blocks, 16 patches."""

    def __init__(self) -> None:
        super().__init__(
            num_layers=2,
            hidden=16,
            num_heads=2,
            image_size=8,
            patch_size=2,
            num_classes=10,
            in_channels=1,
            lr=1e-2,
        )


class SmallDDPM(OnImages, DDPM):
    """Two resolutions. Times and noise follow from the images: no rank draws its own."""

    def __init__(self) -> None:
        super().__init__(
            in_channels=1,
            channels=8,
            multipliers=(1, 2),
            blocks_per_level=1,
            groups=4,
            num_times=50,
            lr=1e-2,
        )

    def draw(self, images_BCYX: Tensor) -> tuple[Tensor, Tensor]:
        sums_B = images_BCYX.flatten(1).sum(1).abs()
        return (1000 * sums_B).long() % self.hparams.num_times, torch.sin(100 * images_BCYX)


class SmallCLIP(CLIP):
    """One block for images 8 x 8, one for captions of 8 tokens."""

    def __init__(self, gather: bool = False) -> None:
        super().__init__(
            image={
                "num_layers": 1,
                "hidden": 16,
                "num_heads": 2,
                "image_size": 8,
                "patch_size": 4,
                "in_channels": 1,
            },
            text={
                "num_layers": 1,
                "hidden": 12,
                "num_heads": 2,
                "vocab_size": 32,
                "sequence_length": 8,
            },
            features=8,
            gather=gather,
            lr=1e-2,
        )

    @staticmethod
    def example(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = random_images(RANK_SAMPLES, 8, generator)
        return images, token_batch(RANK_SAMPLES, generator)[0]

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        images = random_images(batch_size, 8, generator)
        return images, token_batch(batch_size, generator)[0]


# For `equality.test_ranks`.
RECIPE_PROGRAMS = {
    "llama": SmallLlama,
    "lora": SmallLoRA,
    "mixtral": SmallMixtral,
    "deepseek": SmallDeepSeek,
    "vit": SmallViT,
    "clip": SmallCLIP,
    "ddpm": SmallDDPM,
}
MODELS |= {
    "recipe_moe": SmallMoE,
    "recipe_wide_resnet": SmallWideResNet,
    "recipe_clip": SmallCLIP,
}
