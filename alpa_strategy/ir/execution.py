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

    # Matmuls that read one input in one layout: each group is one line of the program, in whose
    # backward the input's gradient is summed while the weights' gradients are computed.
    fused_matmuls: tuple[tuple[str, ...], ...]

    # Matmul whose result is summed in chunks (`StagePlan.num_chunks`) -> the dim of the chunks.
    chunk_dims: dict[str, int]

    # Leaves of the batch (`batch[1]`) and ops on them alone, whose results are resharded before the
    # forward.
    early_reshardings: tuple[str, ...]
