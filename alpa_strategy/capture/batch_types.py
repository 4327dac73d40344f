"""Batches of dataclasses and of mappings that are no dicts (a tokenizer's BatchEncoding), made known to torch.

Lightning takes such batches apart too. A type is registered when a batch first holds one of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def know_types(batch: Any) -> None:
    """Register the types of containers in `batch` that torch takes for leaves."""
    while unknown := {type(leaf) for leaf in pytree.tree_leaves(batch) if _is_container(leaf)}:
        for kind in unknown:
            _register_dataclass(kind) if is_dataclass(kind) else _register_mapping(kind)


def _is_container(leaf: Any) -> bool:
    if isinstance(leaf, Tensor | type) or type(leaf) in pytree.SUPPORTED_NODES:
        return False
    return is_dataclass(leaf) or isinstance(leaf, Mapping)


def _register_dataclass(kind: type) -> None:
    names = tuple(field.name for field in fields(kind))

    def rebuilt(values: Any, _: Any) -> Any:
        made = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)  # also of a frozen one
        return made

    pytree.register_pytree_node(
        kind,
        lambda value: ([getattr(value, name) for name in names], None),
        rebuilt,
        flatten_with_keys_fn=lambda value: ([(pytree.GetAttrKey(n), getattr(value, n)) for n in names], None),
    )


def _register_mapping(kind: type) -> None:
    pytree.register_pytree_node(
        kind,
        lambda value: ([value[key] for key in value], tuple(value)),
        lambda values, keys: kind(dict(zip(keys, values, strict=True))),  # type: ignore[call-arg]
        flatten_with_keys_fn=lambda value: ([(pytree.MappingKey(key), value[key]) for key in value], tuple(value)),
    )
