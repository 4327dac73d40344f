"""Ops that crash or hang are tried without harm to this process."""

from __future__ import annotations

import ctypes
import os
import time

import pytest
import torch
from sharding.calls import make_call

from alpa_strategy.ir.op import OpCall, Slot, TensorMeta
from alpa_strategy.sharding.discovery import discover
from alpa_strategy.sharding.discovery_trials import draws_random_numbers
from alpa_strategy.sharding.isolation import tried

aten = torch.ops.aten


def found(target, *args):
    return set(map(str, discover(make_call(target, *args), 2)))


def aborts_on_odd_rows(x):
    if x.shape[0] % 2:
        os.abort()
    return x * 2


def segfaults_on_other_shapes(x):
    if x.shape != (12, 16):
        ctypes.memset(8, 0, 8)
    return x.exp()


@torch.library.custom_op("alpa_test::exits", mutates_args=())
def exits(x: torch.Tensor) -> torch.Tensor:
    if x.shape != (12, 16):
        os._exit(0)
    return x.exp()


exits.register_fake(lambda x: torch.empty_like(x))


@pytest.mark.parametrize(
    "target",
    [aborts_on_odd_rows, segfaults_on_other_shapes, torch.ops.alpa_test.exits.default],
    ids=["abort", "segfault", "exit"],
)
def test_an_op_that_crashes_is_repeated(target):
    assert found(target, torch.rand(12, 16)) == {"R->R"}


@torch.library.custom_op("alpa_test::dies", mutates_args=())
def dies(x: torch.Tensor) -> torch.Tensor:
    os.abort()


def test_what_cannot_be_tried_is_taken_to_draw_random_numbers():
    meta = TensorMeta((12, 16), torch.float32)
    assert draws_random_numbers(OpCall(torch.ops.alpa_test.dies.default, (Slot(0),), (), (meta,), (meta,)))
    assert draws_random_numbers(make_call(aborts_on_odd_rows, torch.rand(12, 16)))
    assert not draws_random_numbers(make_call(aten.exp.default, torch.rand(12, 16)))


def test_a_kernel_that_trusts_its_counts():
    """aten.repeat_interleave with an output_size writes as many elements as the counts say, wherever that may be."""
    call = make_call(aten.repeat_interleave.self_Tensor, torch.rand(4, 6), torch.tensor([1, 2, 3, 2]), 0, output_size=8)
    assert list(map(str, discover(call, 2))) == ["R,R->R"]  # it has a rule for more


def test_a_hang_ends_in_time():
    call = make_call(aten.exp.default, torch.rand(12, 16))
    assert tried(call, lambda: time.sleep(60), seconds=0.5) is None


def test_an_experiment_that_fails_says_how():
    def broken():
        raise KeyError("what went wrong")

    with pytest.raises(RuntimeError, match="what went wrong"):
        tried(make_call(aten.exp.default, torch.rand(12, 16)), broken)
