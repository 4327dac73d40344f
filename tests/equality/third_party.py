"""Modules of other libraries, each in a LightningModule of a few lines, and modules as users write
them.

Hugging Face models come from their configuration with random weights: nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from equality.harness import record_model
from equality.own_precision import in_float64
from torch import Tensor, nn

from alpa_strategy import register_sharding

VOCAB, LENGTH = 33, 8


class Wrapped(pl.LightningModule):
    """Few lines, as users write them: a model, a step, an optimizer."""

    def __init__(self, optimizer: str = "adamw", **kwargs: Any) -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.build(**kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.01)

    def example_batch(self, num_rows: int, generator: torch.Generator | None = None) -> Any:
        return torch.randint(VOCAB, (num_rows, LENGTH), generator=generator)


class HuggingFaceLM(Wrapped):
    """Any `transformers` language model. The loss is the user's: the library's own rounds the
    logits to float32.
    """

    def build(
        self,
        model: str,
        config: str,
        experts: str | None = None,
        float64: bool = False,
        **settings: Any,
    ) -> None:
        import transformers

        cls = getattr(transformers, model)
        settings_of_model = getattr(transformers, config)(vocab_size=VOCAB, **settings)
        self.model = (in_float64(cls) if float64 else cls)(settings_of_model).train()
        self.options = {"output_router_logits": True} if experts else {}
        if experts:
            self.model.set_experts_implementation(experts)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        inputs = {"input_ids": batch["ids"], "attention_mask": batch["mask"]}
        if self.model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = batch["ids"].flip(1)
        output = self.model(**inputs, **self.options)
        loss = F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())
        if (auxiliary := getattr(output, "aux_loss", None)) is not None:
            loss = loss + 0.1 * auxiliary
        self.log("loss", loss)
        return loss

    def example_batch(self, num_rows: int, generator: torch.Generator | None = None) -> Any:
        ids = torch.randint(1, VOCAB, (num_rows, LENGTH), generator=generator)
        labels = ids.clone()
        # As many targets in every row as in the next would hide a mean of means.
        labels[
            torch.rand(labels.shape, generator=generator)
            < torch.linspace(0, 0.6, num_rows).unsqueeze(1)
        ] = -100
        labels[:, 1] = ids[:, 1]
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (num_rows, 1), generator=generator)
        return {"ids": ids, "labels": labels, "mask": (torch.arange(LENGTH) < lengths).long()}


class HuggingFaceViT(Wrapped):
    """Image classification; the loss is the user's."""

    def build(self, **settings: Any) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        self.model = ViTForImageClassification(
            ViTConfig(image_size=8, patch_size=4, num_labels=5, **settings)
        ).train()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        logits = self.model(pixel_values=images).logits
        self.log("accuracy", (logits.argmax(-1) == classes).double().mean())
        return F.cross_entropy(logits, classes)

    def example_batch(self, num_rows: int, generator: torch.Generator | None = None) -> Any:
        return _images(num_rows, generator), torch.randint(5, (num_rows,), generator=generator)


def _images(num_rows: int, generator: torch.Generator | None) -> Tensor:
    return torch.randn(num_rows, 3, 8, 8, generator=generator, dtype=torch.get_default_dtype())


