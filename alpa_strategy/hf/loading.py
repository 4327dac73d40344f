"""Weights of Hugging Face models, read where they are stored: `from_pretrained`.

The library builds the model and converts its weights. In `configure_model` nothing is materialized
by that: the ops are recorded (`runtime/deferred.py`), files are read when there is a plan.
"""

from typing import Any


def from_pretrained(path: Any, auto_class: Any, strict: bool = True, **settings: Any) -> Any:
    model, report = auto_class.from_pretrained(path, output_loading_info=True, **settings)
    return model
