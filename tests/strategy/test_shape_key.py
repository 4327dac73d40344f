"""Batches with equal keys may be served by one program; all others may not."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from alpa_strategy.capture.non_tensor_inputs import register_batch_types
from alpa_strategy.lightning.shape_key import keyed_leaves, shape_key

Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    """A container that torch does not know before a batch brings it."""

    image: torch.Tensor
    name: str


def rows(count: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(count, 3, dtype=dtype)


BATCHES = [
    rows(),
    None,
    [],
    [rows(), rows(4)],
    (rows(), (rows(4), [rows()])),
    {"x": rows(), "names": ["a", "b"], "none": None, "flag": True, "count": 3},
    Pair(rows(), {"x": rows(4)}),
    OrderedDict(x=rows(), y=Pair(rows(), 1.5)),
    [Record(rows(), "a"), {"inner": Record(rows(4), "b")}],
    [object(), rows()],
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_leaves_are_those_of_pytree_in_its_order(batch: Any) -> None:
    key, leaves = keyed_leaves(batch)
    expected = pytree.tree_leaves(batch)
    assert len(leaves) == len(expected)
    assert all(leaf is other for leaf, other in zip(leaves, expected, strict=True))
    assert key == shape_key(batch)
    assert hash(key) == hash(shape_key(batch))


def test_no_two_kinds_have_one_key() -> None:
    keys = [shape_key(batch) for batch in BATCHES]
    assert len(set(keys)) == len(BATCHES)


@pytest.mark.parametrize(
    ("batch", "other"),
    [
        ([rows()], (rows(),)),
        ([rows()], [rows(4)]),
        ([rows()], [rows(dtype=torch.float64)]),
        ([rows()], [rows(), rows()]),
        ([rows()], [[rows()]]),
        ({"x": rows()}, {"y": rows()}),
        ({"x": rows(), "flag": True}, {"x": rows(), "flag": False}),
        ({"x": rows(), "mask": None}, {"x": rows(), "mask": rows()}),
        ([rows(), "text"], [rows(), 3]),
        (Pair(rows(), rows()), (rows(), rows())),
        (Record(rows(), "a"), Record(rows(4), "a")),
    ],
    ids=[
        "container",
        "shape",
        "dtype",
        "count",
        "nesting",
        "name",
        "flag",
        "none",
        "type of a leaf",
        "named tuple",
        "record",
    ],
)
def test_a_difference_is_seen(batch: Any, other: Any) -> None:
    assert shape_key(batch) != shape_key(other)


def test_values_that_a_step_may_leave_unread_are_in_no_key() -> None:
    assert shape_key([rows(), "a", 1]) == shape_key([rows(), "b", 2])
    assert shape_key(Record(rows(), "a")) == shape_key(Record(rows(), "b"))


def test_a_type_registered_later_is_a_container_then() -> None:
    @dataclass
    class Later:
        image: torch.Tensor

    batch = [Later(rows())]
    leaf_count = len(keyed_leaves(batch)[1])
    register_batch_types(batch)
    assert leaf_count == len(pytree.tree_leaves(batch)) == 1
    assert keyed_leaves(batch)[1][0] is batch[0].image