_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_EXPERTS = {**_SIZES, "num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 4}
_EXPERTS["experts"] = "batched_mm"  # the default, grouped_mm, has no float64 kernel in PyTorch

HUGGING_FACE: dict[str, tuple[type[Wrapped], dict[str, Any]]] = {
    "gpt2": (
        HuggingFaceLM,
        {
            "model": "GPT2LMHeadModel",
            "config": "GPT2Config",
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 16,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "llama": (
        HuggingFaceLM,
        {"model": "LlamaForCausalLM", "config": "LlamaConfig", "num_key_value_heads": 2, **_SIZES},
    ),
    "bert": (
        HuggingFaceLM,
        {"model": "BertForMaskedLM", "config": "BertConfig", **_SIZES, **_NO_DROPOUT},
    ),
    "t5": (
        HuggingFaceLM,
        {
            "model": "T5ForConditionalGeneration",
            "config": "T5Config",
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 20,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": (
        HuggingFaceLM,
        {
            "model": "BartForConditionalGeneration",
            "config": "BartConfig",
            "d_model": 16,
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 20),
            "dropout": 0.0,
            "max_position_embeddings": 16,
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
    ),
    "vit": (HuggingFaceViT, {**_SIZES, **_NO_DROPOUT}),
    "mixtral": (
        HuggingFaceLM,
        {
            "model": "MixtralForCausalLM",
            "config": "MixtralConfig",
            "num_local_experts": 4,
            **_EXPERTS,
        },
    ),
    "qwen_moe": (
        HuggingFaceLM,
        {
            "model": "Qwen3MoeForCausalLM",
            "config": "Qwen3MoeConfig",
            "num_experts": 4,
            "moe_intermediate_size": 12,
            **_EXPERTS,
        },
    ),
}


def _variant(name: str, suffix: str, **more: Any) -> None:
    model, settings = HUGGING_FACE[name]
    HUGGING_FACE[name + suffix] = (model, {**settings, **more})


for _name in ("mixtral", "qwen_moe"):
    _variant(_name, "_float64", float64=True)


class Recurrent(Wrapped):
    """nn.LSTM, nn.GRU and cells over embeddings."""

    def build(self, kind: str = "LSTM") -> None:
        self.embed, self.out = nn.Embedding(VOCAB, 10), nn.Linear(14, VOCAB)
        self.recurrent = getattr(nn, kind)(10, 14, 2, batch_first=True, bidirectional=False)
        self.cell = nn.LSTMCell(14, 14)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        hidden, _ = self.recurrent(self.embed(ids[:, :-1]))
        last, _ = self.cell(hidden[:, -1])
        scores = self.out(hidden)
        loss = F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten()) + last.square().mean()
        lengths = torch.full((len(ids),), hidden.shape[1]), ids[:, 0] % 3
        return loss + F.ctc_loss(
            scores.log_softmax(-1).transpose(0, 1), ids[:, 4:6], *lengths, 0, "mean", True
        )


class SelectiveScan(Wrapped):
    """A state-space block as in Mamba: a causal depthwise convolution, input-dependent steps, a
    scan over time.
    """

    def build(self, width: int = 12, states: int = 4) -> None:
        self.embed, self.out = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.norm, self.gate = nn.RMSNorm(width), nn.Linear(width, 2 * width, bias=False)
        self.conv = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.select = nn.Linear(width, width + 2 * states, bias=False)
        self.a_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))
        self.states = states

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(ids[:, :-1])
        length = x.shape[1]
        u, z = self.gate(self.norm(x)).chunk(2, dim=-1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :length].transpose(1, 2))
        step, b, c = self.select(u).split([u.shape[-1], self.states, self.states], dim=-1)
        step = F.softplus(step)
        decay = torch.exp(step.unsqueeze(-1) * -self.a_log.exp())
        added = (step * u).unsqueeze(-1) * b.unsqueeze(2)
        state, outputs = torch.zeros_like(added[:, 0]), []
        for t in range(length):
            state = decay[:, t] * state + added[:, t]
            outputs.append((state * c[:, t].unsqueeze(1)).sum(-1))
        y = (torch.stack(outputs, 1) + u * self.skip) * F.silu(z)
        return F.cross_entropy(self.out(x + y).flatten(0, 1), ids[:, 1:].flatten())


class _Residual(nn.Module):
    """torchvision's BasicBlock."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.conv2, self.bn2 = (
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.down(x)
        return self.relu(out)


class ResNet(Wrapped):
    """Batch norms over the global batch, in-place ops, label smoothing."""

    def build(self) -> None:
        stem = [
            nn.Conv2d(3, 6, 3, 1, 1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        blocks = [_Residual(6, 6, 1), _Residual(6, 10, 2)]
        self.net = nn.Sequential(
            *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 5)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        return F.cross_entropy(self.net(images), classes, label_smoothing=0.1)

    def example_batch(self, num_rows: int, generator: torch.Generator | None = None) -> Any:
        return _images(num_rows, generator), torch.randint(5, (num_rows,), generator=generator)


class UNet(Wrapped):
    """Down and up with a skip; GroupNorm, transposed convolution, interpolation."""

    def build(self) -> None:
        def block(inside: int, outside: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(2, outside), nn.SiLU(True)
            )

        self.down1 = block(3, 4)
        self.down2 = block(4, 8)
        self.up1 = block(8, 4)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(4, 1, 1)

    def training_step(self, images: Tensor, batch_idx: int) -> Tensor:
        first = self.down1(images)
        second = self.down2(F.max_pool2d(first, 2))
        merged = self.up1(torch.cat([self.up(second), first], 1))
        coarse = F.interpolate(
            F.avg_pool2d(merged, 2), scale_factor=2, mode="bilinear", align_corners=False
        )
        return F.binary_cross_entropy_with_logits(
            self.out(merged + coarse), (images[:, :1] > 0).to(images.dtype)
        )

    def example_batch(self, num_rows: int, generator: torch.Generator | None = None) -> Any:
        return _images(num_rows, generator)


class _StraightThrough(torch.autograd.Function):
    """Rounds forward, scales the gradient backward: not the gradient of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, levels: int) -> tuple[Tensor, None]:
        ctx.save_for_backward(x, weight)
        ctx.levels = levels
        return torch.round(x * levels) / levels * weight, None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad * weight * 0.5, (grad * x).flatten(0, -2).sum(0), None


