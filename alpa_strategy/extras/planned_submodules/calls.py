"""Calls of submodules as one graph: what can be planned of a step that itself cannot be captured.

All calls are traced together, so that they are planned together, with their inputs as the batch and
their results as what leaves the graph; each is then run by its own part of it.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.capture.convert import convert
from alpa_strategy.capture.graph_builder import storages_of
from alpa_strategy.capture.lightning_adapter import LightningModule
from alpa_strategy.capture.merge_ranks import merge_ranks, synced_norms
from alpa_strategy.capture.python_reads import MODULE_HOOKS
from alpa_strategy.capture.rewrites import segment_fused_linears
from alpa_strategy.capture.trace import StepCall, Trace, trace_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import StepGraph, ValueRef, values_of
from alpa_strategy.ir.guards import ValueGuard

# Returns the context of a step, as of `capture_step`.
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Call:
    """A call of the submodule at `path`."""

    path: str

    # (args, kwargs), with tensors on the meta device; None if it cannot be planned.
    inputs: Any

    # Index of the recorded call that makes it; None if the step makes it.
    caller: int | None = None

    # Its part of the graph of several calls.
    step: StepGraph | None = None

    # Its result, with ValueRefs of that graph.
    output: Any = None

    # Index of its first leaf in the batch of the graph.
    first: int = 0


def capture_calls(
    module: LightningModule, calls: Sequence[Call], context: Context, num_ranks: int = 1
) -> tuple[StepGraph, list[Call]]:
    """Return the graph of all `calls`, without a loss, and the calls with their parts of it.

    Args:
        num_ranks: ranks that make the calls, each with inputs of its own, and go on with results of
            its own: the graph computes those of all ranks (`merge_ranks`).
        context: as of `capture_step`.

    Raises:
        CaptureError: a call does more than compute tensors from its arguments. Errors of the user's
            code pass unchanged.
    """

    def step(batch: Any) -> dict[str, Any]:
        outputs = []
        for call, (args, kwargs) in zip(calls, batch, strict=True):
            outputs.append(_called(module.get_submodule(call.path), args, kwargs))
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        # Every graph needs a loss. This one is removed at the end.
        loss = sum(tensor.sum() for tensor in tensors if tensor.requires_grad)
        return {"loss": loss, "outputs": outputs}

    trace = trace_step(StepCall(module, [call.inputs for call in calls], 0, context, step=step))
    graph = replace(segment_fused_linears(convert(trace)), batch_scope="global")
    submodules = [module.get_submodule(call.path) for call in calls]
    graph = replace(graph, attributes=_guards_around_programs(graph, submodules))
    _check_effects(graph, trace)
    if num_ranks > 1:
        graph = replace(graph, batch_scope="rank")
        graph = merge_ranks(graph, num_ranks, synced_norms(module), used_by_each=True)
    outputs = graph.output["outputs"]
    return _part(graph, outputs), _parts(graph, calls, outputs)


def _part(graph: StepGraph, outputs: Any) -> StepGraph:
    """Return the part of the graph that computes the values in `outputs`, without a loss; its
    `of_ranks` has these values alone.
    """
    leaving = values_of(outputs)
    of_ranks = tuple((value, how) for value, how in graph.of_ranks if value in leaving)
    return replace(graph.part_for(leaving), of_ranks=of_ranks)


def _guards_around_programs(
    graph: StepGraph, submodules: Sequence[nn.Module]
) -> tuple[ValueGuard, ...]:
    """Return the graph's guards, without those on hooks and replaced forwards.

    Hooks run around the programs of submodules, and a submodule's program replaces its forward.
    """
    guards = []
    for guard in graph.attributes:
        is_replaced = any(guard.namespace is vars(submodule) for submodule in submodules)
        is_forward = guard.name == "forward" and is_replaced
        if guard.label != "hooks of modules" and not is_forward:
            guards.append(guard)
    return tuple(guards)


def _check_effects(graph: StepGraph, trace: Trace) -> None:
    """Check that the calls do no more than return tensors and plain values.

    Raises:
        CaptureError: they log, check values, change buffers, attributes or lists, or return
            something else.
    """
    recording = trace.recording
    records = (graph.logs, graph.metrics, graph.checks, graph.appended, graph.guards)
    updates_buffer = any(buffer.update is not None for buffer in graph.buffers)
    if any((*records, recording.stored, recording.grown)) or updates_buffer:
        raise CaptureError("it logs, checks values, or changes buffers, attributes or lists")
    for leaf in pytree.tree_leaves(graph.output["outputs"]):
        if not isinstance(leaf, ValueRef | int | float | str | None):
            raise CaptureError("it returns something else than tensors")


def _parts(graph: StepGraph, calls: Sequence[Call], outputs: Sequence[Any]) -> list[Call]:
    """Return the calls with their parts of the graph. `outputs` has the result of each."""
    parts = []
    first = 0
    for call, output in zip(calls, outputs, strict=True):
        end = first + len(pytree.tree_leaves(call.inputs))
        part = _part(graph, output)
        leaves = tuple(leaf for leaf in part.leaves if first <= leaf[0] < end)
        part = replace(part, leaves=leaves)
        parts.append(replace(call, step=part, output=output, first=first))
        first = end
    return parts


def hooks_in(module: nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts of all hooks of a module, its submodules and parameters.

    Programs call none of them.
    """
    hooks = [getattr(child, name) for child in module.modules() for name in MODULE_HOOKS]
    for parameter in module.parameters():
        hooks.append(parameter._backward_hooks or {})
    return hooks


def _called(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return the module's result.

    Raises:
        CaptureError: it has hooks, changes its arguments, or returns views of them.
    """
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    versions = [tensor._version for tensor in tensors]
    output = module(*args, **kwargs)
    if any(hooks_in(module)):
        raise CaptureError("it has hooks, or a part of it has")
    is_changed = [tensor._version for tensor in tensors] != versions
    if is_changed or storages_of(output) & storages_of(tensors):
        raise CaptureError("it changes what it is given, or returns a view of that")
    return output


def plannable(
    module: LightningModule, calls: Sequence[Call], context: Context, unlike: Collection[str] = ()
) -> tuple[list[Call], list[str]]:
    """Return the outermost recorded calls that can be captured, and why others cannot; any error of
    capturing a call is such a reason.

    Args:
        calls: recorded calls, callers first.
        unlike: paths of submodules whose calls differ between ranks.
        context: as of `capture_step`.

    Returns:
        The calls, and `path: reason` of the others.
    """
    chosen: list[Call] = []
    # Indices of the calls that are chosen, or made by one that is.
    covered: set[int | None] = set()
    reasons: list[str] = []
    for index, call in enumerate(calls):
        if call.caller not in covered:
            try:
                if call.inputs is None:
                    raise CaptureError(
                        "it is called under an autocast of its own, or with what no other rank can"
                        " have"
                    )
                if call.path in unlike:
                    raise CaptureError("it reads tensors that differ between ranks")
                capture_calls(module, [call], context)
            except Exception as error:
                # The user's code may fail as well: it was not written for fake tensors.
                reasons.append(
                    f"{call.path}: {' '.join(str(getattr(error, 'problem', error)).split())}"
                )
                continue
            chosen.append(call)
        covered.add(index)
    return chosen, reasons
