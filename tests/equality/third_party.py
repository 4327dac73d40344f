"""Modules that nobody here wrote, each wrapped in a LightningModule of a few lines; and what users write themselves.

Hugging Face models come from their configuration with random weights: nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from equality.harness import record_model
from torch import Tensor

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
    """Any `transformers` language model. The loss is the user's: the library's own rounds the logits to float32."""

    def build(self, model: str, config: str, experts: str | None = None, **settings: Any) -> None:
        import transformers

        self.model = getattr(transformers, model)(getattr(transformers, config)(vocab_size=VOCAB, **settings)).train()
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
        labels[torch.rand(labels.shape, generator=generator) < torch.linspace(0, 0.6, num_rows).unsqueeze(1)] = -100
        labels[:, 1] = ids[:, 1]
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (num_rows, 1), generator=generator)
        return {"ids": ids, "labels": labels, "mask": (torch.arange(LENGTH) < lengths).long()}


class HuggingFaceViT(Wrapped):
    """Image classification; the loss is the user's."""

    def build(self, **settings: Any) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        self.model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=5, **settings)).train()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        logits = self.model(pixel_values=images).logits
        self.log("accuracy", (logits.argmax(-1) == classes).double().mean())
        return F.cross_entropy(logits, classes)

    def example_batch(self, num_rows: int, generator: torch.Generator | None = None) -> Any:
        return _images(num_rows, generator), torch.randint(5, (num_rows,), generator=generator)


def _images(num_rows: int, generator: torch.Generator | None) -> Tensor:
    return torch.randn(num_rows, 3, 8, 8, generator=generator, dtype=torch.get_default_dtype())


_SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
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
    "bert": (HuggingFaceLM, {"model": "BertForMaskedLM", "config": "BertConfig", **_SIZES, **_NO_DROPOUT}),
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
    "vit": (HuggingFaceViT, {**_SIZES, **_NO_DROPOUT}),
    "mixtral": (
        HuggingFaceLM,
        {"model": "MixtralForCausalLM", "config": "MixtralConfig", "num_local_experts": 4, **_EXPERTS},
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

CASES = {**HUGGING_FACE}


def record_case(name: str, strategy: dict[str, Any] | None, world_size: int, optimizer: str = "adamw") -> dict:
    """Five steps of a case of this file; `strategy` None is the plain Trainer's run."""
    model, settings = CASES[name]
    return record_model(model, {**settings, "optimizer": optimizer}, strategy, 5, world_size)
