"""What the program of a stage does besides keeping its layouts.

Planning decides it (`planner/execution.py`), the plan file has it, and lowering writes it.
"""

from dataclasses import dataclass

from alpa_strategy.ir.placement import DualLayout


@dataclass(frozen=True)
class CompiledExecution:
    """The decisions that hold for compiled programs alone."""

    # Convolutions that read their images as channels last.
    channels_last: tuple[str, ...]

    # Batch norms over the samples of several devices that are two compiled parts, with the exchange
    # of their sums between them.
    split_batch_norms: tuple[str, ...]


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

    # Value that leaves the step, such as the loss or a log -> the layout in which it leaves. None:
    # the plan file is of a version that did not have it.
    leaving: dict[int, DualLayout] | None = None

    # None: the programs are not compiled, or the plan file is of a version that did not have it.
    compiled: CompiledExecution | None = None
