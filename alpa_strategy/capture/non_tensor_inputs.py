"""Leaves of the batch that are no tensors (texts, ids, numbers) while the step is captured: which
does it read?

A leaf enters the step as an `UnreadLeaf`, which can be handed on and returned but not looked at.
Looking at one ends the trace; it is taken again with the real value, and the graph is then good for
that value only. All other leaves may change from batch to batch. Containers that torch takes for
leaves (dataclasses, a tokenizer's BatchEncoding) are made known to it by `register_batch_types`, as
Lightning takes such batches apart too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

from torch import Tensor
from torch.utils import _pytree as pytree

ALWAYS_READ = (bool, type(None))  # `is None` and `is True` cannot be watched


class LeafRead(BaseException):
    """The step looks at a leaf. No Exception: the user's own handlers are not meant."""


class UnreadLeaf:
    """Stands for leaf `index` of the batch; whatever is done with it, except handing it on, raises
    LeafRead.
    """

    __slots__ = ("_index", "_seen")

    def __init__(self, index: int, seen: set[int]) -> None:
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_seen", seen)

    def __getattribute__(self, name: str) -> Any:  # `__class__` as well: isinstance is a look
        _look(self)

    def __setattr__(self, name: str, value: Any) -> None:
        _look(self)


def _look(leaf: UnreadLeaf, *_: Any, **__: Any) -> NoReturn:
    """Note that the step reads a leaf, and stop it by raising `LeafRead`."""
    seen = object.__getattribute__(
        leaf, "_seen"
    )  # a bare `except:` of the user's may swallow the exception
    seen.add(object.__getattribute__(leaf, "_index"))
    raise LeafRead


_OPERATIONS = (
    "add radd iadd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul"
    " rmatmul and rand or "
    "ror xor rxor lshift rlshift rshift rrshift neg pos abs invert eq ne lt le gt ge hash bool int"
    " float complex index "
    "str repr format bytes len iter next contains getitem setitem delitem call enter exit round"
    " trunc floor ceil "
    "divmod rdivmod reversed fspath dir length_hint array copy deepcopy reduce reduce_ex"
)
# Python looks for special methods on the class, past `__getattribute__`.
for _name in _OPERATIONS.split():
    setattr(UnreadLeaf, f"__{_name}__", _look)


def index_of(value: Any) -> int | None:
    """Return the index of the batch's leaf for which `value` stands; None if it is no
    `UnreadLeaf`.
    """
    return object.__getattribute__(value, "_index") if type(value) is UnreadLeaf else None


def may_be_unread(leaf: Any) -> bool:
    """Whether a leaf can enter the step as an UnreadLeaf."""
    return not isinstance(leaf, (Tensor, *ALWAYS_READ))


def traced_with_leaves(batch: Any, trace: Callable[[frozenset[int], set[int]], Any]) -> Any:
    """Return the result of `trace(read, seen)` with as few leaves read as possible: it is traced
    anew with those that it turns out to read.

    Args:
        trace: takes the indices of the leaves that enter with their values, and a set to which it
            adds those of others that it reads. Its errors pass on if no more leaves can be read.
    """
    leaves = pytree.tree_flatten_with_path(batch)[0]
    read: frozenset[int] = frozenset()
    while True:
        seen: set[int] = set()
        try:
            result = trace(read, seen)
            if not seen:
                return result
        except LeafRead:
            pass  # `seen` says which
        # The next trace reads more leaves, and ends the same way if they were not to blame.
        except (
            Exception
        ):  # the user's, or of C code that was given an UnreadLeaf and only said that it is no text
            unread = {index for index, (_, leaf) in enumerate(leaves) if may_be_unread(leaf)} - read
            if not unread:
                raise
            seen |= unread
        # Who looks at one item of a list will look at the others.
        lists = {_list_of(*leaves[index]) for index in seen} - {None}
        read |= seen | {index for index, leaf in enumerate(leaves) if _list_of(*leaf) in lists}


def _list_of(path: tuple[Any, ...], leaf: Any) -> tuple[str, type] | None:
    """Return (path of its list, type of the leaf) of a leaf in a list or tuple; None for a leaf
    that is no item of one.
    """
    if path and isinstance(path[-1], pytree.SequenceKey):
        return str(path[:-1]), type(leaf)
    return None


def value_text(value: Any) -> str:
    """Return a value that the step has read as a text; equal texts mean equal values."""
    array = getattr(value, "tobytes", None)
    if array is not None and hasattr(value, "dtype"):
        return f"{value.dtype}{getattr(value, 'shape', '')}{array()!r}"
    return f"{type(value).__qualname__} {value!r}"


def leaves_hold(guards: Sequence[tuple[int, str]], batch: Any) -> bool:
    """Whether the leaves that a step read have the values that it read. guards: (leaf,
    `value_text`).
    """
    if not guards:
        return True
    leaves = pytree.tree_leaves(batch)
    return all(value_text(leaves[index]) == text for index, text in guards)


def register_batch_types(batch: Any) -> None:
    """Register the types of containers in `batch` that torch takes for leaves."""
    while unknown := {type(leaf) for leaf in pytree.tree_leaves(batch) if _is_container(leaf)}:
        for kind in unknown:
            _register(kind)


def _is_container(leaf: Any) -> bool:
    """Return whether a leaf of the pytree has values inside: a dataclass or an unregistered
    mapping.
    """
    if isinstance(leaf, Tensor | type) or type(leaf) in pytree.SUPPORTED_NODES:
        return False
    return is_dataclass(leaf) or isinstance(leaf, Mapping)


def _register(kind: Any) -> None:
    """Register the class `kind`, a dataclass or a mapping, as a pytree node for this process."""
    is_record = is_dataclass(kind)
    key_of: Any = pytree.GetAttrKey if is_record else pytree.MappingKey

    def items_of(value: Any) -> dict[Any, Any]:
        if not is_record:
            return dict(value)
        return {field.name: getattr(value, field.name) for field in fields(kind)}

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        items = items_of(value)
        return list(items.values()), tuple(items)

    def flatten_with_keys(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        items = items_of(value)
        return [(key_of(name), item) for name, item in items.items()], tuple(items)

    def unflatten(values: Any, names: Any) -> Any:
        items = dict(zip(names, values, strict=True))
        if not is_record:
            return kind(items)
        record: Any = object.__new__(kind)
        for name, value in items.items():
            # Works for frozen dataclasses as well.
            object.__setattr__(record, name, value)
        return record

    pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
