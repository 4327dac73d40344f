"""A mixture-of-experts language model as an ordinary LightningModule: the GPT of gpt.py, experts in
every other block.

GShard's routing (arXiv 2006.16668, section 2): two experts a token, a capacity per expert and group
of tokens, a loss that keeps the experts evenly loaded; or dropless routing, which sorts tokens by
expert. Nothing in it knows of parallelism.

Shapes: B batch, T sequence, D hidden, F expert's hidden, E experts, G groups of S tokens each, K =
2 choices, C places of an expert in a group, N blocks of P places.
"""

from __future__ import annotations

import math

import lightning
import torch
from gpt import MLP, Attention, decay_groups, init_weights
from torch import Tensor, nn
from torch.nn import functional as F

NUM_CHOICES = 2


def combine_weights(
    weights_GSK: Tensor, mask_GSKE: Tensor, capacity_factor: float, normalizes: bool = True
) -> Tensor:
    """The weight [G, S, E, C] of each token in each place of an expert; 0 where it has no place.

    Args:
        weights_GSK: of the K experts that each token chose.
        mask_GSKE: which experts these are, one-hot.
        capacity_factor: an expert has places for this many times its even share of a group, K S / E
            tokens. First choices come before second ones; who finds no place is left out.
        normalizes: whether the weights of a token's experts that have a place for it add up to 1.
    """
    G, S, K, E = mask_GSKE.shape
    capacity = math.ceil(capacity_factor * K * S / E)
    mask_GKSE = mask_GSKE.transpose(1, 2)
    before_GKSE = mask_GKSE.reshape(G, K * S, E).cumsum(1).view(G, K, S, E) - 1
    place_GKS = (before_GKSE * mask_GKSE).sum(-1)
    weights_GKS = weights_GSK.transpose(1, 2) * (place_GKS < capacity)
    if normalizes:
        weights_GKS = weights_GKS / weights_GKS.sum(1, keepdim=True).clamp(min=1e-9)
    place_GKSC = F.one_hot(place_GKS.clamp(max=capacity - 1), capacity).to(weights_GSK.dtype)
    return torch.einsum("gkse,gksc->gsec", mask_GKSE * weights_GKS.unsqueeze(-1), place_GKSC)


