"""The two kinds of transformer that published runs train: LLaMA-like and GPT-like, with any number
of equal blocks.
"""

from __future__ import annotations

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention of `heads` queries on `kv_heads` keys, as `Block` says."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        bias: bool,
        rotary: bool,
        fused: bool,
        alibi: bool,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.width = dim // heads
        self.rotary = rotary
        self.fused = fused
        self.alibi = alibi
        self.query = nn.Linear(dim, dim, bias)
        self.key, self.value = (nn.Linear(dim, kv_heads * self.width, bias) for _ in range(2))
        self.out = nn.Linear(dim, dim, bias)

    def forward(self, x_BTD: Tensor, angles_TK: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = (
            linear(x_BTD).view(B, T, heads, self.width).transpose(1, 2)
            for linear, heads in (
                (self.query, self.heads),
                (self.key, self.kv_heads),
                (self.value, self.kv_heads),
            )
        )
        if self.rotary:
            q, k = (x * angles_TK + torch.roll(x, self.width // 2, -1) * angles_TK for x in (q, k))
        if self.alibi:  # a bias on the scores: no kernel leaves out what is masked
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=angles_TK[:, :1].T[None, None].to(q.dtype)
            )
        elif self.fused:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads
            )
        else:
            y = F.dropout(torch.softmax(q @ k.transpose(-1, -2), dim=-1), 0.1) @ v
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    """Attention and MLP, each behind a norm.

    Args:
        gated: SwiGLU, RMSNorm and rotary positions (LLaMA), else GELU and LayerNorm (GPT).
        fused: attention is one kernel; before 2022 it was written out, with dropout.
        alibi: positions are biases on the scores.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        gated: bool,
        bias: bool,
        fused: bool,
        alibi: bool,
    ) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm1 = norm(dim)
        self.norm2 = norm(dim)
        self.attention = Attention(dim, heads, kv_heads, bias, gated, fused, alibi)
        self.up, self.down = nn.Linear(dim, ffn, bias), nn.Linear(ffn, dim, bias)
        self.gate = nn.Linear(dim, ffn, bias) if gated else None
        self.dropout = 0.0 if fused else 0.1

    def forward(self, x_BTD: Tensor, angles_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + F.dropout(self.attention(self.norm1(x_BTD), angles_TK), self.dropout)
        y = self.norm2(x_BTD)
        y = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x_BTD + F.dropout(self.down(y), self.dropout)


class Transformer(lightning.LightningModule):
    """Next-token loss of `num_blocks` blocks; logits in float32 unless the loss is one kernel
    (`fused_loss`).

    float8: a recipe of torchao's for the blocks' linears; empty: none.
    """

    def __init__(
        self,
        num_blocks: int,
        dim: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        vocab: int,
        seq_len: int,
        gated: bool,
        bias: bool,
        fused: bool,
        alibi: bool,
        tied: bool,
        fused_loss: bool,
        float8: str = "",
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.fused_loss = fused_loss
        if gated or alibi:
            self.positions = None
        else:
            self.positions = nn.Parameter(torch.empty(seq_len, dim))
        self.register_buffer("angles", torch.empty(seq_len, dim // heads))
        self.blocks = nn.ModuleList(
            Block(dim, heads, kv_heads, ffn, gated, bias, fused, alibi) for _ in range(num_blocks)
        )
        self.norm = (nn.RMSNorm if gated else nn.LayerNorm)(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        if float8:  # all products but the head's, as torchtitan's and composer's recipes have it
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(
                self.blocks, config=Float8LinearConfig.from_recipe_name(float8)
            )

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x_BT, y_BT = batch
        x_BTD = self.tokens(x_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions
        for block in self.blocks:
            x_BTD = block(x_BTD, self.angles)
        logits = self.head(self.norm(x_BTD)).flatten(0, 1)
        return F.cross_entropy(logits if self.fused_loss else logits.float(), y_BT.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())
