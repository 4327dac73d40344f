"""Where no plan fits otherwise, parameters may be updated within the backward: whether that is possible here, and if
not, what the user can be told about it."""

from __future__ import annotations

from alpa_strategy.cost.flops import is_view
from alpa_strategy.errors import DoesNotFitError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.options import OptimizerInfo, PlanOptions


def against_early_step(step: StepGraph, optimizer: OptimizerInfo, options: PlanOptions) -> str | None:
    """What stands against updating parameters within the backward, None where nothing does."""
    if options.asks_for_pipeline:
        return "stages of a pipeline and recomputed activations were asked for"
    if options.accumulate_grad_batches != 1:
        return "gradients are accumulated over several batches"
    if optimizer.against_early_step is None and uses_detached_parameters(step):
        return "the step uses a parameter's value where it gives it no gradient (detach), which may be read after that"
    return optimizer.against_early_step


def with_reason(error: DoesNotFitError, against: str | None) -> DoesNotFitError:
    """The same error, with what would have needed less memory and why it could not be had."""
    if against is None:
        text = "updating parameters within the backward, which needs less memory, would not be enough"
    else:
        text = f"parameters cannot be updated within the backward, which would need less memory: {against}"
    return DoesNotFitError(f"{error.problem}\n    {text}", error.fix)


def uses_detached_parameters(step: StepGraph) -> bool:
    """Whether the backward may need a parameter's value in an op that gives the parameter no gradient.

    Such an op may run after the parameter's gradient is complete, and would find the new value.
    """
    same_memory = {p.value for p in step.parameters if p.meta.requires_grad}
    detached: set[int] = set()
    for op in step.ops:
        reads = [value for value in op.operands if value in same_memory]
        if is_view(op.call) and reads:
            same_memory.update(op.results)
            detached.update(v for v in op.results if not step.values[v].requires_grad or reads[0] in detached)
        elif detached.intersection(reads) and any(step.values[v].requires_grad for v in op.results):
            return True
    return False
