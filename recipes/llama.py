"""A LLaMA as an ordinary LightningModule: RMSNorm, rotary positions, grouped queries, SwiGLU, a
head of its own.

Nothing in it knows of parallelism. Shapes: B batch, T sequence, D hidden, H heads, G key and value
heads, K = D / H.
"""

from __future__ import annotations

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rotary_tables(sequence_length: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, K] of the angles by which `rotate` turns each position."""
    frequencies = base ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles_TK = torch.outer(torch.arange(sequence_length), frequencies).repeat(1, 2)
    return angles_TK.cos(), angles_TK.sin()


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary positions: pairs (i, i + K / 2) turned by their angles."""
    a, b = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-b, a), dim=-1) * sin_TK


class Attention(nn.Module):
    """Causal attention in which H / G query heads share a key and value head."""

    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        kv_hidden = hidden // num_heads * num_kv_heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, kv_hidden, bias=False)
        self.value = nn.Linear(hidden, kv_hidden, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q_BHTK = self.query(x_BTD).view(B, T, self.num_heads, -1).transpose(1, 2)
        k_BGTK = self.key(x_BTD).view(B, T, self.num_kv_heads, -1).transpose(1, 2)
        v_BGTK = self.value(x_BTD).view(B, T, self.num_kv_heads, -1).transpose(1, 2)
        q_BHTK = rotate(q_BHTK, cos_TK, sin_TK)
        k_BGTK = rotate(k_BGTK, cos_TK, sin_TK)
        queries_per_key = self.num_heads // self.num_kv_heads
        k_BHTK = k_BGTK.repeat_interleave(queries_per_key, dim=1)
        v_BHTK = v_BGTK.repeat_interleave(queries_per_key, dim=1)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.proj(y_BHTK.transpose(1, 2).reshape(B, T, D))


class SwiGLU(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden: int, mlp_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, mlp_hidden, bias=False)
        self.up = nn.Linear(hidden, mlp_hidden, bias=False)
        self.down = nn.Linear(mlp_hidden, hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """Attention and a gated MLP, each on a normalised copy of the residual stream."""

    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int, mlp_hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(hidden)
        self.attn = Attention(hidden, num_heads, num_kv_heads)
        self.norm2 = nn.RMSNorm(hidden)
        self.mlp = SwiGLU(hidden, mlp_hidden)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD), cos_TK, sin_TK)
        return x_BTD + self.mlp(self.norm2(x_BTD))


def init_matrices(module: nn.Module, std: float) -> None:
    """Draw matrices and stacks of matrices from a normal distribution; norms stay at one."""
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=std)


class Llama(lightning.LightningModule):
    """Next-token prediction. A batch is (tokens [B, T], targets [B, T]), both int64."""

    def __init__(
        self,
        num_layers: int,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        mlp_hidden: int,
        vocab_size: int,
        sequence_length: int,
        rope_base: float = 500000.0,
        init_std: float = 0.02,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.blocks = nn.ModuleList(
            Block(hidden, num_heads, num_kv_heads, mlp_hidden) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        init_matrices(self, init_std)
        cos_TK, sin_TK = rotary_tables(sequence_length, hidden // num_heads, rope_base)
        self.register_buffer("cos", cos_TK, persistent=False)
        self.register_buffer("sin", sin_TK, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        T = tokens_BT.shape[1]
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos[:T], self.sin[:T])
        return self.head(self.norm(x_BTD))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens_BT, targets_BT = batch
        loss = F.cross_entropy(self(tokens_BT).flatten(0, 1), targets_BT.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        h = self.hparams
        return torch.optim.AdamW(
            self.parameters(), lr=h.lr, weight_decay=h.weight_decay, betas=(0.9, 0.95)
        )
