"""Hugging Face models: weights in, weights out."""

from alpa_strategy.hf.loading import from_pretrained

__all__ = ["from_pretrained"]
