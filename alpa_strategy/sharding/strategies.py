"""Every valid strategy of an op on one mesh axis (`axis_strategies`) and on a mesh
(`op_strategies`).

`localize` returns the call that one device runs under a strategy: local shapes, with size arguments
rewritten. At the end: the plan's note on ops whose work cannot be divided.
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
from alpa_strategy.ir.per_rank import PerRank, per_rank_call
from alpa_strategy.ir.placement import INVARIANT, DualLayout, value_layout
from alpa_strategy.sharding.functions import elementwise_dims, may_draw
from alpa_strategy.sharding.notation import RuleMatch, repeated_strategy, to_strategies
from alpa_strategy.sharding.per_rank import per_rank_match
from alpa_strategy.sharding.rule_families import is_reshape
from alpa_strategy.sharding.rule_table import depends_on_rules, rule_of
from alpa_strategy.units import format_bytes, format_seconds

aten = torch.ops.aten

# Namespaces whose ops are tagged correctly.
_TAGGED = ("aten", "prims", "alpa")
# The implementation that computes more than its local call does, see `priced_call`.
RING = "ring_attention"

# Ops with an argument `size`, the shape of their result.
SIZE_ARGUMENT = frozenset(
    (
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
        "normal",
        "randint",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
    )
)


def _local_metas(
    metas: Sequence[TensorMeta],
    by_axis: Sequence[DualLayout],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> tuple[TensorMeta, ...]:
    """Return the metas of tensors at the shapes of the device at `coordinate`.

    Args:
        by_axis: the placements of all tensors, one mesh axis after the other.
    """
    local_metas = []
    for meta, layout in zip(metas, zip(*by_axis, strict=True), strict=True):
        local_metas.append(_local_meta(meta, layout, mesh_shape, coordinate))
    return tuple(local_metas)


@lru_cache(maxsize=1 << 14)
def _local_meta(
    meta: TensorMeta, layout: DualLayout, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> TensorMeta:
    """Return the meta of the shard of a tensor on the device at `coordinate`. Many strategies share
    it.
    """
    local_shape = value_layout(layout).local_shape(meta.shape, mesh_shape, coordinate)
    return meta.with_shape(local_shape)


def localize(
    call: OpCall,
    strategies: tuple[AxisStrategy, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> LocalCall:
    """Return the op that the device at `coordinate` runs if mesh axis i has `strategies[i]`."""
    operands = _local_metas(call.operands, [s.inputs for s in strategies], mesh_shape, coordinate)
    results = _local_metas(call.results, [s.outputs for s in strategies], mesh_shape, coordinate)
    axes = tuple(axis for axis, s in enumerate(strategies) if s.implementation is not None)
    implementation = strategies[axes[0]].implementation if axes else None
    random_axes = _sharding_axes(strategies) if is_random(call) else None
    return LocalCall(_local_call(call, operands, results), implementation, axes, random_axes)


def _sharding_axes(strategies: tuple[AxisStrategy, ...]) -> tuple[int, ...]:
    """Return the mesh axes that shard a result.

    On the other axes devices repeat the work, so that they must draw the same random numbers.
    """
    axes = []
    for axis, strategy in enumerate(strategies):
        if any(placement.shard_dim is not None for placement in strategy.outputs):
            axes.append(axis)
    return tuple(axes)


def priced_call(
    call: OpCall,
    strategies: tuple[AxisStrategy, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> OpCall:
    """Return the work of the device at `coordinate`, as a call whose costs are known.

    Its local call; in a ring, with the keys and values of all devices.
    """
    if any(strategy.implementation == RING for strategy in strategies):
        query = bind(call)["query"].index
        strategies = tuple(_with_full_keys(strategy, query) for strategy in strategies)
    return localize(call, strategies, mesh_shape, coordinate).call


def _with_full_keys(strategy: AxisStrategy, query: int) -> AxisStrategy:
    """Return a ring's strategy with all operands but that of index `query` unsharded; any other
    strategy unchanged.
    """
    if strategy.implementation != RING:
        return strategy
    inputs = [INVARIANT] * len(strategy.inputs)
    inputs[query] = strategy.inputs[query]
    return replace(strategy, inputs=tuple(inputs))


def ring_bytes(call: OpCall, strategies: tuple[AxisStrategy, ...], local: OpCall) -> int:
    """Return the temporary bytes of a ring; 0 if there is none.

    In addition to operands, results and their gradients: chunks of the query and its gradients as
    they are exchanged; keys, values and their gradients, on the device and in flight.

    Args:
        local: the device's call.
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
    """Whether the call draws random numbers.

    A random op does unless its probability is zero, or it is in eval mode. Few ops of other
    libraries are tagged as random. One with a registered rule must be. Any other runs in full on
    every device, and gets the same random state there, as if it were random.
    """
    if isinstance(call.target, PerRank):
        return is_random(call.target.inner)
    if not isinstance(call.target, torch._ops.OpOverload):
        return False
    if call.target in CUSTOM_OPS:
        return may_draw(call)
    if torch.Tag.nondeterministic_seeded not in call.target.tags:
        return call.target.namespace not in _TAGGED and rule_of(call.target) is None
    arguments = bind(call)
    if arguments.get("train") is False or arguments.get("training") is False:
        return False
    probabilities = ("p", "dropout_p", "dropout")
    return all(arguments.get(name) != 0 for name in probabilities)


