"""capture_step: an ordinary LightningModule and one batch in, the training step as a StepGraph out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule

from alpa_strategy.capture.convert import convert
from alpa_strategy.capture.non_tensor_inputs import register_batch_types
from alpa_strategy.capture.python_state import SetAttribute, changed_attributes, initialized
from alpa_strategy.capture.rewrites import segment_fused_linears
from alpa_strategy.capture.trace import StepCall, trace_step
from alpa_strategy.errors import CaptureError, OptionError
from alpa_strategy.ir.graph import StepGraph


def capture_step(
    module: LightningModule,
    batch: Any,
    *,
    world_size: int = 1,
    batch_scope: str = "rank",
    batch_idx: int = 0,
    context: Callable[[], AbstractContextManager[Any]] | None = None,
    rows: tuple[bool, ...] | None = None,
) -> StepGraph:
    """Capture `module.training_step(batch, batch_idx)`. Nothing real is computed and the module is left as it was.

    Args:
        module: parameters on any device, meta included; with or without a trainer.
        batch: one rank's batch, any pytree of tensors (real, fake or meta) and constants.
        world_size: number of ranks that load rows.
        batch_scope: `rank`: leaves with one row per sample are `world_size` times longer in the graph; `global`: the
            batch is already the whole one.
        batch_idx: what the step sees as batch_idx; comparisons with it become guards.
        context: the precision plugin's `train_step_context`, so that autocast's casts are captured.
        rows: of every tensor leaf whether it has one row per sample; None: those do whose dim 0 is the most frequent.

    Raises:
        CaptureError: with the user's line and a way out. Errors of the user's own code pass unchanged.
    """
    if batch_scope not in ("rank", "global"):
        raise OptionError(f"batch_scope={batch_scope!r}", "use 'rank' or 'global'")
    if not module.automatic_optimization:
        raise CaptureError(
            "the module uses manual optimization (automatic_optimization = False)",
            "return the loss from training_step and let Lightning step one optimizer",
        )
    register_batch_types(batch)
    rows_factor = world_size if batch_scope == "rank" else 1
    call = StepCall(module, batch, rows_factor, batch_idx, context or nullcontext, rows)
    trace = trace_step(call)
    # Which lists only grow is known at the end, when what was read of them is in the trace already.
    if trace.recording.grown:  # lists that the step appended to: once more, with stand-ins for them
        call = replace(call, appended=tuple(trace.recording.grown))
        trace = trace_step(call)
    graph = convert(trace)
    if trace.recording.stored:
        graph = _after_first_call(call, graph, trace.recording.stored)
    return replace(segment_fused_linears(graph), batch_scope=batch_scope)


def _after_first_call(call: StepCall, graph: StepGraph, stored: list[SetAttribute]) -> StepGraph:
    """The step of a module that sets flags in its first call (libraries install their hooks so), captured once more.

    It counts as initialization if the second call stores nothing and does the same tensor work; else CaptureError.
    """
    with initialized(call.module, stored):
        trace = trace_step(call)
        again = convert(trace)
        # A counter (`self.calls += 1`) stores something else in every call.
        if trace.recording.stored or trace.recording.grown or again.graph_digest != graph.graph_digest:
            raise changed_attributes(f"{entry.path}.{entry.name}".lstrip(".") for entry in stored)
    return again
