"""Tiny models of `transformers` with random weights, their batches and losses, by name.

Their main weights have more bytes than what is read at once while a module is built
(`deferred.MIN_BYTES`), so that they are deferred.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VOCAB = 512
LENGTH = 12
WIDTH = 64
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True)
class Tiny:
    """A model by its class and configuration, with its inputs."""

    # Names in `transformers`.
    auto_class: str
    config: str
    settings: dict[str, Any]

    # (number of samples, generator) -> a batch.
    batch: Callable[[int, torch.Generator], dict[str, Tensor]]

    # (model, batch) -> the logits.
    logits: Callable[[Any, dict[str, Tensor]], Tensor]

    # Files of at most this size.
    max_shard_size: str = "200KB"

    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """Return the model with random weights."""
        import transformers

        config = getattr(transformers, self.config)(**self.settings)
        torch.manual_seed(11)
        return getattr(transformers, self.auto_class).from_config(config)

    def save(self, folder: Path) -> Path:
        """Save the model with random weights in shards, if it is not there yet."""
        if not (folder / "config.json").exists():
            self.build().save_pretrained(folder, max_shard_size=self.max_shard_size)
        return folder

    def loaded(self, folder: Path) -> Any:
        """Return the model with the weights of a folder, by the library alone."""
        import transformers

        return getattr(transformers, self.auto_class).from_pretrained(folder)

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean loss over the targets; the library's own rounds logits to float32."""
        logits = self.logits(model, batch)
        targets = batch["targets"]
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _tokens(num_samples: int, generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCAB, (num_samples, length), generator=generator)


def _text(num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids = _tokens(num_samples, generator, LENGTH + 1)
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}


def _text_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["input_ids"], use_cache=False).logits


def _translation(num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    target = _tokens(num_samples, generator, LENGTH + 1)
    return {
        "input_ids": _tokens(num_samples, generator),
        "decoder_input_ids": target[:, :-1],
        "targets": target[:, 1:],
    }


def _translation_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(
        input_ids=batch["input_ids"], decoder_input_ids=batch["decoder_input_ids"], use_cache=False
    ).logits


def _images(num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(num_samples, 3, 16, 16, generator=generator, dtype=torch.float32)
    targets = torch.randint(VOCAB, (num_samples, 1), generator=generator)
    return {"pixel_values": pixels, "targets": targets}


def _image_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(pixel_values=batch["pixel_values"].to(model.dtype)).logits.unsqueeze(1)


def _speech(num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    target = _tokens(num_samples, generator, LENGTH + 1)
    features = torch.randn(num_samples, 16, 40, generator=generator, dtype=torch.float32)
    return {
        "input_features": features,
        "decoder_input_ids": target[:, :-1],
        "targets": target[:, 1:],
    }


def _speech_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(
        input_features=batch["input_features"].to(model.dtype),
        decoder_input_ids=batch["decoder_input_ids"],
        use_cache=False,
    ).logits


def _causal(config: str, **settings: Any) -> Tiny:
    return Tiny(
        "AutoModelForCausalLM", config, {**DECODER, **settings}, batch=_text, logits=_text_logits
    )


WITH_EXPERTS = ("mixtral", "qwen_moe")
MODELS = {
    "llama": _causal("LlamaConfig", tie_word_embeddings=False),
    "llama_tied": _causal("LlamaConfig", tie_word_embeddings=True),
    "mixtral": _causal("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen_moe": _causal(
        "Qwen3MoeConfig",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        head_dim=16,
        tie_word_embeddings=False,
    ),
    "gemma": _causal("Gemma2Config", head_dim=16, sliding_window=32),
    "gpt2": Tiny(
        "AutoModelForCausalLM",
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_positions": 64,
            "n_embd": WIDTH,
            "n_layer": 2,
            "n_head": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        batch=_text,
        logits=_text_logits,
    ),
    "t5": Tiny(
        "AutoModelForSeq2SeqLM",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": WIDTH,
            "d_kv": 16,
            "d_ff": 256,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
        },
        batch=_translation,
        logits=_translation_logits,
    ),
    "vit": Tiny(
        "AutoModelForImageClassification",
        "ViTConfig",
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "image_size": 16,
            "patch_size": 4,
            "num_labels": VOCAB,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        batch=_images,
        logits=_image_logits,
    ),
    "whisper": Tiny(
        "AutoModelForSpeechSeq2Seq",
        "WhisperConfig",
        {
            "vocab_size": VOCAB,
            "num_mel_bins": 16,
            "d_model": WIDTH,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "max_source_positions": 20,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "dropout": 0.0,
        },
        batch=_speech,
        logits=_speech_logits,
    ),
}
