"""Every valid way to run an op on one mesh axis (`axis_strategies`) and on a whole mesh
(`op_strategies`).

And what one device then runs of it (`localize`): local shapes, size arguments rewritten, the
devices' share of means
and randomness. At the end: the note in the plan that names ops without any way to divide their
work.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from alpa_strategy.cost.model import OpCosts
from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.ir.op import (
    CUSTOM_OPS,
    AxisStrategy,
    LocalCall,
    OpCall,
    Slot,
    TensorMeta,
    aten_name,
    bind,
    rebuild,
)
from alpa_strategy.ir.placement import INVARIANT, DualLayout, value_layout
from alpa_strategy.sharding.functions import elementwise_dims, may_draw
from alpa_strategy.sharding.notation import RuleMatch, repeated, to_strategies
from alpa_strategy.sharding.rule_families import RESHAPES
from alpa_strategy.sharding.rule_table import depends_on_rules, rule_of
from alpa_strategy.units import format_bytes, format_seconds

aten = torch.ops.aten

_DESCRIBED = ("aten", "prims", "alpa")  # namespaces whose ops carry the tags of what they do
# the implementation that computes more than its local call says, see `priced_call`
RING = "ring_attention"

_SIZE_ARGUMENT = frozenset(
    {
        "expand",
        "expand_copy",
        "broadcast_to",
        "sum_to_size",
        "full",
        "zeros",
        "ones",
        "empty",
        "rand",
        "randn",
    }
    | {"normal", "randint", "new_zeros", "new_ones", "new_empty", "new_full"}
)


def _local_metas(
    metas: Sequence[TensorMeta],
    by_axis: Sequence[DualLayout],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> tuple[TensorMeta, ...]:
    """`by_axis`: the placements of all tensors, one mesh axis after the other."""
    return tuple(
        _local_meta(meta, layout, mesh_shape, coordinate)
        for meta, layout in zip(metas, zip(*by_axis, strict=True), strict=True)
    )


@lru_cache(maxsize=1 << 14)
def _local_meta(
    meta: TensorMeta, layout: DualLayout, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> TensorMeta:
    """The part of a tensor that the device at `coordinate` holds: many strategies share it."""
    local_shape = value_layout(layout).local_shape(meta.shape, mesh_shape, coordinate)
    return meta.with_shape(local_shape)


def localize(
    call: OpCall,
    strategies: tuple[AxisStrategy, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> LocalCall:
    """The op that the device at `coordinate` runs when mesh axis i follows `strategies[i]`."""
    operands = _local_metas(call.operands, [s.inputs for s in strategies], mesh_shape, coordinate)
    results = _local_metas(call.results, [s.outputs for s in strategies], mesh_shape, coordinate)
    axes = tuple(axis for axis, s in enumerate(strategies) if s.implementation is not None)
    implementation = strategies[axes[0]].implementation if axes else None
    random_axes = None
    if is_random(call):
        # On axes that shard no result the devices repeat the draw, so they must draw the same.
        random_axes = tuple(
            a for a, s in enumerate(strategies) if any(p.shard_dim is not None for p in s.outputs)
        )
    return LocalCall(_local_call(call, operands, results), implementation, axes, random_axes)


def priced_call(
    call: OpCall,
    strategies: tuple[AxisStrategy, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> OpCall:
    """What the device at `coordinate` has to compute: its local call; in a ring, with everybody's
    keys and values.
    """
    if any(s.implementation == RING for s in strategies):
        query = bind(call)["query"].index
        strategies = tuple(
            replace(s, inputs=tuple(p if i == query else INVARIANT for i, p in enumerate(s.inputs)))
            if s.implementation == RING
            else s
            for s in strategies
        )
    return localize(call, strategies, mesh_shape, coordinate).call


def ring_bytes(call: OpCall, strategies: tuple[AxisStrategy, ...], local: OpCall) -> int:
    """Short-lived bytes of a ring beside operands, results and their gradients; 0 where there is
    none.

    Chunks of the query and its gradients as they are exchanged; keys, values and what is due to
    them, here and coming.
    """
    if all(s.implementation != RING for s in strategies):
        return 0
    query, key, value = (
        local.operands[bind(call)[name].index].num_bytes for name in ("query", "key", "value")
    )
    return 3 * query + 5 * (key + value)


@depends_on_rules
@lru_cache(maxsize=16384)
def is_random(call: OpCall) -> bool:
    """Whether the call draws random numbers: a random op whose probability is not zero and that is
    not in eval mode.

    Few ops of other libraries say of themselves that they are random. One with a registered rule
    must; any other, run whole on every device, is given the same random state everywhere.
    """
    if not isinstance(call.target, torch._ops.OpOverload):
        return False
    if call.target in CUSTOM_OPS:
        return may_draw(call)
    if torch.Tag.nondeterministic_seeded not in call.target.tags:
        return call.target.namespace not in _DESCRIBED and rule_of(call.target) is None
    arguments = bind(call)
    if arguments.get("train") is False or arguments.get("training") is False:
        return False
    return not any(
        name in arguments and arguments[name] == 0 for name in ("p", "dropout_p", "dropout")
    )


def _local_call(
    call: OpCall, operands: tuple[TensorMeta, ...], results: tuple[TensorMeta, ...]
) -> OpCall:
    if operands == call.operands and results == call.results:
        return call  # the very object: costs are remembered by call
    name = aten_name(call.target)
    # Views become reshapes to the local result's shape: right for any strides, and for dims that
    # become 1 long.
    if name in RESHAPES and call.target._overloadname != "dtype":  # view.dtype changes the elements
        source = next(a for a in bind(call).values() if isinstance(a, Slot))
        return OpCall(aten.reshape.default, (source, results[0].shape), (), operands, results)
    changes: dict[str, Any] = {}
    if name in _SIZE_ARGUMENT:
        changes["size"] = results[0].shape
    elif name in _CHANGES:
        changes = _CHANGES[name](call, operands, results)
    return rebuild(call, operands, results, changes)


Changes = Callable[[OpCall, tuple[TensorMeta, ...], tuple[TensorMeta, ...]], dict[str, Any]]


def _groups(argument: str) -> Changes:
    """Groups are divided with the channels."""

    def change(
        call: OpCall, operands: tuple[TensorMeta, ...], results: tuple[TensorMeta, ...]
    ) -> dict[str, Any]:
        groups = bind(call)[argument]
        whole, local = call.operands[0].shape, operands[0].shape
        if groups == 1:  # all channels, however many
            return {}
        weight, channel_dim = bind(call).get("weight"), 1
        if "conv" in aten_name(call.target) and isinstance(weight, Slot):
            # input [*n, c, *s] with or without the batch dim, weight [o, c / groups, *s]
            channel_dim = len(whole) - len(call.operands[weight.index].shape) + 1
        return {argument: groups * local[channel_dim] // whole[channel_dim]}

    return change


def _slice(
    call: OpCall, operands: tuple[TensorMeta, ...], results: tuple[TensorMeta, ...]
) -> dict[str, Any]:
    """slice and narrow along a dim that is cut: `[:-1]` of a chunk (of all but the last device's it
    leaves nothing
    out), or runs of rows, each of which is cut."""
    bound = bind(call)
    size, local, whole = (
        metas[0].shape[bound["dim"]] for metas in (results, operands, call.operands)
    )
    if local == whole:
        return {}
    start = bound["start"] or 0
    start = max(start + whole if start < 0 else start, 0) * local // whole
    return (
        {"start": start, "end": start + size}
        if "end" in bound
        else {"start": start, "length": size}
    )


def _split(
    call: OpCall, operands: tuple[TensorMeta, ...], results: tuple[TensorMeta, ...]
) -> dict[str, Any]:
    """split and its like along a dim of runs of rows, each of which is cut."""
    bound = bind(call)
    local, whole = (metas[0].shape[bound["dim"]] for metas in (operands, call.operands))
    sizes = {
        name: bound[name]
        for name in ("split_size", "split_sizes")
        if name in bound and local != whole
    }
    return {
        name: tuple(n * local // whole for n in size)
        if isinstance(size, tuple)
        else size * local // whole
        for name, size in sizes.items()
    }


def _repeat(
    call: OpCall, operands: tuple[TensorMeta, ...], results: tuple[TensorMeta, ...]
) -> dict[str, Any]:
    source, target = operands[0].shape, results[0].shape
    longer = (1,) * (len(target) - len(source)) + source
    return {"repeats": tuple(size // own for size, own in zip(target, longer, strict=True))}


_CHANGES: dict[str, Changes] = {
    # Without `dim` it is the first dim of size 3, which a cut dim can become.
    "cross": lambda call, operands, results: (
        {"dim": call.results[0].shape.index(3)} if bind(call)["dim"] is None else {}
    ),
    "linalg_vander": lambda call, operands, results: {
        "N": results[0].shape[-1]
    },  # if not said, as long as the whole
    "native_group_norm": lambda call, operands, results: {"N": operands[0].shape[0]},
    **{f"{kind}{n}d": _groups("groups") for kind in ("conv", "conv_transpose") for n in (1, 2, 3)},
    "convolution": _groups("groups"),
    "group_norm": _groups("num_groups"),
    **dict.fromkeys(("slice", "narrow", "narrow_copy"), _slice),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split"), _split),
    "repeat": _repeat,
    "arange": lambda call, operands, results: {"end": results[0].shape[0]},
    "affine_grid_generator": lambda call, operands, results: {
        "size": (results[0].shape[0], *bind(call)["size"][1:])
    },
    "repeat_interleave": lambda call, operands, results: (
        {"output_size": results[0].shape[bind(call)["dim"] or 0]}
        if "output_size" in dict(call.kwargs)
        else {}
    ),
}


def _found(call: OpCall, axis_size: int) -> RuleMatch | None:
    if not call.results:
        return None
    rule = rule_of(call.target)
    if rule is None:
        return elementwise_dims(call, axis_size) if call.target in CUSTOM_OPS else None
    return rule(call, axis_size)


@depends_on_rules
@lru_cache(maxsize=65536)
def axis_strategies(call: OpCall, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Every valid way to run `call` on one mesh axis of `axis_size` devices; no duplicates, the
    repeated one first.

    An op without a rule runs whole on every device.
    """
    found = _found(call, axis_size)
    return (repeated(call),) if found is None else to_strategies(call, found, axis_size)


