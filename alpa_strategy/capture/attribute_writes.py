"""Attributes of modules that the step sets to tensors of its own: `self.aux_loss = loss`.

If the step reads such an attribute only after it has set it, the value is a result of the graph,
and every step sets the attribute again. If it reads the attribute before, it reads what an earlier
step has left. Then the value must be one that no batch changes (a table of positions that the
first call makes): the first call sets it, and later calls read a constant.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from alpa_strategy.capture.graph_builder import storages_of
from alpa_strategy.capture.module_state import ChangesOfStep
from alpa_strategy.capture.non_tensor_inputs import index_of
from alpa_strategy.capture.python_reads import Reads
from alpa_strategy.capture.python_state import PLAIN
from alpa_strategy.capture.snapshots import Kind, Snapshot, changed_names
from alpa_strategy.capture.state_tensors import StateInputs, is_state
from alpa_strategy.capture.symbolic_scalars import StepCounter
from alpa_strategy.ir.guards import MISSING
from alpa_strategy.ir.places import Place


def note_writes(
    module: nn.Module,
    of_step: ChangesOfStep,
    snapshots: Iterable[Snapshot],
    reads: Reads,
    own_tensors: Iterable[Tensor],
    known_value: Callable[[Tensor], Tensor | None],
    stand_ins: Mapping[Place, Any],
    states: StateInputs,
) -> None:
    """Add the attributes that the step has set to `of_step`.

    A value with tensors or counters of the step goes to `assigned`, unless the step reads the
    attribute first, and to `initial`, if it is the same at every step; else `_add_state` adds it.
    Changing numbers and states that have changed go to `assigned`. Others, and attributes of
    modules that are no submodules, are left out.

    Args:
        module: whose step it is.
        of_step: gets `assigned`, `initial`, `states` and `guarded`.
        snapshots: of the modules' attributes, from before the step.
        reads: the reads of attributes in the step.
        own_tensors: parameters and buffers. A view of one changes with it later, so attributes
            that have one are left out.
        known_value: returns the value of a tensor that is the same at every step, else None.
        stand_ins: location of a number that changes -> the counter that stands for it.
        states: the tensors that one step leaves for the next.
    """
    owners = set(map(id, module.modules()))
    held = storages_of(list(own_tensors))
    for snapshot in snapshots:
        owner = snapshot.names.owner
        # Modules that are no submodules have no place.
        if snapshot.kind is not Kind.NAMES or id(owner) not in owners:
            continue
        for name in changed_names(snapshot.items, snapshot.before):
            value = snapshot.items.get(name, MISSING)
            place = Place(snapshot.place, name)
            if not snapshot.names.includes(name, value) or value is stand_ins.get(place, MISSING):
                continue
            # Each step computes such a number from the last one: `self.calls += 1`.
            if place in stand_ins and type(value) in (StepCounter, int, float):
                of_step.assigned[place] = value
                continue
            if place in states:
                if not states.is_unchanged(place, value) and _is_repeatable(value):
                    of_step.assigned[place] = value
                continue
            if not _is_of_step(value) or storages_of(value) & held:
                continue
            if not reads.has_read_before(owner, name):
                of_step.assigned[place] = value
            known = _with_known_tensors(value, known_value)
            if known is not None:
                of_step.initial[place.attribute] = snapshot.items, name, known
            elif place not in of_step.assigned:
                _add_state(of_step, place, value, snapshot.before.get(name, MISSING))


def _add_state(of_step: ChangesOfStep, place: Place, value: Any, before: Any) -> None:
    """Add to `of_step` an attribute that the step reads before it sets it.

    To `states` if its former value is a state; to `assigned` and `guarded` if it had none or a
    plain one. An attribute whose former value is neither state nor plain is left out.

    Args:
        place: where the attribute is.
        value: the one that the step has set.
        before: the one before the step; MISSING if there was none.
    """
    if is_state(before):
        of_step.states.append(place)
    # In the first step there is nothing yet: `if self.hidden is None`.
    elif before is MISSING or type(before) in PLAIN:
        of_step.assigned[place] = value
        of_step.guarded.add(place)


def _is_repeatable(value: Any) -> bool:
    """Whether a value is made of the step's tensors and counters, unread leaves of the batch, and
    plain values.
    """
    for leaf in pytree.tree_leaves(value):
        is_made = _is_tensor_of_step(leaf) or type(leaf) is StepCounter
        if not is_made and type(leaf) not in PLAIN and index_of(leaf) is None:
            return False
    return True


def _is_of_step(value: Any) -> bool:
    """Whether a value is repeatable, and has a tensor or a counter."""
    kinds = set(map(type, pytree.tree_leaves(value)))
    return _is_repeatable(value) and not kinds.isdisjoint((FakeTensor, StepCounter))


def _is_tensor_of_step(value: Any) -> bool:
    """Whether a value is a tensor that the step has made, or one of its batch."""
    return type(value) is FakeTensor


def _with_known_tensors(value: Any, known_value: Callable[[Tensor], Tensor | None]) -> Any:
    """Return a value with real tensors; None if it depends on the batch, parameters or counters, or
    has a leaf that is neither a tensor nor a plain value.
    """
    leaves, spec = pytree.tree_flatten(value)
    known: list[Any] = []
    for leaf in leaves:
        is_tensor = _is_tensor_of_step(leaf)
        item = known_value(leaf) if is_tensor else leaf
        if item is None and is_tensor:
            return None
        if not is_tensor and type(leaf) not in PLAIN:
            return None
        known.append(item)
    return pytree.tree_unflatten(known, spec)
