"""The step of all ranks is each rank's step on its own batch: losses, the mean's gradients,
outputs, logs and buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from covering import in_tiers
from inter_op import test_microbatch
from inter_op.test_microbatch import EXACT, Step
from torch import Tensor

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.ir.graph import ValueRef, values_of
from alpa_strategy.ir.run_step import run_step


def first_sample(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return self.a(x)[0].pow(2).sum() + (self.a(x)[1:] - self.a(x)[:1]).abs().mean()


def all_pairs(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    z = torch.nn.functional.normalize(self.a(x), dim=1)
    return torch.nn.functional.cross_entropy(z @ z.T, torch.arange(len(x)))


def weight_of_the_batch(self: Step, x: Tensor, y: Tensor, w: Tensor) -> dict[str, Any]:
    share = w / w.sum()
    loss = (self.a(x).pow(2).mean(1) * share).sum() * len(x)
    return {"loss": loss, "share": share, "columns": x.T, "first": x[0], "order": w.argsort()}


def sorted_samples(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    order = w.argsort()
    return (self.a(x[order]) * w.cumsum(0)[:, None]).mean() + self.b(x).var(0).mean()


MIXING = [first_sample, all_pairs, weight_of_the_batch, sorted_samples]
OTHERS = [
    getattr(test_microbatch, name)
    for name in ("two_views", "sequence_first", "mean_of_rows", "picked_by_number")
]


def example(rank: int, num_samples: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (num_samples,), generator=generator)
    return x, y, torch.rand(num_samples, generator=generator, dtype=torch.float64)


def assert_merged(function: Callable[..., Any], num_ranks: int, num_samples: int) -> None:
    """Compare the merged step with the captured step of each rank."""
    module = Step(function)
    batches = [example(rank, num_samples) for rank in range(num_ranks)]
    captured = capture_step(module, batches[0])
    merged = capture_step(module, batches[0], world_size=num_ranks)

    def run(step: Any, leaves: list[Tensor]) -> tuple[dict[int, Tensor], list[Tensor]]:
        trained = copy.deepcopy(module)
        parameters = dict(trained.named_parameters())
        buffers = {name: buffer.clone() for name, buffer in trained.named_buffers()}
        values = run_step(step, parameters, buffers, [leaves[entry.leaf] for entry in step.batch])
        values[step.loss].backward()
        grads = []
        for parameter in parameters.values():
            has_none = parameter.grad is None
            grads.append(torch.zeros_like(parameter) if has_none else parameter.grad)
        return values, grads

    together = [torch.cat(leaves) for leaves in zip(*batches, strict=True)]
    values, grads = run(merged, together)
    alone = [run(captured, list(batch)) for batch in batches]

    same = torch.testing.assert_close
    close = {"rtol": 1e-11, "atol": 1e-11}
    same(values[merged.loss], sum(of[captured.loss] for of, _ in alone) / num_ranks, **close)
    for grad, *of_ranks in zip(grads, *(grads for _, grads in alone), strict=True):
        same(grad, sum(of_ranks) / num_ranks, **close)

    how = dict(merged.of_ranks)
    records = ("output", "logs", "checks", "appended")
    for rank, (of_rank, _) in enumerate(alone):
        for name in records:
            mine = values_of(getattr(merged, name))
            theirs = values_of(getattr(captured, name))
            for index, expected in zip(mine, theirs, strict=True):
                value = values[index]
                if index in how:
                    value = how[index].of(value, rank, num_ranks)
                same(value, of_rank[expected], **close)
        for mine, theirs in zip(merged.buffers, captured.buffers, strict=True):
            assert (mine.update is None) == (theirs.update is None)
            if mine.update is not None:
                value = values[mine.update]
                if mine.update in how:
                    value = how[mine.update].of(value, rank, num_ranks)
                same(value, of_rank[theirs.update], **close)


DETERMINISTIC = [
    function
    for function in (*EXACT, *OTHERS, *MIXING)
    if function.__name__ not in ("random_mask", "mixup")
]


@pytest.mark.parametrize(
    ("function", "num_ranks", "num_samples"), in_tiers(product(DETERMINISTIC, (2, 3), (8,)))
)
def test_a_rank_has_its_own_numbers(
    function: Callable[..., Any], num_ranks: int, num_samples: int
) -> None:
    assert_merged(function, num_ranks, num_samples)


@pytest.mark.parametrize("function", [all_pairs, sorted_samples], ids=lambda f: f.__name__)
def test_a_batch_of_one_sample(function: Callable[..., Any]) -> None:
    if function is all_pairs:
        assert_merged(function, 4, 1)


def test_ops_on_single_samples_run_once_for_all() -> None:
    step = capture_step(Step(test_microbatch.many_terms), example(0, 8), world_size=2)
    linears = [op for op in step.ops if "linear" in op.name]
    assert linears
    assert all(op.call.target_name == "aten.linear.default" for op in linears)


def test_random_numbers_are_a_ranks() -> None:
    """Noise that is drawn without looking at a sample is another one on each rank."""

    def noisy(self: Step, x: Tensor, y: Tensor, w: Tensor) -> dict[str, Any]:
        noise = torch.randn(len(x), 6, dtype=x.dtype)
        return {"loss": (self.a(x) * noise).sum(), "noise": noise, "order": torch.randperm(8)}

    step = capture_step(Step(noisy), example(0, 8), world_size=2)
    together = [torch.cat(leaves) for leaves in zip(example(0, 8), example(1, 8), strict=True)]
    module = Step(noisy)
    values = run_step(
        step,
        dict(module.named_parameters()),
        {},
        [together[entry.leaf] for entry in step.batch],
    )
    how = dict(step.of_ranks)
    noise: ValueRef = step.output["noise"]
    first, second = (how[noise.index].of(values[noise.index], rank, 2) for rank in range(2))
    assert first.shape == (8, 6)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "function",
    [
        test_microbatch.masked_mean,
        test_microbatch.many_terms,
        test_microbatch.made_rows,
        test_microbatch.two_views,
        test_microbatch.mixing_only_in_logs,
        test_microbatch.picked_by_number,
    ],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_a_merged_step_splits_into_micro_batches(
    function: Callable[..., Any], num_microbatches: int
) -> None:
    """Each micro-batch takes a part of every rank's samples."""
    module = Step(function)
    step = capture_step(module, example(0, 8), world_size=2)
    together = tuple(torch.cat(leaves) for leaves in zip(example(0, 8), example(1, 8), strict=True))
    test_microbatch.assert_same(module, together, num_microbatches, step, num_ranks=2)
