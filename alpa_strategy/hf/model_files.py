"""Files beside the weights of a saved model: tokenizer and processor, and a model card."""

import shutil
from pathlib import Path
from typing import Any

from alpa_strategy.hf.libraries import library

# Files of tokenizers and processors, by the names that the library gives them.
PROCESSING_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "chat_template.jinja",
    "chat_template.json",
    "normalizer.json",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
)

MODEL_CARD = """---
library_name: {library}
tags: []
---

# {title}

Saved by `alpa_strategy` from a training with PyTorch Lightning.
"""


def copy_processing_files(model: Any, folder: Path) -> None:
    """Copy the files of tokenizer and processor from where the model was loaded, if it was; files
    that are in `folder` stay.

    Nothing is downloaded: files of a name of the hub come from the local cache.
    """
    source = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not source:
        return

    cached_file = library("transformers.utils").cached_file
    for name in PROCESSING_FILES:
        cached_path = cached_file(
            source,
            name,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if cached_path is not None and not (folder / name).exists():
            shutil.copyfile(cached_path, folder / name)


def write_model_card(folder: Path) -> None:
    """Write a stub of a model card into a model's folder, unless it has one."""
    card = folder / "README.md"
    if card.exists():
        return

    is_adapter = (folder / "adapter_config.json").exists()
    text = MODEL_CARD.format(
        library="peft" if is_adapter else "transformers",
        title=folder.name.removeprefix(".").removesuffix(".saving"),
    )
    card.write_text(text)
