"""A Vision Transformer (arXiv 2010.11929) as an ordinary LightningModule, with the mean of the
patches in the place of a class token (arXiv 2205.01580).

Nothing in it knows of parallelism. Shapes: B batch, C channels, X x X pixels, T patches, D hidden,
H heads.
"""

from __future__ import annotations

import lightning
import torch
from gpt import MLP, decay_groups
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head self-attention of all positions, or of each with those before it."""

    def __init__(self, hidden: int, num_heads: int, is_causal: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.is_causal = is_causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = (self.num_heads, -1)
        q_BTD, k_BTD, v_BTD = self.qkv(x_BTD).chunk(3, dim=-1)
        q_BHTK = q_BTD.unflatten(-1, heads).transpose(1, 2)
        k_BHTK = k_BTD.unflatten(-1, heads).transpose(1, 2)
        v_BHTK = v_BTD.unflatten(-1, heads).transpose(1, 2)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=self.is_causal)
        return self.proj(y_BHTK.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and MLP, each on a normalised copy of the residual stream."""

    def __init__(self, hidden: int, num_heads: int, is_causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attn = Attention(hidden, num_heads, is_causal)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class ImageEncoder(nn.Module):
    """Images [B, C, X, X] -> features [B, D]."""

    def __init__(
        self,
        num_layers: int,
        hidden: int,
        num_heads: int,
        image_size: int,
        patch_size: int,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        num_patches = (image_size // patch_size) ** 2
        self.patches = nn.Conv2d(in_channels, hidden, patch_size, patch_size)
        self.position = nn.Parameter(torch.randn(num_patches, hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(hidden, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x_BCXX: Tensor) -> Tensor:
        x_BTD = self.patches(x_BCXX).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.norm(x_BTD).mean(1)


class ViT(lightning.LightningModule):
    """Image classification. A batch is (images [B, C, X, X], labels [B] int64).

    Args:
        num_layers, hidden, num_heads, image_size, patch_size, in_channels: the size.
        num_classes: of the labels.
        lr, weight_decay: AdamW.
    """

    def __init__(
        self,
        num_layers: int,
        hidden: int,
        num_heads: int,
        image_size: int,
        patch_size: int,
        num_classes: int,
        in_channels: int = 3,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = ImageEncoder(
            num_layers, hidden, num_heads, image_size, patch_size, in_channels
        )
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, images_BCXX: Tensor) -> Tensor:
        """Logits [B, classes]."""
        return self.head(self.encoder(images_BCXX))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images_BCXX, labels_B = batch
        logits = self(images_BCXX)
        loss = F.cross_entropy(logits, labels_B)
        self.log("train_loss", loss, prog_bar=True)
        self.log("accuracy", (logits.argmax(-1) == labels_B).float().mean(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        h = self.hparams
        return torch.optim.AdamW(decay_groups(self, h.weight_decay), lr=h.lr)
