"""capture_step: turn a LightningModule and one batch into the training step as a StepGraph.

`trace.py` runs the step, `convert.py` makes the StepGraph from its fx graph.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from alpa_strategy.capture import rewrites
from alpa_strategy.capture.convert import convert
from alpa_strategy.capture.first_call import after_first_call
from alpa_strategy.capture.lightning_adapter import LightningModule
from alpa_strategy.capture.merge_ranks import merge_ranks, synced_norms
from alpa_strategy.capture.non_tensor_inputs import register_batch_types
from alpa_strategy.capture.state_tensors import WrittenConstantError, place_of
from alpa_strategy.capture.trace import StepCall, Trace, trace_step
from alpa_strategy.errors import CaptureError, OptionError
from alpa_strategy.ir import graph as ir
from alpa_strategy.ir.places import Place


def capture_step(
    module: LightningModule,
    batch: Any,
    *,
    world_size: int = 1,
    batch_scope: str = "rank",
    batch_idx: int = 0,
    context: Callable[[], AbstractContextManager[Any]] | None = None,
    numbers: tuple[Place, ...] = (),
    state: frozenset[str] | None = None,
) -> ir.StepGraph:
    """Capture `module.training_step(batch, batch_idx)` as a graph.

    The step runs on fake tensors, and the module is left unchanged, apart from attributes that only
    its first call sets: they stay set.

    Args:
        module: parameters on any device, meta included; with or without a trainer.
        batch: one rank's batch, any pytree of tensors (real, fake or meta) and constants.
        world_size: number of ranks that load batches.
        batch_scope: `rank`: the graph is the step of all ranks, each on its own batch
            (`merge_ranks`); `global`: `batch` is the global batch, of which one device would
            compute the step.
        batch_idx: the step's argument; comparisons with it become guards.
        context: the precision plugin's `train_step_context`, so that autocast's casts are captured.
        numbers: attributes and leaves whose numbers change between steps.
        state: names of the parameters that are state of the step and no optimizer's; None: those
            that it writes to.

    Returns:
        The step at the shapes of the batches of all ranks together.

    Raises:
        CaptureError: the step cannot be captured. The message has the user's line and a solution.
            Errors of the user's own code pass unchanged.
        OptionError: `batch_scope` is unknown.
    """
    if batch_scope not in ("rank", "global"):
        raise OptionError(f"batch_scope={batch_scope!r}", "use 'rank' or 'global'")
    if not module.automatic_optimization:
        raise CaptureError(
            "the module uses manual optimization (automatic_optimization = False)",
            "return the loss from training_step and let Lightning step one optimizer; for `alpa"
            " plan`, list the phases of a step (iteration_phases)",
        )
    register_batch_types(batch)
    call = StepCall(module, batch, batch_idx, context or nullcontext, numbers=numbers, state=state)
    call, trace, graph = _traced(call)
    if trace.recording.stored:
        graph, numbers = after_first_call(call, graph, trace.recording.stored)
    numbers = tuple(dict.fromkeys((*numbers, *trace.recording.numbers_read)))
    segmented = rewrites.segment_fused_linears(graph)
    captured = replace(segmented, batch_scope=batch_scope, numbers=numbers, states=call.states)
    if batch_scope == "global" or world_size == 1:
        return captured
    return merge_ranks(captured, world_size, synced_norms(module))


def _traced(call: StepCall) -> tuple[StepCall, Trace, ir.StepGraph]:
    """Return the call with the step's lists and states, its trace and its graph.

    Lists that the step only appends to, and tensors that one step leaves for the next, are known at
    its end, when the trace has reads of them already. So it is traced once more, with stand-ins for
    them; and if it writes in place to a tensor that an attribute holds.

    Raises:
        CaptureError: the step cannot be captured.
    """
    while True:
        trace = trace_step(call)
        recording = trace.recording
        if recording.grown or recording.states:
            appended = (*call.appended, *recording.grown)
            call = replace(call, appended=appended, states=(*call.states, *recording.states))
            continue
        try:
            return call, trace, convert(trace)
        except WrittenConstantError as error:
            place = place_of(call.module, error.tensor)
            if place is None or place in call.states:
                raise
            call = replace(call, states=(*call.states, place))
