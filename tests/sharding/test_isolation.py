"""Ops that crash or hang are tried without harm to this process, and what they do right is still found out."""

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
from alpa_strategy.sharding.isolation import CrashedRunError, CrashingError, isolated

aten = torch.ops.aten


def found(target, *args):
    return set(map(str, discover(make_call(target, *args), 2)))


def aborts_on_odd_rows(x):
    if x.shape[0] % 2:
        os.abort()
    return x * 2


def segfaults_on_other_rows(x):
    if x.shape[0] != 12:
        ctypes.memset(8, 0, 8)
    return x.exp()


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


def test_a_crash_counts_as_a_refusal():
    assert found(aborts_on_odd_rows, torch.rand(12, 16).requires_grad_()) == {"R->R", "R*->R*", "S1->S1", "P->P"}

    assert found(segfaults_on_other_rows, torch.rand(12, 16)) == {"R->R", "S1->S1"}


@pytest.mark.parametrize(
    "target", [segfaults_on_other_shapes, torch.ops.alpa_test.exits.default], ids=["segfault", "exit"]
)
def test_an_op_that_always_crashes_is_repeated(target):
    assert found(target, torch.rand(12, 16)) == {"R->R"}


@torch.library.custom_op("alpa_test::dies", mutates_args=())
def dies(x: torch.Tensor) -> torch.Tensor:
    os.abort()


def test_what_cannot_be_tried_is_taken_to_draw_random_numbers():
    meta = TensorMeta((12, 16), torch.float32)
    assert draws_random_numbers(OpCall(torch.ops.alpa_test.dies.default, (Slot(0),), (), (meta,), (meta,)))
    assert not draws_random_numbers(make_call(torch.ops.alpa_test.exits.default, torch.rand(12, 16)))
    assert not draws_random_numbers(make_call(aborts_on_odd_rows, torch.rand(12, 16)))


def test_a_kernel_that_trusts_its_counts():
    """aten.repeat_interleave with an output_size writes as many elements as the counts say, wherever that may be."""
    call = make_call(aten.repeat_interleave.self_Tensor, torch.rand(4, 6), torch.tensor([1, 2, 3, 2]), 0, output_size=8)
    assert list(map(str, discover(call, 2))) == ["R,R->R"]  # it has a rule for more


def runs_until(target, number: int):
    """Which of the runs 0 ... number - 1 were refused."""
    refused = []
    for i in range(number):
        try:
            target(i)
        except CrashedRunError:
            refused.append(i)
    return refused


def test_the_runs_that_crash_are_the_ones_refused():
    assert isolated(lambda i: os.abort() if i in (2, 5) else i, lambda target: runs_until(target, 8)) == [2, 5]
    with pytest.raises(CrashingError, match="SIGABRT"):
        isolated(lambda i: os.abort(), lambda target: runs_until(target, 100))


def test_a_hang_ends_in_time():
    started = time.monotonic()
    hanging = isolated(lambda i: time.sleep(60) if i == 1 else i, lambda t: runs_until(t, 3), seconds_per_run=0.5)
    assert hanging == [1]
    with pytest.raises(CrashingError, match="hangs"):
        isolated(lambda i: time.sleep(60), lambda target: runs_until(target, 100), seconds_per_run=0.2)
    assert time.monotonic() - started < 20


def test_an_experiment_that_fails_says_how():
    def broken(target):
        raise KeyError("what went wrong")

    with pytest.raises(RuntimeError, match="what went wrong"):
        isolated(aten.exp.default, broken)