class Experts(nn.Module):
    """E expert MLPs, of which every token takes two. Returns the result and the load-balancing
    loss.

    Groups are whole rows of the batch (or equal parts of a row), and every group is routed by
    itself: the result is the same however the batch is cut.
    """

    def __init__(
        self,
        hidden: int,
        factor: int,
        num_experts: int,
        group_size: int,
        capacity_factor: float | None,
        block_size: int,
    ) -> None:
        super().__init__()
        self.group_size = group_size
        self.capacity_factor = capacity_factor
        self.block_size = block_size
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.fc = nn.Parameter(torch.empty(num_experts, hidden, factor * hidden))
        self.proj = nn.Parameter(torch.empty(num_experts, factor * hidden, hidden))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        x_GSD = x_BTD.reshape(-1, self.group_size, x_BTD.shape[-1])
        gates_GSE = self.gate(x_GSD).softmax(-1)
        weights_GSK, experts_GSK = gates_GSE.topk(NUM_CHOICES, dim=-1)
        mask_GSKE = F.one_hot(experts_GSK, gates_GSE.shape[-1])
        # GShard's loss: the share of tokens whose first choice an expert is, times its mean gate; 1
        # when all are even.
        load_GE = mask_GSKE[:, :, 0].to(gates_GSE.dtype).mean(1)
        balance = (load_GE * gates_GSE.mean(1)).sum(-1).mean() * gates_GSE.shape[-1]
        if self.capacity_factor is None:
            y_GSD = self._dropless(x_GSD, weights_GSK, experts_GSK, mask_GSKE)
        else:
            y_GSD = self._with_capacity(x_GSD, weights_GSK, mask_GSKE)
        return y_GSD.reshape(x_BTD.shape), balance

    def _with_capacity(self, x_GSD: Tensor, weights_GSK: Tensor, mask_GSKE: Tensor) -> Tensor:
        """Experts take the tokens that `combine_weights` has room for; the others are left out."""
        combine_GSEC = combine_weights(weights_GSK, mask_GSKE, self.capacity_factor)
        dispatch_GSEC = (combine_GSEC > 0).to(x_GSD.dtype)
        inputs_EGCD = torch.einsum("gsec,gsd->egcd", dispatch_GSEC, x_GSD)
        hidden_EGCF = F.gelu(
            torch.einsum("egcd,edf->egcf", inputs_EGCD, self.fc), approximate="tanh"
        )
        outputs_EGCD = torch.einsum("egcf,efd->egcd", hidden_EGCF, self.proj)
        return torch.einsum("gsec,egcd->gsd", combine_GSEC, outputs_EGCD)

    def _dropless(
        self, x_GSD: Tensor, weights_GSK: Tensor, experts_GSK: Tensor, mask_GSKE: Tensor
    ) -> Tensor:
        """Tokens sorted by expert fill blocks that belong to one expert each; no token is left out.

        The number of blocks is that of the worst case, so all shapes are known before; each block
        brings its expert's
        weights along, which costs memory: for small models, and as a statement of what dropless
        routing computes.
        """
        G, S, K, E = mask_GSKE.shape
        P = self.block_size
        N = K * S // P + E  # every expert leaves at most one block partly empty
        order_GA = experts_GSK.reshape(G, S * K).argsort(
            dim=1, stable=True
        )  # A: choices in the order of experts
        count_GE = mask_GSKE.sum((1, 2))
        blocks_GE = (count_GE + P - 1) // P
        last_GE = blocks_GE.cumsum(1)  # blocks up to and with an expert's own
        blocks_N1 = torch.arange(N, device=x_GSD.device).unsqueeze(-1)
        expert_GN = (blocks_N1 >= last_GE.unsqueeze(1)).sum(-1).clamp(max=E - 1)
        shift_GE = P * (last_GE - blocks_GE) - (
            count_GE.cumsum(1) - count_GE
        )  # place minus rank in the order
        expert_GA = experts_GSK.reshape(G, S * K).gather(1, order_GA)
        place_GA = torch.arange(S * K, device=x_GSD.device) + shift_GE.gather(1, expert_GA)
        sorted_GAD = x_GSD.gather(1, (order_GA // K).unsqueeze(-1).expand(-1, -1, x_GSD.shape[-1]))
        index_GAD = place_GA.unsqueeze(-1).expand_as(sorted_GAD)
        inputs_GQD = (
            torch.zeros_like(x_GSD[:, :1]).expand(-1, N * P, -1).scatter(1, index_GAD, sorted_GAD)
        )
        inputs_GNPD = inputs_GQD.view(G, N, P, -1)
        # An einsum brings the weights: its letters say how experts may be cut, which indices of
        # `fc` do not.
        chosen_GNE = F.one_hot(expert_GN, E).to(self.fc.dtype)
        fc_GNDF = torch.einsum("gne,edf->gndf", chosen_GNE, self.fc)
        proj_GNFD = torch.einsum("gne,efd->gnfd", chosen_GNE, self.proj)
        hidden_GNPF = F.gelu(
            torch.einsum("gnpd,gndf->gnpf", inputs_GNPD, fc_GNDF), approximate="tanh"
        )
        outputs_GQD = torch.einsum("gnpf,gnfd->gnpd", hidden_GNPF, proj_GNFD).reshape(G, N * P, -1)
        weights_GSK = weights_GSK / weights_GSK.sum(-1, keepdim=True)
        weight_GA = weights_GSK.reshape(G, S * K).gather(1, order_GA)
        outputs_GAD = outputs_GQD.gather(1, index_GAD) * weight_GA.unsqueeze(-1)
        token_GAD = (order_GA // K).unsqueeze(-1).expand_as(outputs_GAD)
        return torch.zeros_like(x_GSD).scatter_add(1, token_GAD, outputs_GAD.to(x_GSD.dtype))


class Block(nn.Module):
    """Attention, then an MLP or experts, each on a normalised copy of the residual stream."""

    def __init__(
        self, hidden: int, num_heads: int, dropout: float, feed_forward: nn.Module
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attn = Attention(hidden, num_heads, dropout)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = feed_forward
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        x_BTD = x_BTD + self.drop(self.attn(self.norm1(x_BTD)))
        found = self.mlp(self.norm2(x_BTD))
        y_BTD, balance = found if isinstance(found, tuple) else (found, None)
        return x_BTD + self.drop(y_BTD), balance


class MoE(lightning.LightningModule):
    """Next-token prediction. A batch is (tokens [B, T], targets [B, T]), both int64.

    Args:
        num_layers, hidden, num_heads, vocab_size, sequence_length: the size; blocks 0, 2, 4, ...
            have experts.
        num_experts, mlp_factor: experts of a block; how much wider MLPs and experts are between
            their layers.
        group_size: tokens that are routed together: a multiple of the sequence length, or a part of
            it.
        capacity_factor: capacity of an expert in multiples of its even share of a group; None: all
            tokens that choose it (dropless).
        balance_weight: of the load-balancing loss (mean over the blocks with experts).
        dropout, init_std, lr, weight_decay, betas: as in gpt.py.
        optimizer: `adamw`, or `sgd` without momentum, which keeps no state.
        block_size: of dropless routing.
    """

    def __init__(
        self,
        num_layers: int,
        hidden: int,
        num_heads: int,
        num_experts: int,
        vocab_size: int,
        sequence_length: int,
        group_size: int = 2048,
        capacity_factor: float | None = 1.0,
        mlp_factor: int = 8,
        balance_weight: float = 0.01,
        dropout: float = 0.0,
        init_std: float = 0.02,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        optimizer: str = "adamw",
        block_size: int = 16,
    ) -> None:
        super().__init__()
        if hidden % num_heads:
            raise ValueError(f"hidden ({hidden}) must be a multiple of num_heads ({num_heads})")
        if group_size % sequence_length and sequence_length % group_size:
            raise ValueError(
                f"group_size ({group_size}) must be whole rows or equal parts of one"
                f" ({sequence_length})"
            )
        if capacity_factor is None and NUM_CHOICES * group_size % block_size:
            raise ValueError(
                f"block_size ({block_size}) must divide {NUM_CHOICES} x group_size ({group_size})"
            )
        if optimizer not in ("adamw", "sgd"):
            raise ValueError(f"optimizer is {optimizer!r}; use 'adamw' or 'sgd'")
        self.save_hyperparameters()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.position = nn.Embedding(sequence_length, hidden)
        self.drop = nn.Dropout(dropout)

        def feed_forward(index: int) -> nn.Module:
            if index % 2:
                return MLP(hidden, mlp_factor)
            return Experts(hidden, mlp_factor, num_experts, group_size, capacity_factor, block_size)

        self.blocks = nn.ModuleList(
            Block(hidden, num_heads, dropout, feed_forward(i)) for i in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        self.head.weight = self.embed.weight  # tied
        init_weights(self, num_layers, init_std)

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] and the mean load-balancing loss of the blocks with experts."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.drop(self.embed(tokens_BT) + self.position(positions_T))
        total, count = torch.zeros((), device=x_BTD.device, dtype=x_BTD.dtype), 0
        for block in self.blocks:
            x_BTD, balance = block(x_BTD)
            if balance is not None:
                total, count = total + balance, count + 1
        return self.head(self.norm(x_BTD)), total / count

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens_BT, targets_BT = batch
        logits_BTV, balance = self(tokens_BT)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        self.log("train_loss", loss, prog_bar=True)
        self.log("balance", balance)
        return loss + self.hparams.balance_weight * balance

    def configure_optimizers(self) -> torch.optim.Optimizer:
        h = self.hparams
        groups = decay_groups(self, h.weight_decay)
        if h.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=h.lr)
        return torch.optim.AdamW(groups, lr=h.lr, betas=tuple(h.betas))
