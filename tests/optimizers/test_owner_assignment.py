"""Owners share work and state evenly, and are the same wherever they are computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alpa_strategy.ir.optimizer_info import Reads
from alpa_strategy.ir.owners import assign_owners, matrix_work, needs_owner
from alpa_strategy.ir.plan import ParameterPlan

SHAPES = st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=30)


@given(SHAPES, st.integers(1, 8))
def test_no_device_has_more_than_its_share_and_one_parameter(shapes, num_devices) -> None:
    work = [matrix_work(shape) for shape in shapes]
    elements = [rows * columns for rows, columns in shapes]
    owners = assign_owners(work, elements, num_devices)
    assert owners == assign_owners(work, elements, num_devices)

    loads = [w / sum(work) + e / sum(elements) for w, e in zip(work, elements, strict=True)]
    of_devices = [0.0] * num_devices
    for owner, load in zip(owners, loads, strict=True):
        of_devices[owner] += load
    # Graham's bound for lists in any order.
    assert max(of_devices) <= sum(loads) / num_devices + max(loads) + 1e-9


def test_work_is_that_of_the_flattened_matrix() -> None:
    assert matrix_work((4, 6)) == 4 * 6 * 4
    assert matrix_work((8, 3, 2)) == 8 * 6 * 6
    assert matrix_work((8, 3, 2), num_batch_dims=1) == 8 * 3 * 2 * 2
    assert matrix_work((5,)) == 5


def test_only_shards_that_cannot_be_stepped_alone_need_an_owner() -> None:
    matrices = Reads(frozenset(), 2, is_parameter_wise=True)
    batch = Reads(frozenset({0}), 3, is_parameter_wise=True)
    elements = Reads(frozenset({0, 1}), 2, is_parameter_wise=True)
    coupled = Reads(frozenset(), 2, is_parameter_wise=False)
    for text in ("R*", "G0", "S1"):
        assert needs_owner(ParameterPlan.parse(text), matrices)
        assert not needs_owner(ParameterPlan.parse(text), elements)
        assert not needs_owner(ParameterPlan.parse(text), coupled)
    assert not needs_owner(ParameterPlan.parse("S0"), batch)
    assert not needs_owner(ParameterPlan.parse("R* S0"), batch)
    assert needs_owner(ParameterPlan.parse("S0 S1"), batch)
