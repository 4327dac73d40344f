"""The step that trains a language model of Hugging Face, on the meta device: next-token loss on
packed sequences. Nothing takes memory.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.nn.functional import cross_entropy

from alpa_strategy.errors import OptionError
from alpa_strategy.fit.request import PRECISIONS, PREFIX, FitRequest, config_object
from alpa_strategy.hf.libraries import library

# Auto classes that are tried in turn, each with the mapping of the models that it has.
_AUTO_CLASSES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
}

# Experts as one grouped matmul, which plans can shard by experts and by rows.
_EXPERTS = "grouped_mm"


class LanguageModel(lightning.LightningModule):
    """A model of transformers and its training step. A batch is (tokens, targets), [B, T] each."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross entropy over the targets. An encoder-decoder gets the tokens on
        both sides.

        Args:
            batch: (tokens, targets), [batch, time] each.
        """
        tokens_BT, targets_BT = batch
        inputs = {"input_ids": tokens_BT, "use_cache": False}
        if self.model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = tokens_BT
        logits_BTV = self.model(**inputs).logits
        return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def build_module(request: FitRequest) -> LanguageModel:
    """Return the model of a request on the meta device.

    Raises:
        OptionError: it is no language model, or transformers cannot build it.
        SetupError: transformers or peft is not installed.
    """
    config = config_object(request)
    auto_class = _auto_class(config, request)
    dtype = getattr(torch, PRECISIONS[request.precision][0])
    config.use_cache = False
    try:
        with torch.device("meta"):
            model = auto_class.from_config(config, dtype=dtype)
    # A model's own code may raise anything about a configuration that it cannot build.
    except Exception as error:
        raise OptionError(
            f"{PREFIX}{request.source}: transformers cannot build this model: {error}",
            "check the values of the configuration",
        ) from error
    model.train()
    if hasattr(model, "set_experts_implementation") and _has_experts(config):
        model.set_experts_implementation(_EXPERTS)
    if request.lora_rank is not None:
        model = _with_adapters(model, request.lora_rank)
    return LanguageModel(model)


def example_batch(request: FitRequest) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets) of a step of all devices, on the meta device."""
    shape = request.batch_size, request.sequence_length
    tokens_BT = torch.empty(shape, dtype=torch.int64, device="meta")
    return tokens_BT, torch.empty_like(tokens_BT)


def autocast_of(precision: str) -> Callable[[], AbstractContextManager]:
    """Return the function that makes the context of a step in the Trainer's `precision`, on the
    CPU; one without effect for other precisions.
    """
    plugins: dict[str, Callable[[], Precision]] = {
        "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
        "16-mixed": lambda: MixedPrecision("16-mixed", "cpu"),
        "bf16-true": lambda: HalfPrecision("bf16-true"),
    }
    return plugins.get(precision, Precision)().train_step_context


def _auto_class(config: Any, request: FitRequest) -> Any:
    """Return the auto class of transformers that builds a language model of this configuration.

    Args:
        config: of transformers.
        request: for the message.

    Raises:
        OptionError: the model is no language model.
        SetupError: transformers is not installed.
    """
    transformers = library("transformers")
    for name, mapping in _AUTO_CLASSES.items():
        if type(config) in getattr(transformers, mapping):
            return getattr(transformers, name)
    raise OptionError(
        f"{PREFIX}{request.source}: a {config.model_type} is no language model that predicts the"
        " next token",
        "give one of AutoModelForCausalLM or AutoModelForSeq2SeqLM; plan other models by a recipe",
    )


def _has_experts(config: Any) -> bool:
    """Whether a configuration names a number of experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return any(getattr(config, name, None) for name in names)


def _with_adapters(model: torch.nn.Module, rank: int) -> torch.nn.Module:
    """Return the model, changed in place, with LoRA adapters at all linear layers but the output
    layer; the rest is frozen. SetupError without peft.
    """
    peft = library("peft")
    settings = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        adapted: torch.nn.Module = peft.get_peft_model(model, settings)
    return adapted
