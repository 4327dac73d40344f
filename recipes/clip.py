"""CLIP (arXiv 2103.00020) as an ordinary LightningModule: images and their captions, each nearer to
its own than to the others.

Nothing in it knows of parallelism, `gather` apart. Shapes: B pairs, C channels, X x X pixels, T
tokens, D hidden, V a feature's dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning
import torch
from gpt import decay_groups
from torch import Tensor, nn
from torch.nn import functional as F
from vit import Block, ImageEncoder


class TextEncoder(nn.Module):
    """Tokens [B, T] -> features [B, D]: those of the last token, which sees all others."""

    def __init__(
        self, num_layers: int, hidden: int, num_heads: int, vocab_size: int, sequence_length: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.position = nn.Parameter(torch.randn(sequence_length, hidden) * 0.01)
        self.blocks = nn.ModuleList(Block(hidden, num_heads, True) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT) + self.position
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.norm(x_BTD)[:, -1]


class CLIP(lightning.LightningModule):
    """A batch is (images [B, C, X, X], captions [B, T] int64).

    Args:
        image, text: arguments of `ImageEncoder` and `TextEncoder`.
        features: V.
        gather: contrast the pairs of all ranks, as users of DDP write it. The step then runs
            eagerly. Under `batch_scope: global` a step sees all pairs already.
        lr, weight_decay: AdamW.
    """

    def __init__(
        self,
        image: Mapping[str, Any],
        text: Mapping[str, Any],
        features: int,
        gather: bool = False,
        lr: float = 5e-4,
        weight_decay: float = 0.2,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.image_encoder = ImageEncoder(**image)
        self.text_encoder = TextEncoder(**text)
        self.image_head = nn.Linear(image["hidden"], features, bias=False)
        self.text_head = nn.Linear(text["hidden"], features, bias=False)
        # The logarithm of 1 / 0.07.
        self.log_scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, images_BCXX: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, V] of images and captions, of length 1."""
        images_BV = self.image_head(self.image_encoder(images_BCXX))
        texts_BV = self.text_head(self.text_encoder(tokens_BT))
        return F.normalize(images_BV, dim=-1), F.normalize(texts_BV, dim=-1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images_BV, texts_BV = self(*batch)
        all_images, all_texts = images_BV, texts_BV
        labels_B = torch.arange(len(images_BV), device=images_BV.device)
        if self.hparams.gather and self.trainer.world_size > 1:
            all_images = self.all_gather(images_BV, sync_grads=True).flatten(0, 1)
            all_texts = self.all_gather(texts_BV, sync_grads=True).flatten(0, 1)
            labels_B = labels_B + self.global_rank * len(images_BV)
        scale = self.log_scale.exp()
        of_images = F.cross_entropy(scale * images_BV @ all_texts.T, labels_B)
        of_texts = F.cross_entropy(scale * texts_BV @ all_images.T, labels_B)
        loss = (of_images + of_texts) / 2
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        h = self.hparams
        return torch.optim.AdamW(
            decay_groups(self, h.weight_decay), lr=h.lr, betas=(0.9, 0.98), eps=1e-6
        )
