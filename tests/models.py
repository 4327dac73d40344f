"""Small LightningModules that the tests share: MLP, GPT, LLaMA-style, BERT-style, ConvNet.

Ordinary user code: nothing here knows of alpa_strategy. Sizes are tiny by default; `example_batch`
makes seeded data.
"""

from __future__ import annotations

from itertools import pairwise

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TestModel(pl.LightningModule):
    """Base: the optimizer is chosen by name, `example_batch` makes one batch."""

    __test__ = False  # not a test class, whatever its name says to pytest

    def __init__(self, optimizer: str = "adamw", lr: float = 1e-2) -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.lr = lr

    def configure_optimizers(self) -> torch.optim.Optimizer:
        match self.optimizer_name:
            case "adamw":
                return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)
            case "sgd":
                return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        raise ValueError(f"optimizer {self.optimizer_name!r} is neither 'adamw' nor 'sgd'")

    def example_batch(self, batch_size: int, generator: torch.Generator | None = None) -> object:
        raise NotImplementedError


class MLP(TestModel):
    """Linear, GELU, linear; mean squared error. Batch: (x [B, d_in], y [B, d_out])."""

    def __init__(
        self,
        d_in: int = 8,
        d_hidden: int = 16,
        d_out: int = 4,
        num_layers: int = 2,
        optimizer: str = "adamw",
        lr=1e-2,
    ) -> None:
        super().__init__(optimizer, lr)
        self.d_in, self.d_out = d_in, d_out
        sizes = [d_in, *[d_hidden] * (num_layers - 1), d_out]
        layers: list[nn.Module] = []
        for i, (a, b) in enumerate(pairwise(sizes)):
            layers += [nn.Linear(a, b)] if i == len(sizes) - 2 else [nn.Linear(a, b), nn.GELU()]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        dtype = self.net[0].weight.dtype
        x = torch.randn(batch_size, self.d_in, generator=generator, dtype=dtype)
        y = torch.randn(batch_size, self.d_out, generator=generator, dtype=dtype)
        return x, y


