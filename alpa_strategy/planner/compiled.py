"""What compiled programs do besides what all programs do (`CompiledExecution`)."""

from collections.abc import Iterable

from alpa_strategy.cost.flops import CONVOLUTIONS, op_base_name
from alpa_strategy.ir.execution import CompiledExecution
from alpa_strategy.ir.graph import Op
from alpa_strategy.ir.guards import is_symbolic
from alpa_strategy.ir.op import OpCall
from alpa_strategy.ir.per_rank import PerRank
from alpa_strategy.ir.plan import StagePlan


def compiled_execution(ops: Iterable[Op], stage: StagePlan) -> CompiledExecution:
    """Return the decisions for compiled programs of a stage.

    Args:
        ops: of the programs that are compiled.
        stage: the plan of the stage.
    """
    channels_last = []
    split_batch_norms = []
    for op in ops:
        if is_image_convolution(op.call):
            channels_last.append(op.name)
        if can_be_split(op, stage):
            split_batch_norms.append(op.name)
    return CompiledExecution(tuple(channels_last), tuple(split_batch_norms))


def is_image_convolution(call: OpCall) -> bool:
    """Whether an op is a convolution of images [samples, channels, height, width].

    Kernels are faster with channels last, and values computed from such images keep that memory
    format, as segments keep eager PyTorch's strides.
    """
    return op_base_name(call) in CONVOLUTIONS and len(call.operands[0].shape) == 4


def can_be_split(op: Op, stage: StagePlan) -> bool:
    """Whether an op is a batch norm over the samples of several devices that can be compiled up to
    the exchange of its sums, and after it.
    """
    if isinstance(op.call.target, PerRank) or is_symbolic(op.call):
        return False
    implementations = [strategy.implementation for strategy in stage.strategies[op.name]]
    return next(filter(None, implementations), None) == "batch_norm_sync"
