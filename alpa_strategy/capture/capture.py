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
from alpa_strategy.capture.trace import TRAINING, StepCall, trace_step
from alpa_strategy.errors import CaptureError, OptionError
from alpa_strategy.ir.graph import StepGraph


def capture_step(
    module: LightningModule,
    batch: Any,
    *,
    world_size: int = 1,
    batch_scope: str = "rank",
    step: str = "training_step",
    batch_idx: int = 0,
    dataloader_idx: int | None = None,
    context: Callable[[], AbstractContextManager[Any]] | None = None,
) -> StepGraph:
    """Capture `module.<step>(batch, batch_idx)`. Nothing real is computed and the module is left as it was.

    Another step than `training_step` is an evaluation step: it makes no loss (`StepGraph.loss` is -1), may return
    anything, and nothing in it requires grad.

    Args:
        module: parameters on any device, meta included; with or without a trainer.
        batch: one rank's batch, any pytree of tensors (real, fake or meta) and constants.
        world_size: number of ranks that load rows.
        batch_scope: `rank`: leaves with one row per sample are `world_size` times longer in the graph; `global`: the
            batch is already the whole one.
        step: name of the method.
        batch_idx: what the step sees as batch_idx; comparisons with it become guards.
        dataloader_idx: what an evaluation step gets after batch_idx, None: nothing. The graph is good for this one.
        context: the precision plugin's `train_step_context`, so that autocast's casts are captured.

    Raises:
        CaptureError: with the user's line and a way out. Errors of the user's own code pass unchanged.
    """
    if batch_scope not in ("rank", "global"):
        raise OptionError(f"batch_scope={batch_scope!r}", "use 'rank' or 'global'")
    if not module.automatic_optimization and step == TRAINING:
        raise CaptureError(
            "the module uses manual optimization (automatic_optimization = False)",
            "return the loss from training_step and let Lightning step one optimizer",
        )
    register_batch_types(batch)
    rows_factor = world_size if batch_scope == "rank" else 1
    call = StepCall(module, batch, step, rows_factor, batch_idx, dataloader_idx, context or nullcontext)
    trace = trace_step(call)
    if trace.recording.grown:  # lists that the step appended to: once more, with stand-ins for them
        call = replace(call, appended=tuple(trace.recording.grown))
        trace = trace_step(call)
    graph = convert(trace, step)
    if trace.recording.stored:
        graph = _after_first_call(call, graph, trace.recording.stored)
    return replace(segment_fused_linears(graph), batch_scope=batch_scope)


def _after_first_call(call: StepCall, graph: StepGraph, stored: list[SetAttribute]) -> StepGraph:
    """The step of a module that sets flags in its first call (libraries install their hooks so), captured once more.

    It counts as initialization if the second call stores nothing and does the same tensor work; else CaptureError.
    """
    with initialized(call.module, stored):
        trace = trace_step(call)
        again = convert(trace, call.step)
        # A counter (`self.calls += 1`) stores something else in every call.
        if trace.recording.stored or trace.recording.grown or again.graph_digest != graph.graph_digest:
            raise changed_attributes(f"{entry.path}.{entry.name}".lstrip(".") for entry in stored)
    return again
