"""What the program of a stage does besides keeping its layouts.

Planning decides it (`planner/execution.py`), the plan file has it, and lowering writes it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Execution:
    """The decisions of one stage. Ops have the names that `StagePlan.strategies` has."""

    # Ops on parameters and constants alone, such as casts, that run once per step instead of for
    # every micro-batch, in the order of the graph.
    per_step_ops: tuple[str, ...]
