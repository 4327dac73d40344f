"""Tokens: padding, packed sequences, preferences, experts, alignment."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equality.programs.basic import Program
from torch import Tensor, nn

VOCABULARY = 11


def _tokens(generator: torch.Generator, num: int = 4, length: int = 6) -> Tensor:
    return torch.randint(1, VOCABULARY, (num, length), generator=generator)


class Attention(nn.Module):
    """Self-attention with a mask [B, 1 or heads, S, S] of what each token sees."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        return x + self.out(h.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """A small causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.attention = Attention()
        self.head = nn.Linear(8, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.attention(self.embedding(ids), is_causal=True))


class CausalWithPadding(Program):
    """A mean over the tokens that are no padding: ranks have different numbers of them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        ids = _tokens(generator)
        length = torch.randint(2, 7, (4,), generator=generator)
        labels = ids.masked_fill(torch.arange(6) >= length[:, None], -100)
        return {"input_ids": ids, "labels": labels}

    def loss(self, batch: Any) -> Tensor:
        scores = self.model(batch["input_ids"])[:, :-1]
        labels = batch["labels"][:, 1:]
        return F.cross_entropy(scores.reshape(-1, VOCABULARY), labels.reshape(-1))


class TokensPerBatch(Program):
    """A sum divided by the number of tokens, which is counted by `sum().item()`-free code."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()

    example = staticmethod(CausalWithPadding.example)

    def loss(self, batch: Any) -> Tensor:
        scores = self.model(batch["input_ids"])
        labels = batch["labels"]
        counts = (labels != -100).sum()
        total = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
        self.log("tokens", counts.double())
        return total / counts


class PackedSequences(Program):
    """One row of several documents: attention stays within a document."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, 8), nn.Embedding(12, 8)
        self.attention, self.head = Attention(), nn.Linear(8, VOCABULARY)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        document = torch.randint(0, 2, (1, 12), generator=generator).cumsum(1)
        return {"ids": _tokens(generator, 1, 12), "document": document}

    def loss(self, batch: Any) -> Tensor:
        ids, document = batch["ids"], batch["document"]
        is_same = document[:, None, :, None] == document[:, None, None, :]
        sees = is_same & torch.ones(12, 12, dtype=torch.bool, device=self.device).tril()
        start = (document[:, :, None] > document[:, None, :]).sum(-1)
        position = torch.arange(12, device=self.device)[None] - start
        h = self.embedding(ids) + self.positions(position)
        scores = self.head(self.attention(h, sees))
        is_inside = document[:, 1:] == document[:, :-1]
        losses = F.cross_entropy(scores[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        return (losses * is_inside).sum() / is_inside.sum()


class RewardModel(Program):
    """Chosen before rejected answers, scored at their last token."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.value = Decoder(), nn.Linear(VOCABULARY, 1, bias=False)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "chosen": _tokens(generator),
            "rejected": _tokens(generator),
            "last": torch.randint(1, 6, (8,), generator=generator).view(4, 2),
        }

    def loss(self, batch: Any) -> Tensor:
        ids = torch.cat([batch["chosen"], batch["rejected"]])
        values = self.value(self.model(ids)).squeeze(-1)
        last = batch["last"].T.reshape(-1)
        scores = values.gather(1, last[:, None]).squeeze(1)
        chosen, rejected = scores.chunk(2)
        self.log("accuracy", (chosen > rejected).double().mean(), sync_dist=True)
        return -F.logsigmoid(chosen - rejected).mean()