def split_heads(x_BTD: Tensor, num_heads: int) -> Tensor:
    """[B, T, D] -> [B, H, T, K] with D = H * K."""
    B, T, D = x_BTD.shape
    return x_BTD.view(B, T, num_heads, D // num_heads).transpose(1, 2)


def merge_heads(x_BHTK: Tensor) -> Tensor:
    """[B, H, T, K] -> [B, T, D] with D = H * K."""
    B, H, T, K = x_BHTK.shape
    return x_BHTK.transpose(1, 2).reshape(B, T, H * K)


class GPTBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, d_model: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout_p = num_heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.qkv(self.ln_1(x_BTD)).split(x_BTD.shape[-1], dim=-1)
        q, k, v = (split_heads(part, self.num_heads) for part in parts)
        p = self.dropout_p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x_BTD = x_BTD + self.dropout(self.proj(merge_heads(y)))
        return x_BTD + self.dropout(self.down(F.gelu(self.up(self.ln_2(x_BTD)))))


class GPT(TestModel):
    """GPT with learned positions and a head tied to the embedding. Batch: (tokens [B, T], targets
    [B, T]).

    `ignore_fraction` of the targets, unevenly over the rows, are -100.
    """

    def __init__(
        self,
        vocab_size: int = 32,
        d_model: int = 16,
        num_heads: int = 4,
        num_layers: int = 2,
        seq_len: int = 8,
        dropout: float = 0.0,
        tied: bool = True,
        ignore_fraction: float = 0.0,
        optimizer: str = "adamw",
        lr: float = 1e-2,
    ) -> None:
        super().__init__(optimizer, lr)
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.ignore_fraction = ignore_fraction
        self.wte, self.wpe = nn.Embedding(vocab_size, d_model), nn.Embedding(seq_len, d_model)
        self.blocks = nn.ModuleList(
            [GPTBlock(d_model, num_heads, dropout) for _ in range(num_layers)]
        )
        self.ln_f = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x = self.wte(tokens_BT) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(self.vocab_size, (batch_size, self.seq_len + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        if self.ignore_fraction:
            share = (
                self.ignore_fraction
                * 2
                * torch.arange(batch_size)[:, None]
                / max(batch_size - 1, 1)
            )
            targets[torch.rand(targets.shape, generator=generator) < share] = -100
        return tokens[:, :-1].contiguous(), targets


class RMSNorm(nn.Module):
    """Root mean square norm, written out as LLaMA code does."""

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d_model)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def apply_rotary(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotate the halves of the last dim."""
    a, b = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-b, a), dim=-1) * sin_TK


class LlamaBlock(nn.Module):
    """RMSNorm, rotary, grouped-query attention, SwiGLU."""

    def __init__(self, d_model: int, num_heads: int, num_kv_heads: int, d_hidden: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.d_head = d_model // num_heads
        self.attention_norm, self.mlp_norm = RMSNorm(d_model), RMSNorm(d_model)
        self.wq = nn.Linear(d_model, num_heads * self.d_head, bias=False)
        self.wk = nn.Linear(d_model, num_kv_heads * self.d_head, bias=False)
        self.wv = nn.Linear(d_model, num_kv_heads * self.d_head, bias=False)
        self.wo = nn.Linear(num_heads * self.d_head, d_model, bias=False)
        self.w1, self.w3 = (
            nn.Linear(d_model, d_hidden, bias=False),
            nn.Linear(d_model, d_hidden, bias=False),
        )
        self.w2 = nn.Linear(d_hidden, d_model, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        h = self.attention_norm(x_BTD)
        q = split_heads(self.wq(h), self.num_heads)
        k, v = (
            split_heads(self.wk(h), self.num_kv_heads),
            split_heads(self.wv(h), self.num_kv_heads),
        )
        q, k = apply_rotary(q, cos_TK, sin_TK), apply_rotary(k, cos_TK, sin_TK)
        k = k.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        v = v.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.wo(merge_heads(y))
        h = self.mlp_norm(x_BTD)
        return x_BTD + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(TestModel):
    """LLaMA-style decoder. Batch: {"input_ids": [B, T], "labels": [B, T]}."""

    def __init__(
        self,
        vocab_size: int = 32,
        d_model: int = 16,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        d_hidden: int = 32,
        num_layers: int = 2,
        seq_len: int = 8,
        optimizer: str = "adamw",
        lr: float = 1e-2,
    ) -> None:
        super().__init__(optimizer, lr)
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self.embed = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(
            [LlamaBlock(d_model, num_heads, num_kv_heads, d_hidden) for _ in range(num_layers)]
        )
        self.norm = RMSNorm(d_model)
        self.output = nn.Linear(d_model, vocab_size, bias=False)
        d_head = d_model // num_heads
        inverse_frequency = 10000.0 ** (-torch.arange(0, d_head, 2) / d_head)
        angles = torch.outer(torch.arange(seq_len), inverse_frequency).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT)
        T = tokens_BT.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        return self.output(self.norm(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits = self(batch["input_ids"])
        loss = F.cross_entropy(logits.view(-1, self.vocab_size), batch["labels"].view(-1))
        self.log_dict({"train_loss": loss, "perplexity": loss.exp()}, on_step=True, on_epoch=False)
        return {"loss": loss}

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        tokens = torch.randint(self.vocab_size, (batch_size, self.seq_len + 1), generator=generator)
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


class BertBlock(nn.Module):
    """Post-norm encoder block with an attention mask."""

    def __init__(self, d_model: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(d_model, d_model) for _ in range(3))
        self.out, self.norm_1 = nn.Linear(d_model, d_model), nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)
        self.norm_2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, bias_B11T: Tensor) -> Tensor:
        q, k, v = (
            split_heads(f(x_BTD), self.num_heads) for f in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias_B11T
        y = self.dropout(scores.softmax(dim=-1)) @ v
        x_BTD = self.norm_1(x_BTD + self.dropout(self.out(merge_heads(y))))
        return self.norm_2(x_BTD + self.dropout(self.down(F.gelu(self.up(x_BTD)))))


class Bert(TestModel):
    """Masked-language-model encoder. Batch: dict of input_ids, token_type_ids, attention_mask,
    labels, all [B, T].

    Labels are -100 except at masked positions, whose number differs from row to row.
    """

    def __init__(
        self,
        vocab_size: int = 32,
        d_model: int = 16,
        num_heads: int = 4,
        num_layers: int = 2,
        seq_len: int = 8,
        dropout: float = 0.0,
        optimizer: str = "adamw",
        lr: float = 1e-2,
    ) -> None:
        super().__init__(optimizer, lr)
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self.tokens = nn.Embedding(vocab_size, d_model, padding_idx=0)
        self.positions = nn.Embedding(seq_len, d_model)
        self.types = nn.Embedding(2, d_model)
        self.norm, self.dropout = nn.LayerNorm(d_model), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            [BertBlock(d_model, num_heads, dropout) for _ in range(num_layers)]
        )
        self.transform, self.transform_norm = nn.Linear(d_model, d_model), nn.LayerNorm(d_model)
        self.decoder = nn.Linear(d_model, vocab_size)
        self.register_buffer("position_ids", torch.arange(seq_len)[None], persistent=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        x = self.tokens(ids) + self.positions(self.position_ids[:, : ids.shape[1]])
        x = self.dropout(self.norm(x + self.types(batch["token_type_ids"])))
        bias = (1.0 - batch["attention_mask"][:, None, None, :].to(x.dtype)) * -1e4
        for block in self.blocks:
            x = block(x, bias)
        logits = self.decoder(self.transform_norm(F.gelu(self.transform(x))))
        loss = F.cross_entropy(
            logits.view(-1, self.vocab_size), batch["labels"].view(-1), ignore_index=-100
        )
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        T = self.seq_len
        ids = torch.randint(1, self.vocab_size, (batch_size, T), generator=generator)
        lengths = torch.randint(T // 2, T + 1, (batch_size, 1), generator=generator)
        mask = (torch.arange(T)[None] < lengths).long()
        masked = torch.rand(batch_size, T, generator=generator) < 0.3
        masked[:, 0] = True  # at least one label in every row
        return {
            "input_ids": ids * mask,
            "token_type_ids": torch.randint(2, (batch_size, T), generator=generator),
            "attention_mask": mask,
            "labels": torch.where(masked & mask.bool(), ids, -100),
        }


class ConvNet(TestModel):
    """Residual convnet with BatchNorm and in-place ReLU. Batch: (images [B, 3, S, S], classes
    [B]).
    """

    def __init__(
        self,
        channels: int = 8,
        num_classes: int = 10,
        image_size: int = 8,
        optimizer: str = "adamw",
        lr: float = 1e-2,
    ) -> None:
        super().__init__(optimizer, lr)
        self.image_size, self.num_classes = image_size, num_classes
        self.stem, self.bn_1 = (
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.conv, self.bn_2 = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x = self.pool(self.relu(self.bn_1(self.stem(x_BCHW))))
        x = self.relu(x + self.bn_2(self.conv(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        logits = self(images)
        loss = F.cross_entropy(logits, classes)
        self.log("train_loss", loss)
        self.log(
            "train_accuracy",
            (logits.argmax(-1) == classes).float().mean(),
            on_step=False,
            on_epoch=True,
        )
        return loss

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        shape = (batch_size, 3, self.image_size, self.image_size)
        images = torch.randn(shape, generator=generator, dtype=self.head.weight.dtype)
        return images, torch.randint(self.num_classes, (batch_size,), generator=generator)


class Spectral(TestModel):
    """Complex linear layers on a spectrum, conjugates and adjoints. Batch: (x [B, 8], y [B,
    10]).
    """

    def __init__(self, optimizer: str = "adamw", lr: float = 1e-2) -> None:
        super().__init__(optimizer, lr)
        self.up, self.down = (
            nn.Linear(*sizes, dtype=torch.complex128) for sizes in ((5, 8), (8, 5))
        )
        self.mix = nn.Parameter(torch.randn(5, 5, dtype=torch.complex128))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        modes = torch.fft.rfft(x)
        hidden = torch.tanh(self.up(modes)).conj() * (1 + 2j)
        found = self.down(hidden).mH.mT @ self.mix.mH + modes * self.mix[0].conj()
        loss = F.mse_loss(torch.view_as_real(found).flatten(1), y) + found.imag.mean()
        self.log("train_loss", loss)
        return loss

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        return tuple(
            torch.randn(batch_size, n, generator=generator, dtype=torch.float64) for n in (8, 10)
        )


class ReluTower(pl.LightningModule):
    """Four linear layers of one width, each with a ReLU. Batch: x [B, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4))
        )

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


MODELS: dict[str, type[TestModel]] = {
    "mlp": MLP,
    "gpt": GPT,
    "llama": Llama,
    "bert": Bert,
    "convnet": ConvNet,
}
MODELS |= {"spectral": Spectral}
