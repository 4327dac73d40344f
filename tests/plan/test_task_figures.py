"""A plan has the figures of its step: samples, tokens, precision, seconds at the devices' peak."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lightning import LightningModule
from models import MODELS
from page.test_details import PIPELINE, planned
from torch import Tensor, nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.devices import DeviceSpec
from alpa_strategy.cost.flops import op_flops, product_kind, product_shape
from alpa_strategy.cost.peak import seconds_at_peak, step_flops
from alpa_strategy.ir.per_rank import per_rank_call
from alpa_strategy.ir.plan import Plan
from alpa_strategy.planner.figures import num_tokens, precision_of, task_figures

NUM_SAMPLES = 32
NUM_TOKENS = 8 * NUM_SAMPLES


def device(**peaks: float) -> DeviceSpec:
    return DeviceSpec("d", 2**34, 1e12, tuple(peaks.items()), 1e-6)


def captured(dtype: torch.dtype, autocast: torch.dtype | None = None):
    """A GPT's step with parameters in `dtype`."""
    torch.manual_seed(0)
    module = MODELS["gpt"]().to(dtype)
    batch = module.example_batch(4)
    if autocast is None:
        return capture_step(module, batch)
    return capture_step(module, batch, context=lambda: torch.autocast("cpu", autocast))


@pytest.mark.parametrize("options", [(), PIPELINE])
def test_samples_tokens_and_utilization_of_a_step_of_all_devices(options):
    plan, task = planned("gpt", options)
    figures = plan.figures
    assert (figures.num_samples, figures.num_tokens) == (NUM_SAMPLES, NUM_TOKENS)
    assert figures.precision == "32-true"
    assert figures.memory_limit == pytest.approx(task.memory_limit)

    # Counted by hand: two multiply-adds of attention, all others are matmuls, thrice each.
    peak = dict(task.cluster.device.peak_flops)["float32"]
    counted = step_flops(task.step)
    assert figures.flops == counted
    flops = sum(counted.by_dtype.values())
    assert counted.total == pytest.approx(flops)
    # A matmul's backward is two, also with the bias of a fused projection, attention's 2.5.
    attention = counted.attention / 3.5
    matmuls = counted.forward - attention
    assert 0 < attention < matmuls
    assert counted.backward == pytest.approx(2 * matmuls + 2.5 * attention)
    products = [op.call for op in task.step.ops if product_kind(op.call)]
    assert 2.5 < flops / sum(map(op_flops, products)) <= 3.5
    seconds = plan.predicted.step_seconds
    assert figures.mfu(seconds) == pytest.approx(flops / (4 * peak * seconds))
    assert figures.samples_per_second(seconds) == pytest.approx(NUM_SAMPLES / seconds)
    assert Plan.from_dict(plan.to_dict()) == plan


def test_a_step_without_sequences_has_no_tokens():
    plan, _ = planned("mlp")
    assert plan.figures.num_samples == NUM_SAMPLES
    assert plan.figures.num_tokens == 0
    assert plan.figures.tokens_per_second(1.0) is None


def test_positions_and_kinds_of_tokens_are_not_counted_again():
    torch.manual_seed(0)
    module = MODELS["bert"]()
    step = capture_step(module, module.example_batch(4))
    num_embeddings = sum("embedding" in op.name for op in step.ops)
    assert num_embeddings > 1
    (first, *_) = (leaf.meta for leaf in step.batch if len(leaf.meta.shape) == 2)
    assert num_tokens(step, 4) == first.num_elements


class Distances(LightningModule):
    """A language model that also looks up a matrix of distances, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.distances = nn.Embedding(16, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        positions = torch.arange(batch.shape[1])
        distances = (positions[:, None] - positions[None, :]).abs()
        weights = self.distances(distances).squeeze(-1).softmax(-1)
        return (weights @ self.words(batch)).square().mean()


def test_distances_of_tokens_are_no_tokens():
    """A sequence is as long as the batch has samples, or a multiple of it."""
    step = capture_step(Distances(), torch.randint(16, (4, 8)))
    assert num_tokens(step, 4) == 4 * 8


@pytest.mark.parametrize(
    ("dtype", "autocast", "name"),
    [
        (torch.float32, None, "32-true"),
        (torch.float64, None, "64-true"),
        (torch.bfloat16, None, "bf16-true"),
        (torch.float32, torch.bfloat16, "bf16-mixed"),
        (torch.float32, torch.float16, "16-mixed"),
    ],
)
def test_the_precision_has_the_trainers_name(dtype, autocast, name):
    step = captured(dtype, autocast)
    assert precision_of(step, step_flops(step).by_dtype) == name


def test_seconds_at_peak_need_the_peak_of_every_dtype():
    flops = {"bfloat16": 6e12, "float32": 1e12}
    assert seconds_at_peak(flops, device(bfloat16=2e12, float32=1e12), 2) == pytest.approx(2.0)
    assert seconds_at_peak(flops, device(float32=1e12), 2) is None
    assert seconds_at_peak({}, device(float32=1e12), 2) is None


def test_half_precision_is_known_to_be_faster_where_it_is():
    plan, _ = planned("gpt")
    assert plan.figures.half_precision == "bf16-mixed"
    assert 0 < plan.figures.half_share < 1


def test_a_dtype_without_flops_in_the_cluster_is_named():
    plan, task = planned("gpt")
    assert plan.figures.assumed_rates == {}
    for peaks, assumed in (
        ({"float32": 1e12}, {"bfloat16": "float32"}),
        ({"bfloat16": 4e12, "float32": 1e12}, {}),
    ):
        spec = replace(task.cluster, device=device(**peaks))
        half = replace(task, cluster=spec, step=captured(torch.float32, torch.bfloat16))
        figures = task_figures(half)
        assert figures.assumed_rates == assumed
        assert (figures.peak_seconds is None) == bool(assumed)
        # What was measured needs no FLOP/s.
        assert task_figures(replace(half, costs=task.op_costs)).assumed_rates == {}


def test_an_op_of_each_rank_is_the_product_that_it_runs():
    step = captured(torch.float32)
    call = next(op.call for op in step.ops if product_kind(op.call) == "matmul")
    of_ranks = per_rank_call(call, (True,) * len(call.operands), 2)
    assert product_kind(of_ranks) == "matmul"
    assert product_shape(of_ranks) == product_shape(call)
    assert op_flops(of_ranks) == 2 * op_flops(call)
