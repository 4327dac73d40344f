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


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary positions: pairs (i, i + K / 2) turned by their angles."""
    a, b = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-b, a), dim=-1) * sin_TK


class Block(nn.Module):
    """Attention and a gated MLP, each on a normalised copy of the residual stream."""

    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int, mlp_hidden: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        kv = hidden // num_heads * num_kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query, self.proj = (
            nn.Linear(hidden, hidden, bias=False),
            nn.Linear(hidden, hidden, bias=False),
        )
        self.key, self.value = nn.Linear(hidden, kv, bias=False), nn.Linear(hidden, kv, bias=False)
        self.gate, self.up = (
            nn.Linear(hidden, mlp_hidden, bias=False),
            nn.Linear(hidden, mlp_hidden, bias=False),
        )
        self.down = nn.Linear(mlp_hidden, hidden, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        h = self.norm1(x_BTD)
        q_BHTK = self.query(h).view(B, T, self.num_heads, -1).transpose(1, 2)
        k_BGTK = self.key(h).view(B, T, self.num_kv_heads, -1).transpose(1, 2)
        v_BGTK = self.value(h).view(B, T, self.num_kv_heads, -1).transpose(1, 2)
        q_BHTK, k_BGTK = rotate(q_BHTK, cos_TK, sin_TK), rotate(k_BGTK, cos_TK, sin_TK)
        k_BHTK, v_BHTK = (
            t.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
            for t in (k_BGTK, v_BGTK)
        )
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.proj(y_BHTK.transpose(1, 2).reshape(B, T, D))
        h = self.norm2(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(h)) * self.up(h))


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
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=init_std)
        K = hidden // num_heads
        angles_TK = torch.outer(
            torch.arange(sequence_length), rope_base ** (-torch.arange(0, K, 2) / K)
        ).repeat(1, 2)
        self.register_buffer("cos", angles_TK.cos(), persistent=False)
        self.register_buffer("sin", angles_TK.sin(), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        x_BTD, T = self.embed(tokens_BT), tokens_BT.shape[1]
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos[:T], self.sin[:T])
        return self.head(self.norm(x_BTD))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens_BT, targets_BT = batch
        loss = F.cross_entropy(self(tokens_BT).flatten(0, 1), targets_BT.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        h = self.hparams
        return torch.optim.AdamW(
            self.parameters(), lr=h.lr, weight_decay=h.weight_decay, betas=(0.9, 0.95)
        )
