"""A GPT as an ordinary LightningModule: learned positions, pre-norm blocks, causal attention, tied
head.

Nothing in it knows of parallelism. Shapes: B batch, T sequence, D hidden, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class KeyValues:
    """Keys and values of the tokens that one attention has seen: [B, H, S, D / H] each. Fill it
    from the first token
    on, then add one token at a time."""

    def __init__(self, k_BHSK: Tensor | None = None, v_BHSK: Tensor | None = None) -> None:
        self.k_BHSK = k_BHSK
        self.v_BHSK = v_BHSK

    def extend(self, k_BHTK: Tensor, v_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        if self.k_BHSK is not None and self.v_BHSK is not None:
            k_BHTK, v_BHTK = (
                torch.cat([self.k_BHSK, k_BHTK], 2),
                torch.cat([self.v_BHSK, v_BHTK], 2),
            )
        self.k_BHSK, self.v_BHSK = k_BHTK, v_BHTK
        return k_BHTK, v_BHTK

    @property
    def length(self) -> int:
        return 0 if self.k_BHSK is None else self.k_BHSK.shape[2]


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, hidden: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x_BTD: Tensor, cache: KeyValues | None = None) -> Tensor:
        B, T, D = x_BTD.shape
        heads = (B, T, self.num_heads, D // self.num_heads)
        q_BHTK, k_BHTK, v_BHTK = (
            part.view(heads).transpose(1, 2) for part in self.qkv(x_BTD).split(D, dim=-1)
        )
        if cache is not None:
            k_BHTK, v_BHTK = cache.extend(k_BHTK, v_BHTK)  # S >= T keys
        dropout = self.dropout if self.training else 0.0
        is_causal = cache is None or T > 1  # one new token sees all that were before it
        y_BHTK = F.scaled_dot_product_attention(
            q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=is_causal
        )
        return self.proj(y_BHTK.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    """Two linear layers, `factor` times as wide between them."""

    def __init__(self, hidden: int, factor: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(hidden, factor * hidden)
        self.proj = nn.Linear(factor * hidden, hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x_BTD), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each on a normalised copy of the residual stream."""

    def __init__(self, hidden: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attn = Attention(hidden, num_heads, dropout)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, cache: KeyValues | None = None) -> Tensor:
        x_BTD = x_BTD + self.drop(self.attn(self.norm1(x_BTD), cache))
        return x_BTD + self.drop(self.mlp(self.norm2(x_BTD)))


def init_weights(model: nn.Module, num_layers: int, std: float) -> None:
    """GPT-2's: the residual branches (`proj`) start small, so that depth does not grow the
    stream.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim >= 2:
            scale = 1 / math.sqrt(2 * num_layers) if ".proj" in name else 1.0
            nn.init.normal_(parameter, std=std * scale)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The optimizer's groups: weights with two or more dims decay, biases and norms do not."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


class GPT(lightning.LightningModule):
    """Next-token prediction. A batch is (tokens [B, T], targets [B, T]), both int64.

    Args:
        num_layers, hidden, num_heads, vocab_size, sequence_length: the size.
        dropout: on embeddings, attention weights and both residual branches.
        init_std: of the weights at the start; 0.02 suits a hidden size of about 1000, smaller
            models want more.
        lr, weight_decay, betas: AdamW (see `decay_groups`).
        warmup_steps, max_steps: linear warm-up, then a cosine down to a tenth of `lr` at
            `max_steps`; constant if None.
    """

    def __init__(
        self,
        num_layers: int,
        hidden: int,
        num_heads: int,
        vocab_size: int,
        sequence_length: int,
        dropout: float = 0.0,
        init_std: float = 0.02,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 0,
        max_steps: int | None = None,
    ) -> None:
        super().__init__()
        if hidden % num_heads:
            raise ValueError(f"hidden ({hidden}) must be a multiple of num_heads ({num_heads})")
        self.save_hyperparameters()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.position = nn.Embedding(sequence_length, hidden)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        self.head.weight = self.embed.weight  # tied
        init_weights(self, num_layers, init_std)

    def forward(self, tokens_BT: Tensor, caches: Sequence[KeyValues] | None = None) -> Tensor:
        """Logits [B, T, V]. With `caches`, one a block, `tokens_BT` go on where these end."""
        start = 0 if caches is None else caches[0].length
        positions_T = torch.arange(start, start + tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.drop(self.embed(tokens_BT) + self.position(positions_T))
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x_BTD = block(x_BTD, cache)
        return self.head(self.norm(x_BTD))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens_BT, targets_BT = batch
        loss = F.cross_entropy(self(tokens_BT).flatten(0, 1), targets_BT.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        h = self.hparams
        optimizer = torch.optim.AdamW(
            decay_groups(self, h.weight_decay), lr=h.lr, betas=tuple(h.betas)
        )
        if h.max_steps is None and not h.warmup_steps:
            return optimizer

        def factor(step: int) -> float:
            if step < h.warmup_steps:
                return (step + 1) / h.warmup_steps
            if h.max_steps is None:
                return 1.0
            done = min(1.0, (step - h.warmup_steps) / max(1, h.max_steps - h.warmup_steps))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
