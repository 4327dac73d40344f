"""What ops without any way to divide their work cost: the note in the plan that names them."""

from __future__ import annotations

from alpa_strategy.cost.model import OpCosts
from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.sharding import rule_origin
from alpa_strategy.units import format_bytes, format_seconds


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
        f"{format_seconds(seconds)} a step and {format_bytes(num_bytes)} of results"
    )
