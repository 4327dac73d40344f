"""A Lightning checkpoint (nested dicts, lists and tuples) taken apart into tensors in shards and the rest, and back."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.checkpoint.tensors import LocalShards

Path = tuple[str | int, ...]


def take_shards(checkpoint: Any) -> tuple[Any, dict[Path, str], dict[str, LocalShards]]:
    """`checkpoint` with None in the place of every `LocalShards`, where each of them was (its key), and key -> shards.

    One object in several places (a tied weight) has one key. A tensor without elements stays where it is.
    """
    places: dict[Path, str] = {}
    shards: dict[str, LocalShards] = {}
    keys: dict[int, str] = {}

    def visit(path: Path, value: LocalShards) -> Any:
        if value.numel() == 0:
            return torch.empty(value.shape, dtype=value.dtype)
        key = keys.setdefault(id(value), ".".join(map(str, path)))
        places[path], shards[key] = key, value
        return None

    return _mapped(checkpoint, (), LocalShards, visit), places, shards


def put_tensors(rest: Any, places: Mapping[Path, str], tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `take_shards`, with `tensors` by key; changes `rest` where it can."""
    for path, key in places.items():
        owner = rest
        for step in path[:-1]:
            owner = owner[step]
        owner[path[-1]] = tensors[key]
    return rest


def map_tensors(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """`tree` with `change(leaf)` in the place of every leaf of class `kind`."""
    return _mapped(tree, (), kind, lambda _, leaf: change(leaf))


def to_bytes(rest: Any, places: Mapping[Path, str]) -> bytes | Exception:
    """What `from_bytes` reads, or why `rest` cannot be stored."""
    buffer = io.BytesIO()
    try:
        torch.save({"rest": rest, "places": [(list(path), key) for path, key in places.items()]}, buffer)
    except Exception as error:  # whatever pickle of the user's objects raises; the caller raises it on all ranks
        return error
    return buffer.getvalue()


def from_file(path: Any, weights_only: bool | None) -> tuple[Any, dict[Path, str]]:
    """(rest, places) of a stored checkpoint, as `torch.load(..., weights_only)` reads it."""
    stored = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    return stored["rest"], {tuple(place): key for place, key in stored["places"]}


def _mapped(value: Any, path: Path, kind: type, change: Callable[[Path, Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(path, value)
    if isinstance(value, dict):
        items = {key: _mapped(item, (*path, key), kind, change) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        copy = value.copy()  # keeps its class (OrderedDict, with the `_metadata` of a state dict)
        copy.update(items)
        return copy
    if type(value) is list:
        return [_mapped(item, (*path, i), kind, change) for i, item in enumerate(value)]
    return value