class DirectPreference(Program):
    """DPO: sums of log-probabilities against a frozen reference model."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = Decoder(), Decoder()
        self.reference.requires_grad_(False)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        mask = torch.rand(8, 6, generator=generator) > 0.3
        return {"ids": _tokens(generator, 8), "mask": mask}

    def loss(self, batch: Any) -> Tensor:
        def total(model: nn.Module) -> Tensor:
            shares = model(batch["ids"])[:, :-1].log_softmax(-1)
            chosen = shares.gather(2, batch["ids"][:, 1:, None]).squeeze(2)
            return (chosen * batch["mask"][:, 1:]).sum(1)

        with torch.no_grad():
            reference = total(self.reference)
        margin = 0.5 * (total(self.policy) - reference)
        chosen, rejected = margin[0::2], margin[1::2]
        self.log("margin", (chosen - rejected).mean())
        return -F.logsigmoid(chosen - rejected).mean()


class CapacityExperts(Program):
    """Experts with a capacity: a token's place is counted over the rank's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gate = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 8, 12) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 12, 8) * 0.2)
        self.head = nn.Linear(8, VOCABULARY)

    example = staticmethod(_tokens)

    def loss(self, batch: Any) -> Tensor:
        x = self.embedding(batch).flatten(0, 1)
        logits = self.gate(x)
        shares = logits.softmax(-1)
        weight, chosen = shares.max(-1)
        is_chosen = F.one_hot(chosen, 4).to(x.dtype)
        place = (is_chosen.cumsum(0) - 1) * is_chosen
        fits = is_chosen * (place < 8)
        slot = F.one_hot(place.sum(-1).long().clamp(max=7), 8).to(x.dtype)
        dispatch = fits[:, :, None] * slot[:, None, :]
        inputs = torch.einsum("tec,td->ecd", dispatch, x)
        outputs = torch.bmm(F.gelu(torch.bmm(inputs, self.up)), self.down)
        h = x + torch.einsum("tec,ecd->td", dispatch * weight[:, None, None], outputs)
        balance = 4 * (is_chosen.mean(0) * shares.mean(0)).sum()
        stability = logits.logsumexp(-1).pow(2).mean()
        token_loss = F.cross_entropy(self.head(h), batch.flatten())
        return token_loss + 0.1 * balance + 0.01 * stability


class ConnectionistTemporal(Program):
    """CTC with lengths of inputs and targets."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "x": torch.randn(4, 9, 6, generator=generator, dtype=torch.float64),
            "targets": torch.randint(1, 5, (4, 3), generator=generator),
            "lengths": torch.randint(6, 10, (4,), generator=generator),
            "target_lengths": torch.randint(1, 4, (4,), generator=generator),
        }

    def loss(self, batch: Any) -> Tensor:
        shares = self.net(batch["x"]).log_softmax(-1).transpose(0, 1)
        lengths = batch["lengths"], batch["target_lengths"]
        return F.ctc_loss(shares, batch["targets"], *lengths, zero_infinity=True)


class Translation(Program):
    """Encoder and decoder of nn.Transformer with padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.model = nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        source, target = _tokens(generator), _tokens(generator)
        length = torch.randint(3, 7, (4, 1), generator=generator)
        is_padding = torch.arange(6) >= length
        return {"source": source.masked_fill(is_padding, 0), "target": target}

    def loss(self, batch: Any) -> Tensor:
        source, target = batch["source"], batch["target"]
        inputs, labels = target[:, :-1], target[:, 1:]
        h = self.model(
            self.embedding(source),
            self.embedding(inputs),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
        )
        scores = self.head(h).transpose(1, 2)
        return F.cross_entropy(scores, labels, label_smoothing=0.1, ignore_index=3)


class TaggedSequences(Program):
    """An LSTM tagger whose loss is each sequence's own mean, then the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.rnn = nn.LSTM(8, 4, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 3)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        mask = torch.arange(6) < torch.randint(1, 7, (4, 1), generator=generator)
        tags = torch.randint(0, 3, (4, 6), generator=generator)
        return {"ids": _tokens(generator), "mask": mask, "tags": tags}

    def loss(self, batch: Any) -> Tensor:
        h, _ = self.rnn(self.embedding(batch["ids"]))
        losses = F.cross_entropy(self.head(h).mT, batch["tags"], reduction="none")
        mask = batch["mask"].to(losses.dtype)
        return ((losses * mask).sum(1) / mask.sum(1)).mean()


PROGRAMS = (
    CausalWithPadding,
    TokensPerBatch,
    PackedSequences,
    RewardModel,
    DirectPreference,
    CapacityExperts,
    ConnectionistTemporal,
    Translation,
    TaggedSequences,
)
