"""Op times: FLOP formulas against hand values, the roofline's laws, and its correction by
measurements.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from cost_op_calls import call, tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_strategy.capture.ops import batch_norm_train, cross_entropy_sum
from alpa_strategy.cluster.devices import DeviceSpec
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.flops import op_flops
from alpa_strategy.cost.measured import OpTable
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.cost.roofline import peak_flops
from alpa_strategy.ir.op import OpCall, Slot, TensorMeta
from alpa_strategy.ir.optimizer_info import OptimizerInfo

aten = torch.ops.aten
DEVICE = DeviceSpec("toy", 10**9, 1e9, (("float32", 1e12), ("float16", 8e12)), 0.0, 0.5)
COMPUTE_BOUND = replace(DEVICE, memory_bandwidth=1e30)


def linear(
    batch: int, inputs: int, outputs: int, grads: str = "xwb", dtype: torch.dtype = torch.float32
) -> OpCall:
    """x [batch, inputs], w [outputs, inputs], b [outputs]; `grads` names the operands that require
    grad.
    """
    metas = [
        TensorMeta(shape, dtype, letter in grads)
        for letter, shape in zip(
            "xwb", [(batch, inputs), (outputs, inputs), (outputs,)], strict=True
        )
    ]
    result = TensorMeta((batch, outputs), dtype, bool(grads))
    return OpCall(aten.linear.default, (Slot(0), Slot(1), Slot(2)), (), tuple(metas), (result,))


@pytest.mark.parametrize(
    ("made", "flops"),
    [
        (call(aten.linear.default, tensor(2, 3, 5), tensor(7, 5), tensor(7)), 2 * 2 * 3 * 5 * 7),
        (call(aten.mm.default, tensor(3, 5), tensor(5, 7)), 2 * 3 * 5 * 7),
        (call(aten.matmul.default, tensor(4, 3, 5), tensor(5, 7)), 2 * 4 * 3 * 5 * 7),
        (call(aten.matmul.default, tensor(3, 5), tensor(5)), 2 * 3 * 5),
        (call(aten.matmul.default, tensor(5), tensor(5, 7)), 2 * 5 * 7),
        (call(aten.bmm.default, tensor(4, 3, 5), tensor(4, 5, 7)), 2 * 4 * 3 * 5 * 7),
        (call(aten.addmm.default, tensor(7), tensor(3, 5), tensor(5, 7)), 2 * 3 * 5 * 7),
        (
            call(aten.baddbmm.default, tensor(4, 3, 7), tensor(4, 3, 5), tensor(4, 5, 7)),
            2 * 4 * 3 * 5 * 7,
        ),
        (
            call(aten.einsum.default, "bik,bjk->bij", [tensor(2, 3, 5), tensor(2, 7, 5)]),
            2 * 2 * 3 * 5 * 7,
        ),
        (
            call(aten.einsum.default, "...k,nk->...n", [tensor(2, 3, 5), tensor(7, 5)]),
            2 * 2 * 3 * 5 * 7,
        ),
        (
            call(aten.einsum.default, "...ik,...jk->...ij", [tensor(2, 3, 5), tensor(1, 7, 5)]),
            2 * 2 * 3 * 5 * 7,
        ),
        (
            call(aten.conv2d.default, tensor(2, 3, 8, 8), tensor(4, 3, 3, 3), None, [1, 1], [1, 1]),
            2 * 2 * 64 * 4 * 27,
        ),
        (
            call(
                aten.conv2d.default,
                tensor(2, 4, 8, 8),
                tensor(4, 1, 3, 3),
                None,
                [1, 1],
                [1, 1],
                [1, 1],
                4,
            ),
            2 * 2 * 64 * 4 * 9,
        ),
        (
            call(aten.conv_transpose2d.input, tensor(2, 3, 8, 8), tensor(3, 4, 2, 2), None, [2, 2]),
            2 * 2 * 64 * 3 * 16,
        ),
        (call(aten.relu.default, tensor(3, 5)), 15),
        (call(aten.view.default, tensor(3, 5), [15]), 0),
        (call(aten.dropout.default, tensor(3, 5), 0.5, False), 0),
    ],
    ids=lambda value: value.target_name if isinstance(value, OpCall) else None,
)
def test_flops_by_hand(made: OpCall, flops: float):
    assert op_flops(made) == flops


def test_attention_flops_and_its_causal_half():
    q = tensor(2, 4, 16, 8)
    k = tensor(2, 4, 32, 8)
    v = tensor(2, 4, 32, 8)
    whole = call(aten.scaled_dot_product_attention.default, q, k, v)
    assert op_flops(whole) == 2 * 2 * 4 * 16 * 32 * (8 + 8)
    for causal in (
        call(aten.scaled_dot_product_attention.default, q, k, v, None, 0.0, True),
        call(aten.scaled_dot_product_attention.default, q, k, v, is_causal=True),
    ):
        assert op_flops(causal) == op_flops(whole) / 2


@pytest.mark.parametrize(
    ("grads", "products"), [("xwb", 2), ("wb", 1), ("x", 1), ("", 0), ("b", 0)]
)
def test_backward_is_one_product_per_operand_that_requires_grad(grads: str, products: int):
    forward, backward = RooflineCosts(COMPUTE_BOUND).op_seconds(linear(64, 32, 16, grads))
    assert forward == pytest.approx(2 * 64 * 32 * 16 / 0.5e12)
    assert backward == pytest.approx(products * forward)


def test_time_is_compute_and_memory_and_launch():
    small = linear(1, 64, 64)
    seconds = 2 * 64 * 64 / 0.5e12 + 4 * (64 + 64 * 64 + 64 + 64) / 1e9
    assert RooflineCosts(DEVICE).op_seconds(small)[0] == pytest.approx(seconds)
    assert RooflineCosts(replace(DEVICE, launch_seconds=1.0)).op_seconds(small)[0] == pytest.approx(
        1 + seconds
    )


def test_a_v100s_products_are_as_fast_as_measured():
    """83 TFLOP/s at 8192 (Markidis et al. 2018, figure 6); small products reach less of the
    peak.
    """
    device = ClusterSpec.load("p3_16xlarge_x8").device

    def rate(rows: int, inner: int) -> float:
        made = linear(rows, inner, rows, grads="", dtype=torch.float16)
        return op_flops(made) / RooflineCosts(device).op_seconds(made)[0]

    assert rate(8192, 8192) == pytest.approx(83e12, rel=0.02)
    assert rate(1024, 1024) == pytest.approx(57e12, rel=0.02)
    assert rate(8192, 64) < 0.5 * rate(8192, 8192)


def test_an_efficiency_of_a_kind_and_dtype_stands_before_the_devices():
    device = replace(
        COMPUTE_BOUND,
        efficiencies=(("convolution", (("float32", 0.25),)), ("matmul", (("float16", 1.0),))),
    )
    convolution = call(
        aten.conv2d.default, tensor(2, 3, 8, 8), tensor(4, 3, 3, 3), None, [1, 1], [1, 1]
    )
    for made, before, after in [
        (convolution, 0.5, 0.25),
        (linear(64, 64, 64), 0.5, 0.5),
        (linear(64, 64, 64, dtype=torch.float16), 0.5, 1.0),
    ]:
        seconds = RooflineCosts(COMPUTE_BOUND).op_seconds(made)[0]
        assert RooflineCosts(device).op_seconds(made)[0] == pytest.approx(seconds * before / after)


def test_products_run_at_their_dtypes_peak():
    costs = RooflineCosts(COMPUTE_BOUND)
    full, half = (
        costs.op_seconds(linear(64, 64, 64)),
        costs.op_seconds(linear(64, 64, 64, dtype=torch.float16)),
    )
    assert full[0] == pytest.approx(8 * half[0])


@pytest.mark.parametrize(
    ("dtype", "peak"),
    [(torch.bfloat16, 1e12), (torch.float64, 0.5e12), (torch.int64, 1e12), (torch.float16, 8e12)],
)
def test_a_dtype_without_peak_falls_back(dtype: torch.dtype, peak: float):
    assert peak_flops(DEVICE, dtype) == peak


VIEWS = [
    call(aten.view.default, tensor(4, 6), [24]),
    call(aten.transpose.int, tensor(4, 6), 0, 1),
    call(aten.permute.default, tensor(4, 6), [1, 0]),
    call(aten.unsqueeze.default, tensor(4, 6), 0),
    call(aten._to_copy.default, tensor(4, 6), dtype=torch.float32),
    call(aten.dropout.default, tensor(4, 6), 0.0, True),
]


@pytest.mark.parametrize("made", VIEWS, ids=lambda made: made.target_name)
def test_views_cost_nothing(made: OpCall):
    assert RooflineCosts(replace(DEVICE, launch_seconds=1.0)).op_seconds(made) == (0.0, 0.0)


def test_slicing_is_free_forward_and_writes_all_backward():
    forward, backward = RooflineCosts(DEVICE).op_seconds(
        call(aten.slice.Tensor, tensor(64, 4), 0, 0, 2)
    )
    assert forward == 0
    assert backward == pytest.approx(4 * (64 * 4 + 2 * 4) / 1e9)


def test_an_embedding_reads_rows_not_the_table():
    made = call(aten.embedding.default, tensor(50000, 8), tensor(4, 4, dtype=torch.int64))
    assert RooflineCosts(DEVICE).op_seconds(made)[0] < 4 * 50000 * 8 / 1e9 / 100


def test_a_residual_add_has_a_free_backward_and_a_broadcast_one_has_not():
    costs = RooflineCosts(DEVICE)
    assert costs.op_seconds(call(aten.add.Tensor, tensor(8, 8), tensor(8, 8)))[1] == 0
    assert costs.op_seconds(call(aten.add.Tensor, tensor(8, 8), tensor(8)))[1] > 0


def test_comparisons_have_no_backward():
    assert RooflineCosts(DEVICE).op_seconds(call(aten.argmax.default, tensor(8, 8), 1))[1] == 0


@settings(deadline=None)
@given(
    batch=st.integers(1, 64),
    inputs=st.integers(1, 64),
    outputs=st.integers(1, 64),
    factor=st.integers(2, 4),
)
def test_more_work_never_takes_less_time(batch: int, inputs: int, outputs: int, factor: int):
    costs = RooflineCosts(DEVICE)
    small = costs.op_seconds(linear(batch, inputs, outputs))
    for larger in (
        linear(batch * factor, inputs, outputs),
        linear(batch, inputs * factor, outputs),
        linear(batch, inputs, outputs * factor),
    ):
        assert all(a <= b for a, b in zip(small, costs.op_seconds(larger), strict=True))


@pytest.mark.parametrize(
    "made",
    [
        call(cross_entropy_sum, tensor(8, 10), tensor(8, dtype=torch.int64), None, -100, 0.0),
        call(batch_norm_train, tensor(4, 3, 5), tensor(3), tensor(3), None, None, 0.1, 1e-5),
        call(aten.layer_norm.default, tensor(8, 16), [16], tensor(16), tensor(16)),
        call(aten.softmax.int, tensor(8, 16), -1),
        call(aten.cat.default, [tensor(2, 4), tensor(2, 4)], 0),
        call(aten.sum.default, tensor(8)),
        call(aten.zeros.default, [4, 4]),
    ],
    ids=lambda made: made.target_name,
)
def test_every_op_has_a_cost(made: OpCall):
    forward, backward = RooflineCosts(DEVICE).op_seconds(made)
    assert forward > 0
    assert backward >= 0


def test_the_optimizer_is_bound_by_memory():
    adam, sgd = OptimizerInfo(8.0), OptimizerInfo(0.0)
    assert RooflineCosts(DEVICE).optimizer_seconds(1000, 4, adam) == pytest.approx(
        1000 * (12 + 16) / 1e9
    )
    assert RooflineCosts(DEVICE).optimizer_seconds(1000, 4, sgd) == pytest.approx(1000 * 12 / 1e9)
    assert RooflineCosts(replace(DEVICE, launch_seconds=1.0)).optimizer_seconds(0, 4, adam) == 0


# Measurements


def test_a_measured_call_is_believed():
    table = OpTable()
    table.put("toy", linear(8, 8, 8), 1.5, 2.5)
    table.put("other", linear(9, 8, 8), 7.0, 7.0)
    costs = RooflineCosts(DEVICE, table)
    assert costs.op_seconds(linear(8, 8, 8)) == (1.5, 2.5)
    half = linear(9, 8, 8, dtype=torch.float16)
    assert costs.op_seconds(half) == RooflineCosts(DEVICE).op_seconds(half)


def test_other_shapes_are_scaled_as_their_neighbours_were():
    plain, table = RooflineCosts(DEVICE), OpTable()
    for batch, ratio in ((8, 2.0), (8000, 8.0)):
        forward, backward = plain.op_seconds(linear(batch, 64, 64))
        table.put("toy", linear(batch, 64, 64), ratio * forward, 3 * ratio * backward)
    costs = RooflineCosts(DEVICE, table)
    for batch, low, high in ((1, 2.0, 2.02), (400, 2.5, 6.0), (100000, 7.92, 8.0)):
        forward, backward = plain.op_seconds(linear(batch, 64, 64))
        found = costs.op_seconds(linear(batch, 64, 64))
        assert low * (1 - 1e-9) <= found[0] / forward <= high * (1 + 1e-9)
        assert 3 * low * (1 - 1e-9) <= found[1] / backward <= 3 * high * (1 + 1e-9)


def test_a_shard_is_scaled_from_the_measurement_of_its_own_call():
    """Others had made half of a convolution's rows cost more than all of them, and a plan compute
    it on every rank.
    """
    plain, table = RooflineCosts(DEVICE), OpTable()
    wide, narrow = linear(1024, 64, 64), linear(1024, 512, 8)  # of equal work
    table.put("toy", wide, *(2 * seconds for seconds in plain.op_seconds(wide)))
    table.put("toy", narrow, *(8 * seconds for seconds in plain.op_seconds(narrow)))
    costs = RooflineCosts(DEVICE, table)
    for half, ratio in (
        (linear(512, 64, 64), 2),
        (linear(1024, 64, 32), 2),
        (linear(512, 512, 8), 8),
    ):
        expected = [ratio * seconds for seconds in plain.op_seconds(half)]
        assert costs.op_seconds(half) == pytest.approx(expected, rel=0.05)


def test_a_convolution_is_scaled_as_those_of_its_kernel():
    def convolution(rows, size):
        return call(
            aten.conv2d.default,
            tensor(rows, 8, 16, 16),
            tensor(8, 8, size, size),
            None,
            [1, 1],
            [size // 2] * 2,
        )

    plain, table = RooflineCosts(DEVICE), OpTable()
    for size, ratio in ((1, 8.0), (3, 2.0)):
        table.put(
            "toy",
            convolution(16, size),
            *(ratio * seconds for seconds in plain.op_seconds(convolution(16, size))),
        )
    costs = RooflineCosts(DEVICE, table)
    for size, ratio in ((1, 8.0), (3, 2.0)):
        forward, backward = plain.op_seconds(convolution(8, size))
        assert costs.op_seconds(convolution(8, size)) == pytest.approx(
            (ratio * forward, ratio * backward)
        )


def test_costs_are_cheap_to_ask():
    costs = RooflineCosts(DEVICE)
    calls = [linear(n, 64, 64) for n in range(1, 2001)]
    started = time.process_time()
    for made in calls:
        costs.op_seconds(made)
    first = time.process_time() - started
    assert first / len(calls) < 300e-6  # about 30 us on an idle core


def test_devices_that_share_cores_are_slower_together():
    call = linear(64, 64, 64)
    alone = RooflineCosts(DEVICE).op_seconds(call)
    together = RooflineCosts(replace(DEVICE, slowdown=2.0)).op_seconds(call)
    assert together == pytest.approx((2 * alone[0], 2 * alone[1]))
