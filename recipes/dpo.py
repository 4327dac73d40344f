"""Direct preference optimization (Rafailov et al. 2023) as an ordinary LightningModule: a policy
learns which of two answers is preferred, held to a frozen copy of itself.

Nothing in it knows of parallelism. Shapes: B pairs, T tokens of prompt and answer, P of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from gpt import GPT, decay_groups
from text import load_tokens
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


def answer_log_probs(model: GPT, tokens_BT: Tensor, prompt_length: int) -> Tensor:
    """log p(answer token | all before it) [B, T - P], of tokens whose first P are the prompt."""
    logits_BTV = model(tokens_BT[:, :-1])[:, prompt_length - 1 :]
    answers_BT = tokens_BT[:, prompt_length:]
    log_probs = -F.cross_entropy(logits_BTV.flatten(0, 1), answers_BT.flatten(), reduction="none")
    return log_probs.view(answers_BT.shape)


def frozen_copy(policy: GPT, config: Mapping[str, Any]) -> GPT:
    """A model with the policy's values that does not train (and never drops anything out)."""
    reference = GPT(**{**config, "dropout": 0.0})
    reference.load_state_dict(policy.state_dict())
    return reference.requires_grad_(False)


class DPO(lightning.LightningModule):
    """A batch is (chosen [B, T], rejected [B, T]), int64, that begin with the same prompt.

    Args:
        policy: arguments of `gpt.GPT`.
        prompt_length: P.
        beta: how strongly the policy is held to the reference.
        lr, weight_decay: AdamW.
        checkpoint: a file with the policy's state dict to start from; None: random weights.
    """

    def __init__(
        self,
        policy: Mapping[str, Any],
        prompt_length: int,
        beta: float = 0.1,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        checkpoint: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.policy = GPT(**policy)
        if checkpoint is not None:
            self.policy.load_state_dict(torch.load(checkpoint, weights_only=True))
        self.reference = frozen_copy(self.policy, policy)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        chosen_BT, rejected_BT = batch
        margin_B = self.hparams.beta * (self.preference(chosen_BT) - self.preference(rejected_BT))
        loss = -F.logsigmoid(margin_B).mean()
        self.log_dict(
            {
                "train_loss": loss,
                "accuracy": (margin_B > 0).float().mean(),
                "margin": margin_B.mean(),
            },
            prog_bar=True,
            sync_dist=True,
        )
        return loss

    def preference(self, tokens_BT: Tensor) -> Tensor:
        """log policy(answer) - log reference(answer) [B]: the reward that DPO implies, over
        beta.
        """
        P = self.hparams.prompt_length
        return (
            answer_log_probs(self.policy, tokens_BT, P)
            - answer_log_probs(self.reference, tokens_BT, P)
        ).sum(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            decay_groups(self.policy, self.hparams.weight_decay), lr=self.hparams.lr
        )


class Pairs(Dataset):
    """Pair i: a window of text, and the same prompt with its answer's bytes in another order."""

    def __init__(
        self, tokens: np.ndarray, sequence_length: int, prompt_length: int, num_samples: int
    ) -> None:
        self.tokens, self.num_samples = tokens, num_samples
        self.sequence_length, self.prompt_length = sequence_length, prompt_length

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng(index)
        start = int(rng.integers(len(self.tokens) - self.sequence_length))
        chosen = self.tokens[start : start + self.sequence_length].astype(np.int64)
        rejected = chosen.copy()
        rng.shuffle(rejected[self.prompt_length :])
        return torch.from_numpy(chosen), torch.from_numpy(rejected)


class PreferenceData(lightning.LightningDataModule):
    """Pairs for `DPO`: English (see `text.load_tokens`) is preferred to the same bytes shuffled."""

    def __init__(
        self, batch_size: int, sequence_length: int, prompt_length: int, num_samples: int = 4096
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        h = self.hparams
        pairs = Pairs(load_tokens(None), h.sequence_length, h.prompt_length, h.num_samples)
        return DataLoader(pairs, h.batch_size, drop_last=True)  # drawn at random as they are

    def example_batch(self) -> tuple[Tensor, Tensor]:
        """A batch of the right shapes that needs no data."""
        shape = (self.hparams.batch_size, self.hparams.sequence_length)
        return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