@depends_on_rules
@lru_cache(maxsize=65536)
def op_strategies(
    call: OpCall, mesh_shape: tuple[int, ...]
) -> tuple[tuple[AxisStrategy, ...], ...]:
    """Every combination over the mesh axes. Later axes cut what earlier ones left, at the device
    with the least.
    """
    combinations: list[tuple[AxisStrategy, ...]] = [()]
    for axis, axis_size in enumerate(mesh_shape):
        longer = []
        for chosen in combinations:
            local = call
            if chosen:
                # Chunks may be uneven: the last device has the smallest.
                last_device = tuple(size - 1 for size in mesh_shape[:axis])
                local = localize(call, chosen, mesh_shape[:axis], last_device).call
            has_ring = any(s.implementation == RING for s in chosen)
            for strategy in axis_strategies(local, axis_size):
                if has_ring and strategy.implementation == RING:
                    continue
                longer.append((*chosen, strategy))
        combinations = longer
    return tuple(_shrink_collectives(c, mesh_shape) for c in combinations)


def _shrink_collectives(
    strategies: tuple[AxisStrategy, ...], mesh_shape: tuple[int, ...]
) -> tuple[AxisStrategy, ...]:
    """What an implementation communicates is divided by later axes that cut its first operand."""
    result = list(strategies)
    for i, strategy in enumerate(strategies):
        if not strategy.collectives:
            continue
        share = 1
        for later, size in zip(strategies[i + 1 :], mesh_shape[i + 1 :], strict=True):
            if later.implementation is None and later.inputs[0].shard_dim is not None:
                share *= size
        if share > 1:
            collectives = tuple(
                replace(c, num_bytes=-(-c.num_bytes // share)) for c in strategy.collectives
            )
            result[i] = replace(strategy, collectives=collectives)
    return tuple(result)


def rule_origin(call: OpCall) -> str:
    """Where the op's strategies come from.

    `registered`, `notation`, `view`, `pointwise`, `reduction` (the table), or `replicated`: it has
    none.
    """
    found = _found(call, 2)
    return "replicated" if found is None else found.origin


def replicated_notes(step: StepGraph, costs: OpCosts) -> list[str]:
    """A note per kind of op that every device has to run whole: where it is called, its time, its
    results' bytes.
    """
    found: dict[str, list[Op]] = {}
    for op in step.ops:
        if op.operands and rule_origin(op.call) == "replicated":
            found.setdefault(op.call.target_name, []).append(op)
    return [_note(name, ops, costs) for name, ops in sorted(found.items())]


def _note(name: str, ops: list[Op], costs: OpCosts) -> str:
    seconds = sum(sum(costs.op_seconds(op.call)) for op in ops)
    num_bytes = sum(meta.num_bytes for op in ops for meta in op.call.results)
    places = []
    for op in ops[:2]:
        _, _, line_of_user = op.source.rpartition("/")
        places.append(line_of_user or op.module)
    where = ", ".join(dict.fromkeys(places))
    calls = "1 call" if len(ops) == 1 else f"{len(ops)} calls"
    return (
        f"no rule for {name} ({calls}{f', {where}' if where else ''}): run whole on every device, "
        f"{format_seconds(seconds)} a step and {format_bytes(num_bytes)} of"
        f" results{_advice(ops[0].call.target)}"
    )


def _advice(target: Any) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    name = (
        CUSTOM_OPS[target].function.__name__ if target in CUSTOM_OPS else f'"{target._schema.name}"'
    )
    return f"; if its work can be divided, register_sharding({name}, ...) says how"
