"""Hugging Face models: weights in (`from_pretrained`), weights out (`HFCheckpoint`,
`trainer.strategy.save_pretrained`). transformers, safetensors and peft are optional.
"""

from alpa_strategy.hf.callback import HFCheckpoint
from alpa_strategy.hf.loading import from_pretrained

__all__ = ["HFCheckpoint", "from_pretrained"]
