"""axis_strategies and op_strategies: every valid way to run an op on one mesh axis, and on a whole mesh.

And what ops without any way to divide their work cost: the note in the plan that names them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from alpa_strategy.cost.model import OpCosts
from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.ir.op import CUSTOM_OPS, AxisStrategy, OpCall
from alpa_strategy.sharding.functions import elementwise_dims
from alpa_strategy.sharding.localize import RING, localize
from alpa_strategy.sharding.rule_table import depends_on_rules, rule_of
from alpa_strategy.sharding.splits import Found, repeated, to_strategies
from alpa_strategy.units import format_bytes, format_seconds


def _found(call: OpCall, axis_size: int) -> Found | None:
    if not call.results:
        return None
    rule = rule_of(call.target)
    if rule is None:
        return elementwise_dims(call, axis_size) if call.target in CUSTOM_OPS else None
    return rule(call, axis_size)


@depends_on_rules
@lru_cache(maxsize=65536)
def axis_strategies(call: OpCall, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Every valid way to run `call` on one mesh axis of `axis_size` devices; no duplicates, the repeated one first.

    An op without a rule runs whole on every device.
    """
    found = _found(call, axis_size)
    return (repeated(call),) if found is None else to_strategies(call, found, axis_size)


@depends_on_rules
@lru_cache(maxsize=65536)
def op_strategies(call: OpCall, mesh_shape: tuple[int, ...]) -> tuple[tuple[AxisStrategy, ...], ...]:
    """Every combination over the mesh axes. Later axes cut what earlier ones left, at the device with the least."""
    if not mesh_shape:
        return ((),)
    combinations: list[tuple[AxisStrategy, ...]] = [()]
    for axis, axis_size in enumerate(mesh_shape):
        longer = []
        for chosen in combinations:
            local = call
            if chosen:
                last = tuple(n - 1 for n in mesh_shape[:axis])  # uneven chunks: the last device has the fewest
                local = localize(call, chosen, mesh_shape[:axis], last).call
            longer += [(*chosen, s) for s in axis_strategies(local, axis_size) if not _is_second_ring(chosen, s)]
        combinations = longer
    return tuple(_shrink_collectives(c, mesh_shape) for c in combinations)


def _is_second_ring(chosen: tuple[AxisStrategy, ...], strategy: AxisStrategy) -> bool:
    """Keys and values go around one axis only: the mesh with both axes in one has the other plan."""
    return strategy.implementation == RING and any(s.implementation == RING for s in chosen)


def _shrink_collectives(strategies: tuple[AxisStrategy, ...], mesh_shape: tuple[int, ...]) -> tuple[AxisStrategy, ...]:
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
            collectives = tuple(replace(c, num_bytes=-(-c.num_bytes // share)) for c in strategy.collectives)
            result[i] = replace(strategy, collectives=collectives)
    return tuple(result)


def rule_origin(call: OpCall) -> str:
    """Where the op's strategies come from.

    `registered`, `notation`, `view`, `pointwise`, `reduction` (the table), or `replicated`: it has none.
    """
    found = _found(call, 2)
    return "replicated" if found is None else found.origin


def replicated_notes(step: StepGraph, costs: OpCosts) -> list[str]:
    """A note per kind of op that every device has to run whole: where it is called, its time, its results' bytes."""
    found: dict[str, list[Op]] = {}
    for op in step.ops:
        if op.operands and rule_origin(op.call) == "replicated":
            found.setdefault(op.call.target_name, []).append(op)
    return [_note(name, ops, costs) for name, ops in sorted(found.items())]


def _note(name: str, ops: list[Op], costs: OpCosts) -> str:
    seconds = sum(sum(costs.op_seconds(op.call)) for op in ops)
    num_bytes = sum(meta.num_bytes for op in ops for meta in op.call.results)
    where = ", ".join(dict.fromkeys(op.source.rpartition("/")[2] or op.module for op in ops[:2]))
    calls = "1 call" if len(ops) == 1 else f"{len(ops)} calls"
    return (
        f"no rule for {name} ({calls}{f', {where}' if where else ''}): run whole on every device, "
        f"{format_seconds(seconds)} a step and {format_bytes(num_bytes)} of results{_advice(ops[0].call.target)}"
    )


def _advice(target: Any) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    name = CUSTOM_OPS[target].function.__name__ if target in CUSTOM_OPS else f'"{target._schema.name}"'
    return f"; if its work can be divided, register_sharding({name}, ...) says how"
