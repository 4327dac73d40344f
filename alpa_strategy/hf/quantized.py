"""Weights that the library would quantize while it loads them: refused, as they have no shards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alpa_strategy.errors import SetupError
from alpa_strategy.hf.libraries import library


def check_not_quantized(path: str | Path, settings: Mapping[str, Any]) -> None:
    """Check that neither the call nor the configuration asks for quantized weights.

    Args:
        path: folder or name of the model.
        settings: of `from_pretrained`.

    Raises:
        SetupError: the weights are quantized (4-bit and 8-bit bases of bitsandbytes, GPTQ, ...).
    """
    asked = [name for name in ("load_in_4bit", "load_in_8bit") if settings.get(name)]
    if settings.get("quantization_config") is not None:
        asked.append("quantization_config")
    if not asked:
        config_class = library("transformers").PreTrainedConfig
        fields, _ = config_class.get_config_dict(path)
        if fields.get("quantization_config"):
            asked.append(f"quantization_config in the configuration of {path}")

    if asked:
        raise SetupError(
            f"{asked[0]}: quantized weights (bitsandbytes, GPTQ, ...) are packed in blocks that do"
            " not follow a matrix's dims: they cannot be sharded",
            "load the weights in bfloat16 (dtype=torch.bfloat16); shards over the ranks take the"
            " place of quantization",
        )
