"""Steps that set attributes of the module in every call, or in their first call only."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.capture.convert import convert
from alpa_strategy.capture.module_state import changed_attributes, initialized
from alpa_strategy.capture.trace import StepCall, trace_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import StepGraph, stable_text, tensor_digest, values_of
from alpa_strategy.ir.guards import ValueGuard, is_symbolic
from alpa_strategy.ir.places import Place
from alpa_strategy.sharding.strategies import is_random

# Label -> (namespace, name, value).
Stored = Mapping[str, tuple[dict[str, Any], str, Any]]


def after_first_call(
    call: StepCall, graph: StepGraph, stored: Stored
) -> tuple[StepGraph, tuple[Place, ...]]:
    """Capture the second call of a step that sets attributes in its first call.

    Libraries install their hooks that way. It is an initialization if the second call sets no
    attribute and computes the same: then the attributes stay set. Numbers that the second call sets
    once more become inputs (`self.calls += 1`).

    Args:
        graph: of the first call.
        stored: the attributes that it set.

    Returns:
        The step, and the numbers that are its inputs.

    Raises:
        CaptureError: it is no initialization, or the second call cannot be captured.
    """
    counted: tuple[Place, ...] = ()
    try:
        with initialized(stored):
            trace = trace_step(call)
            recording = trace.recording
            counted = _counted(call.module, stored, recording.stored)
            assigned = {place.attribute for place in recording.assigned}
            if recording.stored or recording.grown or recording.states:
                raise changed_attributes(stored)
            second = convert(trace)
            if not _compute_the_same(graph, second, call.module, stored):
                raise changed_attributes(stored)
    except CaptureError:
        if not counted:
            raise
        return _with_inputs(call, counted)

    guards = []
    for label, (namespace, name, value) in stored.items():
        if label in assigned:
            continue
        guards.append(ValueGuard(label, name, namespace, value))
    return replace(second, stored=tuple(guards)), call.numbers


def _with_inputs(call: StepCall, counted: tuple[Place, ...]) -> tuple[StepGraph, tuple[Place, ...]]:
    """Trace the step once more with the numbers at `counted` as inputs, and return its graph and
    the locations of all numbers that are inputs. If it still sets attributes, `after_first_call`
    follows.

    Raises:
        CaptureError: it leaves tensors for the next step, is no initialization, or cannot be
            captured.
    """
    call = replace(call, numbers=(*call.numbers, *counted))
    trace = trace_step(call)
    graph = convert(trace)
    if trace.recording.states:
        raise changed_attributes(place.attribute for place in trace.recording.states)
    if trace.recording.stored:
        return after_first_call(call, graph, trace.recording.stored)
    return graph, call.numbers


def _counted(module: nn.Module, first: Stored, second: Stored) -> tuple[Place, ...]:
    """Return the locations of the numbers that the second call sets. Each must be an attribute of
    a submodule that the first call has set to the same type; none if the second call sets others.
    """
    paths = {id(vars(child)): path for path, child in module.named_modules()}
    places = []
    for label, (namespace, name, value) in second.items():
        is_number = type(value) in (int, float) and label in first
        if not is_number or id(namespace) not in paths or type(first[label][2]) is not type(value):
            return ()
        places.append(Place(paths[id(namespace)], name))
    return tuple(places)


def _compute_the_same(
    first: StepGraph, second: StepGraph, module: nn.Module, stored: Stored
) -> bool:
    """Whether two calls compute the same.

    The second one may read tensors that the first one has made without the batch and parameters.
    """
    if first.graph_digest == second.graph_digest:
        return True
    leaves = pytree.tree_leaves([value for _, _, value in stored.values()])
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return False
    assigned = {record.place.attribute for record in second.assigned}
    once = stored.keys() - assigned
    return _folded_digest(first, module, once) == _folded_digest(second, module, once)


def _folded_digest(step: StepGraph, module: nn.Module, once: Collection[str]) -> str:
    """Return a text of hashes, the same for steps that compute the same results. What depends on
    constants and buffers alone is computed, and enters with its value.

    Args:
        module: has the buffers.
        once: attributes that the first call sets, and no other.
    """
    texts: dict[int, str] = {}
    known: dict[int, Tensor] = {}
    for parameter in step.parameters:
        texts[parameter.value] = parameter.name
    for leaf in step.batch:
        texts[leaf.value] = f"leaf {leaf.leaf}"
    for constant in step.constants:
        known[constant.value] = constant.tensor
    for buffer in step.buffers:
        texts[buffer.value] = buffer.name
        tensor = attrgetter(buffer.name)(module)
        if not buffer.is_parameter and not tensor.is_meta:
            known[buffer.value] = tensor
    texts |= {value: tensor_digest(tensor) for value, tensor in known.items()}

    for op in step.ops:
        call = op.call
        is_known = all(operand in known for operand in op.operands)
        if is_known and not is_random(call) and not is_symbolic(call):
            with torch.no_grad():
                returned = call.call(*(known[operand] for operand in op.operands))
            items = returned if isinstance(returned, tuple | list) else [returned]
            results = [item for item in items if isinstance(item, Tensor)]
            for value, tensor in zip(op.results, results, strict=True):
                known[value] = tensor
                texts[value] = tensor_digest(tensor)
            continue
        operands = [texts[operand] for operand in op.operands]
        description = f"{call.target_name}{call.args}{call.kwargs}{operands}"
        digest = hashlib.sha256(description.encode()).hexdigest()[:16]
        for number, value in enumerate(op.results):
            texts[value] = f"{digest}.{number}"

    # The structure of the results, without the numbers of their values.
    assigned = [record for record in step.assigned if record.place.attribute not in once]
    records = (step.output, step.logs, step.metrics, step.checks, step.appended, assigned)
    lines = [texts[value] for value in (step.loss, *values_of(records))]
    lines += [f"{b.name} {texts[b.update]}" for b in step.buffers if b.update is not None]
    lines += [stable_text([log.name for log in step.logs]), stable_text(step.guards)]
    return "\n".join(lines)
