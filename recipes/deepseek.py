"""DeepSeek-V2 (arXiv 2405.04434) as an ordinary LightningModule: latent attention, many small
experts beside shared ones, a dense first block.

Nothing in it knows of parallelism. Shapes: B batch, T sequence, D hidden, H heads, L latent, P
dims of a head without positions, R those with rotary ones, G groups of S tokens, E experts in N
expert groups, K choices of a token.
"""

from __future__ import annotations

import torch
from llama import SwiGLU, rotate
from mixtral import Block, ExpertLM, Experts
from torch import Tensor, nn
from torch.nn import functional as F


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are made from a small vector of each token.

    A head's query and key are P dims without positions and R rotary ones; the rotary key is the
    same for all heads.
    """

    def __init__(
        self, hidden: int, num_heads: int, latent: int, head_dim: int, rotary_dim: int
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dims = [head_dim, rotary_dim]
        self.latent_dims = [latent, rotary_dim]
        self.query = nn.Linear(hidden, num_heads * (head_dim + rotary_dim), bias=False)
        self.compress = nn.Linear(hidden, latent + rotary_dim, bias=False)
        self.norm = nn.RMSNorm(latent)
        self.key_value = nn.Linear(latent, num_heads * 2 * head_dim, bias=False)
        self.proj = nn.Linear(num_heads * head_dim, hidden, bias=False)

    def forward(self, x_BTD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        H = self.num_heads
        q_BHTQ = self.query(x_BTD).view(B, T, H, -1).transpose(1, 2)
        q_BHTP, q_BHTR = q_BHTQ.split(self.dims, dim=-1)
        latent_BTL, k_BTR = self.compress(x_BTD).split(self.latent_dims, dim=-1)
        kv_BHTX = self.key_value(self.norm(latent_BTL)).view(B, T, H, -1).transpose(1, 2)
        k_BHTP, v_BHTP = kv_BHTX.chunk(2, dim=-1)
        k_BHTR = rotate(k_BTR.unsqueeze(1), cos_TR, sin_TR).expand(-1, H, -1, -1)
        q_BHTQ = torch.cat((q_BHTP, rotate(q_BHTR, cos_TR, sin_TR)), dim=-1)
        k_BHTQ = torch.cat((k_BHTP, k_BHTR), dim=-1)
        y_BHTP = F.scaled_dot_product_attention(q_BHTQ, k_BHTQ, v_BHTP, is_causal=True)
        return self.proj(y_BHTP.transpose(1, 2).reshape(B, T, -1))


class SharedAndRoutedExperts(nn.Module):
    """An MLP that every token takes, beside the experts that it chooses."""

    def __init__(self, shared: SwiGLU, routed: Experts) -> None:
        super().__init__()
        self.shared = shared
        self.routed = routed

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        y_BTD, balance = self.routed(x_BTD)
        return self.shared(x_BTD) + y_BTD, balance


class GroupedExperts(Experts):
    """Experts in groups, such as those of a node: a token chooses among its best groups only."""

    def __init__(self, num_groups: int, groups_per_token: int, **sizes: int | float) -> None:
        super().__init__(**sizes)
        self.num_groups = num_groups
        self.groups_per_token = groups_per_token

    def choose(self, scores_GSE: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts [G, S, K] of each token. The weights are the scores themselves."""
        scores_GSNX = scores_GSE.unflatten(-1, (self.num_groups, -1))
        best_GSN = scores_GSNX.amax(-1)
        chosen = best_GSN.topk(self.groups_per_token, dim=-1).indices
        mask_GSN = F.one_hot(chosen, self.num_groups).sum(-2)
        allowed_GSE = (scores_GSNX * mask_GSN.unsqueeze(-1)).flatten(-2)
        return allowed_GSE.topk(self.num_choices, dim=-1)


class DeepSeek(ExpertLM):
    """Experts in every block but the first.

    Args:
        num_layers, hidden, num_heads, vocab_size, sequence_length: as in llama.py.
        latent, head_dim, rotary_dim: L, P and R of `LatentAttention`.
        mlp_hidden, expert_hidden: how wide the first block's MLP and an expert are.
        num_experts, num_shared, num_choices: experts, those that every token takes beside them, K.
        num_groups, groups_per_token: expert groups, and how many of them a token may choose from.
        group_size: tokens that are routed together: equal parts of a row.
        capacity_factor: places of an expert, in multiples of its even share of a group.
        balance_weight: of the load-balancing loss (mean over the blocks with experts).
        rope_base, init_std, lr, weight_decay: as in llama.py.
    """

    def __init__(
        self,
        num_layers: int,
        hidden: int,
        num_heads: int,
        latent: int,
        head_dim: int,
        rotary_dim: int,
        mlp_hidden: int,
        expert_hidden: int,
        num_experts: int,
        num_shared: int,
        num_choices: int,
        num_groups: int,
        groups_per_token: int,
        vocab_size: int,
        sequence_length: int,
        group_size: int = 512,
        capacity_factor: float = 1.25,
        balance_weight: float = 0.003,
        rope_base: float = 10000.0,
        init_std: float = 0.006,
        lr: float = 4.2e-4,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

        def feed_forward(index: int) -> nn.Module:
            if index == 0:
                return SwiGLU(hidden, mlp_hidden)
            routed = GroupedExperts(
                num_groups,
                groups_per_token,
                hidden=hidden,
                expert_hidden=expert_hidden,
                num_experts=num_experts,
                num_choices=num_choices,
                group_size=group_size,
                capacity_factor=capacity_factor,
            )
            return SharedAndRoutedExperts(SwiGLU(hidden, num_shared * expert_hidden), routed)

        self.blocks = nn.ModuleList()
        for index in range(num_layers):
            attention = LatentAttention(hidden, num_heads, latent, head_dim, rotary_dim)
            self.blocks.append(Block(hidden, attention, feed_forward(index)))
        self.add_ends(rotary_dim)
