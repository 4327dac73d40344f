"""Calls of submodules as one graph: what can be planned of a step that itself cannot be captured.

All calls are traced together, so that they are planned together, with their inputs as the batch and
their results as what leaves the graph; each is then run by its own part of it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.capture.capture import convert
from alpa_strategy.capture.graph_builder import storages_of
from alpa_strategy.capture.python_reads import MODULE_HOOKS
from alpa_strategy.capture.rewrites import segment_fused_linears
from alpa_strategy.capture.trace import StepCall, trace_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import StepGraph, ValueRef, values_of

Context = Callable[[], AbstractContextManager[Any]]  # around the step, see `capture_step`


@dataclass(frozen=True)
class Call:
    """A call of the submodule at `path`."""

    path: str
    given: Any  # (args, kwargs), tensors on the meta device; None: of no use
    caller: int | None = (
        # the number of the recorded call that it comes from, None where the step itself makes it
        None
    )
    # step, output: its part of the graph of several, and what it returns
    step: StepGraph | None = None
    output: Any = None
    first: int = 0  # where its leaves of the batch begin


def capture_calls(
    module: LightningModule, calls: Sequence[Call], context: Context
) -> tuple[StepGraph, list[Call]]:
    """The graph of all `calls`, without a loss, and the calls with their parts of it.

    Raises:
        CaptureError: one does more than to compute tensors of what it is given. Errors of the
            user's code pass.
    """

    def step(batch: Any) -> dict[str, Any]:
        outputs = [
            _called(module.get_submodule(c.path), *given)
            for c, given in zip(calls, batch, strict=True)
        ]
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        # A graph has a loss: this one is cut off.
        return {
            "loss": sum(leaf.sum() for leaf in tensors if leaf.requires_grad),
            "outputs": outputs,
        }

    trace = trace_step(StepCall(module, [call.given for call in calls], 1, 0, context, step=step))
    graph = replace(segment_fused_linears(convert(trace)), batch_scope="global")
    own = [vars(module.get_submodule(call.path)) for call in calls]  # whose forwards are replaced
    # Hooks run around the programs, and are not there where these are captured.
    rest = [g for g in graph.attributes if g.label != "hooks of modules"]
    kept = [g for g in rest if g.name != "forward" or not any(g.namespace is each for each in own)]
    graph = replace(graph, attributes=tuple(kept))
    done = (
        graph.logs,
        graph.metrics,
        graph.checks,
        graph.appended,
        graph.guards,
        trace.recording.stored,
    )
    if (
        any(done)
        or trace.recording.grown
        or any(buffer.update is not None for buffer in graph.buffers)
    ):
        raise CaptureError("it logs, checks values, or changes buffers, attributes or lists")
    outputs = graph.output["outputs"]
    if not all(
        isinstance(leaf, ValueRef | int | float | str | None)
        for leaf in pytree.tree_leaves(outputs)
    ):
        raise CaptureError("it returns something else than tensors")
    parts, first = list[Call](), 0
    for call, output in zip(calls, outputs, strict=True):
        last = first + len(pytree.tree_leaves(call.given))
        part = graph.part_for(values_of(output))
        part = replace(
            part, leaves=tuple(guard for guard in part.leaves if first <= guard[0] < last)
        )
        parts.append(replace(call, step=part, output=output, first=first))
        first = last
    return graph.part_for(values_of(outputs)), parts


def hooks_in(module: nn.Module) -> list[dict[Any, Any]]:
    """What holds hooks of a module and its parts, now or later: a program of it calls none of
    them.
    """
    found = [getattr(each, name) for each in module.modules() for name in MODULE_HOOKS]
    return found + [parameter._backward_hooks or {} for parameter in module.parameters()]


def _called(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What the module returns; CaptureError where that is not all that comes of the call."""
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    versions = [leaf._version for leaf in given]
    output = module(*args, **kwargs)
    if any(hooks_in(module)):
        raise CaptureError("it has hooks, or a part of it has")
    if [leaf._version for leaf in given] != versions or storages_of(output) & storages_of(given):
        raise CaptureError("it changes what it is given, or returns a view of that")
    return output


def plannable(
    module: LightningModule, calls: Sequence[Call], context: Context
) -> tuple[list[Call], list[str]]:
    """Of recorded calls, callers first, the outermost that can be captured; and why others
    cannot.
    """
    chosen: list[Call] = []
    covered: set[int | None] = set()  # chosen, or within one that is
    reasons: list[str] = []
    for index, call in enumerate(calls):
        if call.caller not in covered:
            try:
                if call.given is None:
                    raise CaptureError(
                        "it is called under an autocast of its own, or with what no other rank can"
                        " have"
                    )
                capture_calls(module, [call], context)
            except (
                Exception
            ) as error:  # of the user's code as well, which was not written for fake tensors
                reasons.append(
                    f"{call.path}: {' '.join(str(getattr(error, 'problem', error)).split())}"
                )
                continue
            chosen.append(call)
        covered.add(index)
    return chosen, reasons
