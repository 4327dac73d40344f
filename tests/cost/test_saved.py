"""What autograd saves, against what it really saves on real tensors of the same shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cost_op_calls import call_of, tensor
from torch.utils._pytree import tree_leaves

from alpa_strategy.capture.ops import batch_norm_train, cross_entropy_sum
from alpa_strategy.cluster.devices import DeviceSpec
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.cost.saved_tensors import Saved

aten = torch.ops.aten
CPU = DeviceSpec("cpu toy", 10**9, 1e9, (("float32", 1e12),), 0.0)


def really_saved(target, args, kwargs, operands: list[torch.Tensor]) -> Saved:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        results = [t for t in tree_leaves(target(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    own = [t.untyped_storage().data_ptr() for t in operands]
    made = [t.untyped_storage().data_ptr() for t in results]
    return Saved(
        tuple(p in storages for p in own),
        tuple(p in storages and p not in own for p in made),
        sum(size for p, size in storages.items() if p not in {*own, *made}),
    )


CASES = {
    "linear": (aten.linear.default, (tensor(4, 8), tensor(6, 8), tensor(6))),
    "linear 3-d": (aten.linear.default, (tensor(2, 4, 8), tensor(6, 8), None)),
    "linear frozen weight": (aten.linear.default, (tensor(4, 8), tensor(6, 8, grad=False), None)),
    "linear frozen input": (
        aten.linear.default,
        (tensor(4, 8, grad=False), tensor(6, 8), tensor(6)),
    ),
    "linear frozen": (
        aten.linear.default,
        (tensor(4, 8, grad=False), tensor(6, 8, grad=False), None),
    ),
    "gelu": (aten.gelu.default, (tensor(4, 8),)),
    "relu": (aten.relu.default, (tensor(4, 8),)),
    "tanh": (aten.tanh.default, (tensor(4, 8),)),
    "silu": (aten.silu.default, (tensor(4, 8),)),
    "layer_norm": (aten.layer_norm.default, (tensor(4, 8), [8], tensor(8), tensor(8))),
    "rms_norm": (aten.rms_norm.default, (tensor(4, 8), [8], tensor(8))),
    "softmax": (aten.softmax.int, (tensor(4, 8), -1)),
    "log_softmax": (aten.log_softmax.int, (tensor(4, 8), -1)),
    "dropout": (aten.dropout.default, (tensor(4, 8), 0.1, True)),
    "no dropout": (aten.dropout.default, (tensor(4, 8), 0.1, False)),
    "add": (aten.add.Tensor, (tensor(4, 8), tensor(8))),
    "mul": (aten.mul.Tensor, (tensor(4, 8), tensor(4, 8))),
    "mul by number": (aten.mul.Tensor, (tensor(4, 8), 2.0)),
    "view": (aten.view.default, (tensor(4, 8), [32])),
    "split": (aten.split.Tensor, (tensor(4, 8), 2, 0)),
    "cat": (aten.cat.default, ([tensor(4, 8), tensor(4, 8)], 0)),
    "embedding": (aten.embedding.default, (tensor(10, 8), tensor(4, dtype=torch.int64))),
    "conv2d": (
        aten.conv2d.default,
        (tensor(2, 3, 8, 8), tensor(4, 3, 3, 3), tensor(4), [1, 1], [1, 1]),
    ),
    "max_pool2d": (aten.max_pool2d.default, (tensor(2, 3, 8, 8), [2, 2])),
    "cross_entropy": (
        cross_entropy_sum,
        (tensor(4, 8), tensor(4, dtype=torch.int64), None, -100, 0.0),
    ),
    "batch_norm": (
        batch_norm_train,
        (
            tensor(4, 3, 5),
            tensor(3),
            tensor(3),
            tensor(3, grad=False),
            tensor(3, grad=False),
            0.1,
            1e-5,
        ),
    ),
    "matmul": (aten.matmul.default, (tensor(2, 3, 4, 5), tensor(2, 3, 5, 6))),
    "to half": (aten.to.dtype, (tensor(4, 8), torch.float16)),
}


@pytest.mark.parametrize("name", CASES)
def test_saved_tensors_are_those_of_a_real_run(name: str):
    target, args = CASES[name]
    made, operands = call_of(target, *args)
    found = RooflineCosts(CPU).saved(made)
    assert replace(found, temporary_bytes=(0, 0)) == really_saved(target, args, {}, operands)


@pytest.mark.parametrize("name", ["linear", "gelu", "softmax"])
def test_single_kernels_have_no_temporaries(name: str):
    assert RooflineCosts(CPU).saved(call_of(*_with_args(name))[0]).temporary_bytes == (0, 0)


@pytest.mark.parametrize("name", ["view", "cat"])
def test_gradients_that_are_the_results_own_are_there_once(name: str):
    made, _ = call_of(*_with_args(name))
    of_operands = sum(meta.num_bytes for meta in made.operands if meta.requires_grad)
    assert RooflineCosts(CPU).saved(made).temporary_bytes == (0, -of_operands)


def test_a_loss_of_two_kernels_holds_the_gradient_between_them():
    made, _ = call_of(*_with_args("cross_entropy"))
    between = made.operands[0].num_bytes - 4  # when the sum of the targets' weights has gone
    assert RooflineCosts(CPU).saved(made).temporary_bytes == (0, between)


@pytest.mark.parametrize("shape", [(2, 4, 16, 8), (3, 1, 5, 8)])
def test_attention_keeps_no_score_matrix(shape: tuple[int, ...]):
    q = tensor(*shape)
    k = tensor(*shape)
    v = tensor(*shape)
    made, operands = call_of(aten.scaled_dot_product_attention.default, q, k, v, is_causal=True)
    found = RooflineCosts(CPU).saved(made)
    assert found == Saved((True, True, True), (True,), 4 * shape[0] * shape[1] * shape[2])
    # the CPU's flash kernel does the same
    assert found == really_saved(
        aten.scaled_dot_product_attention.default, (q, k, v), {"is_causal": True}, operands
    )


def test_dropout_on_an_accelerator_keeps_one_byte_per_element():
    made, _ = call_of(aten.dropout.default, tensor(4, 8), 0.1, True)
    gpu = DeviceSpec("V100", 10**9, 1e9, (("float32", 1e12),), 0.0)
    assert RooflineCosts(gpu).saved(made) == Saved((False,), (False,), 32)


def test_ops_without_fake_tensors_save_their_operands():
    made, _ = call_of(_branches_on_data, tensor(4))
    assert RooflineCosts(CPU).saved(made) == Saved((True,), (False,), 0)


def _branches_on_data(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if float(x.sum()) >= 0 else x * 3


def test_asking_leaves_no_mode_on_and_heeds_no_outer_one():
    costs = RooflineCosts(CPU)
    with torch.no_grad():
        assert costs.saved(call_of(*_with_args("gelu"))[0]).operands == (
            False,
        )  # built under no_grad: no result grad
    made = call_of(*_with_args("linear"))[0]
    with torch.no_grad():
        assert costs.saved(made).operands == (True, True, False)
    assert type(torch.empty(1)) is torch.Tensor


def _with_args(name: str):
    target, args = CASES[name]
    return target, *args
