"""Mixtral (arXiv 2401.04088) as an ordinary LightningModule: the LLaMA of llama.py, with experts in
every block.

Nothing in it knows of parallelism. Shapes: B batch, T sequence, D hidden, E experts, F expert's
hidden, G groups of S tokens each, K choices of a token, C places of an expert in a group.
"""

from __future__ import annotations

import lightning
import torch
from llama import Attention, init_matrices, rotary_tables
from moe import combine_weights
from torch import Tensor, nn
from torch.nn import functional as F


class Experts(nn.Module):
    """E gated MLPs, of which every token takes K. Returns the result and the load-balancing loss.

    Groups are equal parts of the batch's rows, and every group is routed by itself: the result is
    the same however the batch is split.
    """

    def __init__(
        self,
        hidden: int,
        expert_hidden: int,
        num_experts: int,
        num_choices: int,
        group_size: int,
        capacity_factor: float,
    ) -> None:
        super().__init__()
        self.num_choices = num_choices
        self.group_size = group_size
        self.capacity_factor = capacity_factor
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.gate = nn.Parameter(torch.empty(num_experts, hidden, expert_hidden))
        self.up = nn.Parameter(torch.empty(num_experts, hidden, expert_hidden))
        self.down = nn.Parameter(torch.empty(num_experts, expert_hidden, hidden))

    def choose(self, scores_GSE: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts [G, S, K] of each token: its best, with weights that add up to 1."""
        weights_GSK, experts_GSK = scores_GSE.topk(self.num_choices, dim=-1)
        return weights_GSK / weights_GSK.sum(-1, keepdim=True), experts_GSK

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        x_GSD = x_BTD.reshape(-1, self.group_size, x_BTD.shape[-1])
        scores_GSE = self.router(x_GSD).softmax(-1)
        weights_GSK, experts_GSK = self.choose(scores_GSE)
        mask_GSKE = F.one_hot(experts_GSK, scores_GSE.shape[-1])

        combine_GSEC = combine_weights(weights_GSK, mask_GSKE, self.capacity_factor, False)
        dispatch_GSEC = (combine_GSEC > 0).to(x_GSD.dtype)
        x_EGCD = torch.einsum("gsec,gsd->egcd", dispatch_GSEC, x_GSD)
        gate_EGCF = F.silu(torch.einsum("egcd,edf->egcf", x_EGCD, self.gate))
        up_EGCF = torch.einsum("egcd,edf->egcf", x_EGCD, self.up)
        y_EGCD = torch.einsum("egcf,efd->egcd", gate_EGCF * up_EGCF, self.down)
        y_GSD = torch.einsum("gsec,egcd->gsd", combine_GSEC, y_EGCD)
        return y_GSD.reshape(x_BTD.shape), self.balance(scores_GSE, mask_GSKE)

    def balance(self, scores_GSE: Tensor, mask_GSKE: Tensor) -> Tensor:
        """The share of choices that an expert is, times its mean score; 1 when all are even."""
        load_GE = mask_GSKE.sum(2).to(scores_GSE.dtype).mean(1) / self.num_choices
        return (load_GE * scores_GSE.mean(1)).sum(-1).mean() * scores_GSE.shape[-1]


class Block(nn.Module):
    """Attention, then an MLP or experts, each on a normalised copy of the residual stream."""

    def __init__(self, hidden: int, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(hidden)
        self.attn = attention
        self.norm2 = nn.RMSNorm(hidden)
        self.mlp = feed_forward

    def forward(
        self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD), cos_TK, sin_TK)
        y = self.mlp(self.norm2(x_BTD))
        y_BTD, balance = y if isinstance(y, tuple) else (y, None)
        return x_BTD + y_BTD, balance


class ExpertLM(lightning.LightningModule):
    """Next-token prediction. A batch is (tokens [B, T], targets [B, T]), both int64.

    A derived class saves its hyperparameters, makes `self.blocks`, then calls `add_ends`.
    """

    def add_ends(self, rotary_dim: int) -> None:
        """Make everything but the blocks, and draw the weights."""
        h = self.hparams
        if h.sequence_length % h.group_size:
            raise ValueError(
                f"group_size ({h.group_size}) must divide sequence_length ({h.sequence_length})"
            )
        self.embed = nn.Embedding(h.vocab_size, h.hidden)
        self.norm = nn.RMSNorm(h.hidden)
        self.head = nn.Linear(h.hidden, h.vocab_size, bias=False)
        init_matrices(self, h.init_std)
        cos_TK, sin_TK = rotary_tables(h.sequence_length, rotary_dim, h.rope_base)
        self.register_buffer("cos", cos_TK, persistent=False)
        self.register_buffer("sin", sin_TK, persistent=False)

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] and the mean load-balancing loss of the blocks with experts."""
        T = tokens_BT.shape[1]
        x_BTD = self.embed(tokens_BT)
        balances = []
        for block in self.blocks:
            x_BTD, balance = block(x_BTD, self.cos[:T], self.sin[:T])
            if balance is not None:
                balances.append(balance)
        return self.head(self.norm(x_BTD)), torch.stack(balances).mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens_BT, targets_BT = batch
        logits_BTV, balance = self(tokens_BT)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        self.log("train_loss", loss, prog_bar=True)
        self.log("balance", balance)
        return loss + self.hparams.balance_weight * balance

    def configure_optimizers(self) -> torch.optim.Optimizer:
        h = self.hparams
        return torch.optim.AdamW(
            self.parameters(), lr=h.lr, weight_decay=h.weight_decay, betas=(0.9, 0.95)
        )


class Mixtral(ExpertLM):
    """Experts in every block.

    Args:
        num_layers, hidden, num_heads, num_kv_heads, vocab_size, sequence_length: as in llama.py.
        num_experts, num_choices, expert_hidden: experts of a block, K, and how wide each is.
        group_size: tokens that are routed together: equal parts of a row.
        capacity_factor: places of an expert, in multiples of its even share of a group.
        balance_weight: of the load-balancing loss (mean over the blocks).
        rope_base, init_std, lr, weight_decay: as in llama.py.
    """

    def __init__(
        self,
        num_layers: int,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        expert_hidden: int,
        vocab_size: int,
        sequence_length: int,
        num_experts: int = 8,
        num_choices: int = 2,
        group_size: int = 512,
        capacity_factor: float = 1.25,
        balance_weight: float = 0.02,
        rope_base: float = 1e6,
        init_std: float = 0.02,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.ModuleList()
        for _ in range(num_layers):
            attention = Attention(hidden, num_heads, num_kv_heads)
            experts = Experts(
                hidden, expert_hidden, num_experts, num_choices, group_size, capacity_factor
            )
            self.blocks.append(Block(hidden, attention, experts))
        self.add_ends(rotary_dim=hidden // num_heads)
