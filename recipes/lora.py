"""LoRA (arXiv 2106.09685) as an ordinary LightningModule: the LLaMA of llama.py is frozen, and
small matrices beside its linear layers are trained.

Nothing in it knows of parallelism. A model of Hugging Face is tuned by hf.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from llama import Llama
from torch import Tensor, nn
from torch.nn import functional as F


class LoRALinear(nn.Module):
    """A frozen linear layer plus `alpha / rank` times the product of two small trained ones."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        self.scale = alpha / rank
        # The first step computes what the frozen model does.
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * self.up(self.down(x))


def add_lora(model: nn.Module, layers: Sequence[str], rank: int, alpha: float) -> None:
    """Freeze a model, and replace its linear layers whose last name is one of `layers`."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name in layers:
                setattr(parent, name, LoRALinear(child, rank, alpha))


class LoRA(lightning.LightningModule):
    """Next-token prediction. A batch is (tokens [B, T], targets [B, T]), both int64.

    Args:
        base: arguments of `llama.Llama`.
        layers: last names of the linear layers that are tuned.
        rank, alpha: of the small matrices.
        lr: AdamW.
        checkpoint: a file with the base's state dict; None: random weights.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        layers: Sequence[str] = ("query", "key", "value", "proj", "gate", "up", "down"),
        rank: int = 16,
        alpha: float = 32.0,
        lr: float = 2e-4,
        checkpoint: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Llama(**base)
        if checkpoint is not None:
            self.model.load_state_dict(torch.load(checkpoint, weights_only=True))
        add_lora(self.model, layers, rank, alpha)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens_BT, targets_BT = batch
        loss = F.cross_entropy(self.model(tokens_BT).flatten(0, 1), targets_BT.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams.lr, weight_decay=0.0)
