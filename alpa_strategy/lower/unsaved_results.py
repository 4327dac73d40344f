"""Ops whose results are recomputed, or fetched from host memory, for the backward of other ops."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from alpa_strategy.comm.saved_tensor_hooks import active_regather
from alpa_strategy.ir.op import map_slots, with_slots


def without_saving(target: Callable[..., Tensor], is_stored: bool) -> Callable[..., Tensor]:
    """Return `target` as a function whose result is not saved for the backward of other ops.

    This needs active hooks (`SavedTensorHooks`) and a result that requires a gradient; else nothing
    changes.

    Args:
        is_stored: whether the result is offloaded to host memory; else it is recomputed.
    """

    def run(*args: Any, **kwargs: Any) -> Tensor:
        result = target(*args, **kwargs)
        hooks = active_regather()
        if hooks is None or not result.requires_grad:
            return result
        if is_stored:
            hooks.note_stored(result)
            return result

        operands: list[Tensor] = []
        # References none of the operands.
        arguments = with_slots((args, tuple(kwargs.items())), Tensor, operands)

        def recompute(tensors: list[Tensor]) -> Tensor:
            same_args, same_kwargs = map_slots(arguments, lambda slot: tensors[slot.index])
            return target(*same_args, **dict(same_kwargs))

        hooks.note_made(result, recompute, operands)
        return result

    return run