def _local_call(
    call: OpCall, operands: tuple[TensorMeta, ...], results: tuple[TensorMeta, ...]
) -> OpCall:
    """Return `call` on local tensors, with the arguments that depend on shapes rewritten.

    Args:
        operands, results: metas of the local tensors. If they are those of `call`, it is returned
            itself.
    """
    if operands == call.operands and results == call.results:
        # The same object: costs are cached by call.
        return call
    if isinstance(call.target, PerRank):
        return _local_per_rank(call, operands, results)
    name = aten_name(call.target)
    # Views become reshapes to the local result's shape: right for any strides, and for dims whose
    # local size is 1.
    if is_reshape(call):
        source = next(a for a in bind(call).values() if isinstance(a, Slot))
        return OpCall(aten.reshape.default, (source, results[0].shape), (), operands, results)
    changes: dict[str, Any] = {}
    if name in SIZE_ARGUMENT:
        changes["size"] = results[0].shape
    elif name in _CHANGES:
        changes = _CHANGES[name](call, operands, results)
    return rebuild(call, operands, results, changes)


def _local_per_rank(
    call: OpCall, operands: tuple[TensorMeta, ...], results: tuple[TensorMeta, ...]
) -> OpCall:
    """Return a call that runs once for each rank on local tensors, with the same: of fewer ranks,
    or on shards of each. Args: as of `_local_call`.
    """
    target: PerRank = call.target
    inner_operands = []
    for meta, is_mapped in zip(operands, target.mapped, strict=True):
        inner_operands.append(meta.with_shape(meta.shape[1:]) if is_mapped else meta)
    inner_results = [meta.with_shape(meta.shape[1:]) for meta in results]
    inner = _local_call(target.inner, tuple(inner_operands), tuple(inner_results))
    num_ranks = results[0].shape[0]
    return per_rank_call(inner, target.mapped, num_ranks)


# (call, local operands, local results) -> arguments to change
Changes = Callable[[OpCall, tuple[TensorMeta, ...], tuple[TensorMeta, ...]], dict[str, Any]]


