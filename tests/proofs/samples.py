"""Calls of ATen ops, with data, from PyTorch's operator database (`op_db`): each sample goes
through capture.

The database is what PyTorch tests its own operators with (needs the package `expecttest`).
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.ir.op import OpCall
from alpa_strategy.ir.run_step import run_step

_DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)


@dataclass(frozen=True)
class CapturedCall:
    """One op call that capture gave, and the data that it was called on. `name`: of the database's
    entry.
    """

    name: str
    call: OpCall
    operands: tuple[Tensor, ...]


@dataclass(frozen=True)
class NotCaptured:
    """A sample that capture refused, and why (first line of the error)."""

    name: str
    reason: str


@lru_cache(maxsize=1)
def database() -> tuple[Any, ...]:
    """All `OpInfo`s."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return tuple(op_db)


def captured_calls(
    infos: Iterable[Any], max_samples: int = 6
) -> Iterator[CapturedCall | NotCaptured]:
    """What capture makes of up to `max_samples` samples per OpInfo, spread over all of its samples.

    The samples are random; the random state is seeded for each OpInfo and put back.
    """
    for info in infos:
        for sample in _samples(info, max_samples):
            yield from _capture(_full_name(info), info.op, sample)


def _full_name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def _samples(info: Any, max_samples: int) -> list[Any]:
    supported = info.supported_dtypes("cpu")
    dtype = next((d for d in _DTYPES if d in supported), None) or next(
        iter(sorted(supported, key=str)), None
    )
    if dtype is None:
        return []
    grad = bool(info.supports_autograd)
    grad &= dtype.is_floating_point or dtype.is_complex
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        samples = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=grad), 200))
    # Half of them those with the most that can be cut, the rest spread over all.
    samples.sort(key=_num_cuttable, reverse=True)
    largest, rest = samples[: max_samples // 2], samples[max_samples // 2 :]
    step = max(1, -(-len(rest) // max(max_samples - len(largest), 1)))
    chosen = [*largest, *rest[::step]]
    wider = [_wider(sample) for sample in chosen]
    return [*(sample for sample in wider if sample is not None), *chosen]


def _wider(sample: Any) -> Any | None:
    """A sample with a batch of one, with four times the rows; None for others."""
    rows = sample.input
    if not isinstance(rows, Tensor) or rows.dim() < 2 or rows.shape[0] != 1 or not rows.numel():
        return None
    wider = copy.copy(sample)
    wider.input = torch.cat([rows.detach()] * 4).requires_grad_(rows.requires_grad)
    return wider


def _num_cuttable(sample: Any) -> int:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(
        min(size, 4)
        for leaf in leaves
        if isinstance(leaf, Tensor)
        for size in leaf.shape
        if size > 1
    )


class _Sample(pl.LightningModule):
    """A training step that calls one op on parameters (what requires a gradient) and buffers (all
    other tensors).
    """

    def __init__(self, op: Any, arguments: tuple[list[Any], pytree.TreeSpec]) -> None:
        super().__init__()
        self.op = [op]
        self.leaves, self.spec = arguments
        self.anchor = nn.Parameter(torch.zeros((), dtype=torch.float64))
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.register_parameter(f"t{i}", nn.Parameter(leaf.detach().clone()))
            elif isinstance(leaf, Tensor):
                self.register_buffer(f"t{i}", leaf.detach().clone())

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        leaves = []
        for i, x in enumerate(self.leaves):
            if isinstance(x, Tensor):
                leaves.append(getattr(self, f"t{i}"))
            else:
                leaves.append(x)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = [
            x for x in pytree.tree_leaves(self.op[0](*args, **kwargs)) if isinstance(x, Tensor)
        ]
        loss = self.anchor * 1.0
        for result in results:
            if result.requires_grad:
                loss = loss + (result.abs() if result.is_complex() else result).sum().double()
        return {"loss": loss, "results": results}


def _capture(name: str, op: Any, sample: Any) -> Iterator[CapturedCall | NotCaptured]:
    arguments = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    if any(isinstance(x, Tensor) and x.layout != torch.strided for x in arguments[0]):
        yield NotCaptured(name, "sparse or jagged tensors")
        return
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = _Sample(op, arguments)
            batch = torch.zeros(1)
            step = capture_step(module, batch)
            parameters = {n: p.detach() for n, p in module.named_parameters()}
            values = run_step(
                step, parameters, dict(module.named_buffers()), [batch] * len(step.batch)
            )
        except (
            Exception
        ) as error:  # of any type: many samples are not ops of a training step at all
            yield NotCaptured(
                name,
                f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}",
            )
            return
    for entry in step.ops:
        yield CapturedCall(name, entry.call, tuple(values[i] for i in entry.operands))
