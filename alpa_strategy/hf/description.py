"""What a checkpoint stores of a module's Hugging Face models, so that `alpa export --hf` can build
them again: class, configuration and adapters, as plain texts.
"""

import json
import sys
from typing import Any

import torch
from torch import nn

from alpa_strategy.errors import CheckpointError
from alpa_strategy.hf.config_text import config_fields
from alpa_strategy.hf.libraries import library

# Entry of a checkpoint.
ENTRY = "hugging_face"


def add_descriptions(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Add the descriptions of a module's Hugging Face models to a checkpoint of it, if there are
    any and it has a `state_dict`.
    """
    descriptions = describe(module)
    if descriptions and "state_dict" in checkpoint:
        checkpoint[ENTRY] = descriptions


def describe(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return name of a submodule -> its description, for the outermost models of Hugging Face in
    `module`; not for `module` itself.

    Empty if transformers has not been imported.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return {}

    descriptions: dict[str, dict[str, Any]] = {}
    for path, child in module.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in descriptions)
        if not path or is_inside:
            continue
        description = _description(child, transformers)
        if description is not None:
            descriptions[path] = description
    return descriptions


def _description(module: nn.Module, transformers: Any) -> dict[str, Any] | None:
    """Return the description of a model of transformers, perhaps with adapters of peft; None for
    any other module.

    Args:
        transformers: the library.
    """
    peft = sys.modules.get("peft")
    adapters = {}
    if peft is not None and isinstance(module, peft.PeftModel):
        for name, config in module.peft_config.items():
            adapters[name] = json.dumps(config.to_dict(), default=_plain)
        module = module.get_base_model()
    if not isinstance(module, transformers.PreTrainedModel):
        return None

    generation = getattr(module, "generation_config", None)
    return {
        "class": type(module).__name__,
        "config": module.config.to_json_string(use_diff=False),
        "generation_config": None if generation is None else generation.to_json_string(),
        "source": getattr(module.config, "_name_or_path", ""),
        "adapters": adapters,
    }


def _plain(value: Any) -> Any:
    """Return a value of JSON in place of one that JSON does not have: a list for a set, a text for
    an enum and others.
    """
    return sorted(value) if isinstance(value, set) else str(getattr(value, "value", value))


def rebuild(description: dict[str, Any]) -> nn.Module:
    """Return the described model on the meta device.

    Args:
        description: one of `describe`.

    Raises:
        SetupError: transformers or peft is not installed.
        CheckpointError: transformers has no such class.
    """
    transformers = library("transformers")
    model_class = getattr(transformers, description["class"], None)
    if model_class is None:
        raise CheckpointError(
            f"transformers {transformers.__version__} has no class {description['class']}",
            "install the version with which the model was trained",
        )

    config = model_class.config_class.from_dict(config_fields(description["config"]))
    config._name_or_path = description["source"]
    with torch.device("meta"):
        model = model_class(config)
        generation = description["generation_config"]
        if generation is not None:
            fields = json.loads(generation)
            model.generation_config = transformers.GenerationConfig.from_dict(fields)
        return _with_adapters(model, description["adapters"])


def _with_adapters(model: nn.Module, adapters: dict[str, str]) -> nn.Module:
    """Return the model with its adapters around it; the model itself if there are none. SetupError
    without peft.

    Args:
        model: of transformers.
        adapters: name -> configuration of peft as JSON, as of `_description`.
    """
    for name, text in adapters.items():
        peft = library("peft")
        fields = json.loads(text)
        config_class = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(fields["peft_type"])]
        config = config_class.from_peft_type(**fields)
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, adapter_name=name)
    return model