def _groups(argument: str) -> Changes:
    """Return the `Changes` of an argument for the number of groups, which is divided with the
    channels.
    """

    def change(
        call: OpCall, operands: tuple[TensorMeta, ...], results: tuple[TensorMeta, ...]
    ) -> dict[str, Any]:
        groups = bind(call)[argument]
        if groups == 1:
            return {}
        full_shape = call.operands[0].shape
        local_shape = operands[0].shape
        weight = bind(call).get("weight")
        channel_dim = 1
        if "conv" in aten_name(call.target) and isinstance(weight, Slot):
            # input [*n, c, *s] with or without the batch dim, weight [o, c / groups, *s]
            channel_dim = len(full_shape) - len(call.operands[weight.index].shape) + 1
        return {argument: groups * local_shape[channel_dim] // full_shape[channel_dim]}

    return change


def _slice(
    call: OpCall, operands: tuple[TensorMeta, ...], results: tuple[TensorMeta, ...]
) -> dict[str, Any]:
    """Return the arguments that `slice` and `narrow` have on local tensors along a sharded dim; {}
    along another one. Args: as of `_local_call`.

    `[:-1]` of a chunk, which drops an element on the last device alone; or segments of rows, each
    of which is sharded.
    """
    bound = bind(call)
    dim = bound["dim"]
    size = results[0].shape[dim]
    local_size = operands[0].shape[dim]
    full_size = call.operands[0].shape[dim]
    if local_size == full_size:
        return {}
    start = bound["start"] or 0
    if start < 0:
        start += full_size
    local_start = max(start, 0) * local_size // full_size
    if "end" in bound:
        return {"start": local_start, "end": local_start + size}
    return {"start": local_start, "length": size}


def _split(
    call: OpCall, operands: tuple[TensorMeta, ...], results: tuple[TensorMeta, ...]
) -> dict[str, Any]:
    """Return the arguments that `split` and relatives have on local tensors along a sharded dim of
    segments; {} along another one. Args: as of `_local_call`.
    """
    bound = bind(call)
    local_size = operands[0].shape[bound["dim"]]
    full_size = call.operands[0].shape[bound["dim"]]
    if local_size == full_size:
        return {}
    changes: dict[str, Any] = {}
    for name in ("split_size", "split_sizes"):
        if name not in bound:
            continue
        sizes = bound[name]
        if isinstance(sizes, tuple):
            changes[name] = tuple(size * local_size // full_size for size in sizes)
        else:
            changes[name] = sizes * local_size // full_size
    return changes


def _repeat(
    call: OpCall, operands: tuple[TensorMeta, ...], results: tuple[TensorMeta, ...]
) -> dict[str, Any]:
    """Return the arguments of `repeat` that make shapes `results` of `operands`."""
    source = operands[0].shape
    target = results[0].shape
    aligned = (1,) * (len(target) - len(source)) + source
    pairs = zip(target, aligned, strict=True)
    return {"repeats": tuple(target_size // size for target_size, size in pairs)}


_CHANGES: dict[str, Changes] = {
    # Without `dim` it is the first dim of size 3, which may also be a sharded dim's local size.
    "cross": lambda call, operands, results: (
        {"dim": call.results[0].shape.index(3)} if bind(call)["dim"] is None else {}
    ),
    # By default the size of the last dim, which may be a local one.
    "linalg_vander": lambda call, operands, results: {"N": results[0].shape[-1]},
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


def _match(call: OpCall, axis_size: int) -> RuleMatch | None:
    """Return the result of the op's rule for a call on an axis of `axis_size` devices; None if it
    has no rule, no results, or the rule does not fit. For a custom op without a rule, dims that it
    treats element by element are looked for.
    """
    if not call.results:
        return None
    if isinstance(call.target, PerRank):
        inner_match = _match(call.target.inner, axis_size)
        return per_rank_match(call.target, inner_match)
    rule = rule_of(call.target)
    if rule is None:
        return elementwise_dims(call, axis_size) if call.target in CUSTOM_OPS else None
    return rule(call, axis_size)


@depends_on_rules
@lru_cache(maxsize=65536)
def axis_strategies(call: OpCall, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Return every valid strategy of `call` on one mesh axis of `axis_size` devices.

    No duplicates. First the one that repeats the work on every device, which is the only one of an
    op without a rule.
    """
    match = _match(call, axis_size)
    if match is None:
        return (repeated_strategy(call),)
    return to_strategies(call, match, axis_size)


@depends_on_rules
@lru_cache(maxsize=65536)
def op_strategies(
    call: OpCall, mesh_shape: tuple[int, ...]
) -> tuple[tuple[AxisStrategy, ...], ...]:
    """Return the combinations of strategies over the mesh axes: all in which at most one axis has
    ring attention.

    Later axes shard the chunks of earlier ones: strategies are those of the smallest chunk, and
    collectives of earlier axes move fewer bytes (`_shrink_collectives`).
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
    """Return the strategies, one per mesh axis, with fewer bytes in an implementation's collectives
    if later axes shard the op's first operand.

    The bytes are divided by the number of devices on these later axes, and rounded up. Axes that
    have an implementation themselves do not count.
    """
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
    """Return the origin of an op's strategies.

    `registered`; `notation`, `view`, `pointwise` or `reduction` (the table); or `replicated` if the
    op has no rule.
    """
    match = _match(call, 2)
    return "replicated" if match is None else match.origin


def replicated_notes(step: StepGraph, costs: OpCosts) -> list[str]:
    """Return a note per kind of op with operands that every device runs in full, for lack of a
    rule.

    With the user's lines that call it, its seconds, and the bytes of its results.
    """
    by_name: dict[str, list[Op]] = {}
    for op in step.ops:
        if op.operands and rule_origin(op.call) == "replicated":
            by_name.setdefault(op.call.target_name, []).append(op)
    return [_note(name, ops, costs) for name, ops in sorted(by_name.items())]


def _note(name: str, ops: list[Op], costs: OpCosts) -> str:
    """Return a note for the user on an op without rule: where it is called, its seconds and
    bytes.

    Args:
        name: of the op.
        ops: its calls in the step.
    """
    seconds = sum(sum(costs.op_seconds(op.call)) for op in ops)
    num_bytes = 0
    for op in ops:
        num_bytes += sum(meta.num_bytes for meta in op.call.results)
    locations = []
    for op in ops[:2]:
        _, _, line_of_user = op.source.rpartition("/")
        locations.append(line_of_user or op.module)
    calls = "1 call" if len(ops) == 1 else f"{len(ops)} calls"
    details = [calls, *filter(None, [", ".join(dict.fromkeys(locations))])]
    return (
        f"no rule for {name} ({', '.join(details)}): run whole on every device, "
        f"{format_seconds(seconds)} a step and {format_bytes(num_bytes)} of"
        f" results{_advice(ops[0].call.target)}"
    )


def _advice(target: Any) -> str:
    """Return how to give an op a rule, "" if it is none that the user could."""
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    name = f'"{target._schema.name}"'
    if target in CUSTOM_OPS:
        name = CUSTOM_OPS[target].function.__name__
    return f"; if its work can be divided, register_sharding({name}, ...) says how"
