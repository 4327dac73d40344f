"""The states of all default random generators of this process, as data that a checkpoint can hold."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def random_state() -> dict[str, Any]:
    """States of Python's, NumPy's and PyTorch's default generators: tensors, numbers and strings only."""
    name, keys, position, has_gauss, gauss = numpy.random.get_state()
    found = {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_state(state: dict[str, Any]) -> None:
    """Let all default generators go on from `state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
