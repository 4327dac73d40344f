"""Group relative policy optimization (Shao et al. 2024, DeepSeekMath) as an ordinary
LightningModule: the policy writes several answers to a prompt, each is scored, and those better
than their group's mean become likelier.

Nothing in it knows of parallelism. Shapes: B prompts, G answers to each, N = B G, P tokens of a
prompt, A of an answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lightning
import torch
from dpo import answer_log_probs, frozen_copy
from gpt import GPT, KeyValues, decay_groups
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from alpa_strategy import Phase


def ascending(prompts_NP: Tensor, answers_NA: Tensor) -> Tensor:
    """The reward [N] of the tiny task: the share of the answer's tokens that are above the token
    before them.
    """
    before_NA = torch.cat([prompts_NP[:, -1:], answers_NA[:, :-1]], 1)
    return (answers_NA > before_NA).float().mean(1)


def gumbel_noise(seeds_B: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[B, *shape] whose row is drawn from its seed alone, so that what a prompt is answered depends
    on no other.
    """
    noise = [
        torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        for seed in seeds_B.tolist()
    ]
    return -torch.log(-torch.log(torch.stack(noise).clamp(1e-6, 1 - 1e-6))).to(seeds_B.device)


class GRPO(lightning.LightningModule):
    """A batch is (prompts [B, P], seeds [B]), int64; the seeds choose the answers.

    Args:
        policy: arguments of `gpt.GPT`.
        answer_length: A.
        group_size: G.
        num_updates: optimizer steps on one batch of answers.
        clip: how far the probability of a token may go from what it was when it was written, as a
            ratio.
        beta: weight of the divergence from the reference, a frozen copy of the first policy.
        temperature: of the answers; 0: the likeliest token always.
        lr: AdamW.
    """

    def __init__(
        self,
        policy: Mapping[str, Any],
        answer_length: int,
        group_size: int = 8,
        num_updates: int = 2,
        clip: float = 0.2,
        beta: float = 0.02,
        temperature: float = 1.0,
        lr: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False  # several updates a batch
        self.policy = GPT(**policy)
        self.reference = frozen_copy(self.policy, policy)

    @torch.no_grad()
    def answer(self, prompts_NP: Tensor, noise_NAV: Tensor) -> Tensor:
        """Answers [N, A], a token at a time, with keys and values of what was written kept."""
        caches = [KeyValues() for _ in self.policy.blocks]
        next_NT, answers = prompts_NP, []
        for noise_NV in noise_NAV.unbind(1):
            next_NT = self.next_token(next_NT, noise_NV, caches)
            answers.append(next_NT)
        return torch.cat(answers, 1)

    def next_token(
        self, tokens_NT: Tensor, noise_NV: Tensor, caches: Sequence[KeyValues]
    ) -> Tensor:
        """The token [N, 1] after `tokens_NT`, which go on where `caches` end and are added to
        them.
        """
        logits_NV = self.policy(tokens_NT, caches)[:, -1]
        # The largest of logits / temperature + Gumbel noise is a draw from their softmax.
        return (logits_NV + self.hparams.temperature * noise_NV).argmax(-1, keepdim=True)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        h, (prompts_BP, seeds_B) = self.hparams, batch
        prompts_NP = prompts_BP.repeat_interleave(h.group_size, 0)
        noise_BGAV = gumbel_noise(seeds_B, (h.group_size, h.answer_length, h.policy["vocab_size"]))
        answers_NA = self.answer(prompts_NP, noise_BGAV.flatten(0, 1))
        rewards_N = ascending(prompts_NP, answers_NA)
        rewards_BG = rewards_N.view(-1, h.group_size)
        spread_B1 = rewards_BG.std(1, keepdim=True) + 1e-4
        advantages_N1 = ((rewards_BG - rewards_BG.mean(1, keepdim=True)) / spread_B1).view(-1, 1)

        tokens_NT, P = torch.cat([prompts_NP, answers_NA], 1), prompts_NP.shape[1]
        with torch.no_grad():
            old_NA = answer_log_probs(self.policy, tokens_NT, P)
            reference_NA = answer_log_probs(self.reference, tokens_NT, P)
        for _ in range(h.num_updates):
            new_NA = answer_log_probs(self.policy, tokens_NT, P)
            loss = self.loss(new_NA, old_NA, reference_NA, advantages_N1)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log_dict(
            {"train_loss": loss, "reward": rewards_N.mean()}, prog_bar=True, sync_dist=True
        )

    def loss(
        self, new_NA: Tensor, old_NA: Tensor, reference_NA: Tensor, advantages_N1: Tensor
    ) -> Tensor:
        """The clipped surrogate and `beta` times an unbiased estimate of KL(policy ||
        reference).
        """
        ratio_NA = torch.exp(new_NA - old_NA)
        clipped_NA = ratio_NA.clamp(1 - self.hparams.clip, 1 + self.hparams.clip)
        surrogate = torch.minimum(ratio_NA * advantages_N1, clipped_NA * advantages_N1).mean()
        away_NA = reference_NA - new_NA
        return self.hparams.beta * (torch.exp(away_NA) - away_NA - 1).mean() - surrogate

    def iteration_phases(self, batch: tuple[Tensor, Tensor]) -> dict[str, Phase]:
        """What a training step consists of, for `alpa plan`. A token is written after half of the
        answer, typically.
        """
        h, heads = self.hparams, self.hparams.policy["num_heads"]
        prompts_NP = batch[0].repeat_interleave(h.group_size, 0)
        (N, P), A = prompts_NP.shape, h.answer_length
        noise_NV, answers_NA = torch.empty(N, h.policy["vocab_size"]), torch.empty(N, A)
        tokens_NT = prompts_NP.new_empty(N, P + A)
        past_NHSK = torch.empty(
            N, heads, P + A // 2, h.policy["hidden"] // heads, dtype=self.policy.embed.weight.dtype
        )

        def write(
            tokens_NT: Tensor, noise_NV: Tensor, past: Sequence[tuple[Tensor, Tensor]]
        ) -> Any:
            caches = [KeyValues(*each) for each in past] or [
                KeyValues() for _ in self.policy.blocks
            ]
            return self.next_token(tokens_NT, noise_NV, caches), [
                (cache.k_BHSK, cache.v_BHSK) for cache in caches
            ]

        past = [(past_NHSK, past_NHSK) for _ in self.policy.blocks]
        log_probs = partial(answer_log_probs, prompt_length=P)
        return {
            "prompt": Phase(write, (prompts_NP, noise_NV, ())),
            "answer": Phase(write, (prompts_NP[:, :1], noise_NV, past), times=A - 1),
            "old": Phase(partial(log_probs, self.policy), (tokens_NT,)),
            "reference": Phase(partial(log_probs, self.reference), (tokens_NT,)),
            "update": Phase(
                lambda tokens_NT, *rest: self.loss(log_probs(self.policy, tokens_NT), *rest),
                (tokens_NT, answers_NA, answers_NA, answers_NA[:, :1]),
                times=h.num_updates,
                trains=True,
            ),
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(decay_groups(self.policy, 0.0), lr=self.hparams.lr)


class Prompts(Dataset):
    """Prompt i: P tokens and a seed, both drawn from i."""

    def __init__(self, vocab_size: int, prompt_length: int, num_samples: int) -> None:
        self.vocab_size = vocab_size
        self.prompt_length = prompt_length
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(
            self.vocab_size // 2, (self.prompt_length,), generator=generator
        ), index


class PromptData(lightning.LightningDataModule):
    """Prompts for `GRPO`."""

    def __init__(
        self, batch_size: int, vocab_size: int, prompt_length: int, num_samples: int = 65536
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        h = self.hparams
        return DataLoader(
            Prompts(h.vocab_size, h.prompt_length, h.num_samples), h.batch_size, drop_last=True
        )

    def example_batch(self) -> tuple[Tensor, Tensor]:
        """A batch of the right shapes."""
        h = self.hparams
        return torch.zeros(h.batch_size, h.prompt_length, dtype=torch.int64), torch.arange(
            h.batch_size
        )