register_sharding(_StraightThrough, "[*b, d], [d] -> [*b, d]")


@torch.library.custom_op("alpa_tests::rotate", mutates_args=())
def rotate(x: Tensor, shift: int) -> Tensor:
    """Moves every row's elements: rows are independent, which a registered rule says."""
    return torch.roll(x, shift, -1) * x.shape[-1]


rotate.register_fake(lambda x, shift: torch.empty_like(x))
rotate.register_autograd(
    lambda ctx, grad: (torch.roll(grad, -ctx.shift, -1) * grad.shape[-1], None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "shift", inputs[1]),
)


register_sharding("alpa_tests::rotate", "[*b, k!] -> [*b, k!]")


@torch.library.custom_op("alpa_tests::sort_all", mutates_args=())
def sort_all(x: Tensor) -> Tensor:
    """Nothing of it is independent of the rest."""
    return x.flatten().sort().values.view_as(x)


sort_all.register_fake(lambda x: torch.empty_like(x))


class CustomOps(Wrapped):
    """A custom autograd Function and a custom op with registered rules, and an op without."""

    def build(self) -> None:
        self.embed = nn.Embedding(VOCAB, 6)
        self.inside = nn.Linear(6, 10)
        self.out = nn.Linear(10, VOCAB)
        self.scale = nn.Parameter(torch.ones(10))

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.inside(self.embed(ids[:, :-1])))
        rounded, nothing = _StraightThrough.apply(hidden, self.scale, 8)
        assert nothing is None
        hidden = rotate(rounded, 2) + sort_all(hidden.detach())
        return F.cross_entropy(self.out(hidden).flatten(0, 1), ids[:, 1:].flatten())


class Bags(Wrapped):
    """Tables of several ids a row."""

    def build(self, width: int = 8) -> None:
        self.bags = nn.EmbeddingBag(VOCAB, width, mode="mean")
        self.embed = nn.Embedding(VOCAB, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCAB)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(ids[:, :-1]) + self.bags(ids[:, :4]).unsqueeze(1)
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), ids[:, 1:].flatten())


class Indices(Wrapped):
    """Integers, masks and positions: arange, full, one_hot, cumsum, topk, sort, scatter, gather,
    index_add.
    """

    def build(self, width: int = 8) -> None:
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Embedding(LENGTH, width)
        self.out = nn.Linear(8, 5)
        self.register_buffer("seen", torch.zeros(VOCAB))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        rows, length = ids.shape
        self.steps += 1
        self.seen.index_add_(0, ids.flatten(), torch.ones(rows * length, dtype=self.seen.dtype))
        mask = ids > 3
        x = self.embed(ids) + self.position(torch.arange(length).expand(rows, -1)) * mask.unsqueeze(
            -1
        )
        x = x.masked_fill(torch.full((length, 1), False), 0.0).cumsum(1) / (
            mask.cumsum(1) + 1
        ).unsqueeze(-1)
        best, where = x.norm(dim=-1).topk(3, dim=1)
        picked = x.gather(1, where.unsqueeze(-1).expand(-1, -1, x.shape[-1])) * best.softmax(
            -1
        ).unsqueeze(-1)
        spread = torch.zeros_like(x).scatter(1, where.unsqueeze(-1).expand_as(picked), picked)
        order = x.detach().sum(-1).argsort(1)
        hot = F.one_hot(ids % 5, 5).to(x.dtype)
        logits = self.out(spread + x.sort(dim=1).values + x.take_along_dim(order.unsqueeze(-1), 1))
        return (
            -(hot * logits.log_softmax(-1)).sum(-1).mean()
            + logits[torch.arange(rows), 0, ids[:, 0] % 5].mean()
        )


OTHERS: dict[str, tuple[type[Wrapped], dict[str, Any]]] = {
    "lstm": (Recurrent, {}),
    "gru": (Recurrent, {"kind": "GRU"}),
    "scan": (SelectiveScan, {}),
    "resnet": (ResNet, {}),
    "unet": (UNet, {}),
    "custom_ops": (CustomOps, {}),
    "indices": (Indices, {}),
    "bags": (Bags, {}),
}
CASES = {**HUGGING_FACE, **OTHERS}


def record_case(
    name: str, strategy: dict[str, Any] | None, world_size: int, optimizer: str = "adamw"
) -> dict:
    """Five steps of a case of this file; `strategy` None is the plain Trainer's run."""
    model, settings = CASES[name]
    return record_model(model, {**settings, "optimizer": optimizer}, strategy, 5, world_size)
