"""What autograd keeps of one op: asked of a run on fake CPU tensors, not guessed (docs/formulas.md#costs).

Two conventions differ from what such a run shows, because the devices that matter run other kernels: attention keeps
what flash and memory-efficient kernels keep, and dropout on an accelerator keeps a mask of one byte per element.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alpa_strategy.cost.flops import ATTENTION, DROPOUTS, is_view, op_base_name
from alpa_strategy.cost.model import Saved
from alpa_strategy.ir.op import OpCall

logger = logging.getLogger(__name__)


def ask_saved(call: OpCall, mode: FakeTensorMode, *, on_accelerator: bool = False) -> Saved:
    """Which tensors autograd keeps when `call` runs at its own shapes, forward and backward (about a millisecond).

    A saved tensor counts as operand or result when it shares that one's storage; the others count in bytes, each
    storage once. An op that cannot run on fake tensors is taken to keep all its operands.
    """
    nothing = Saved((False,) * len(call.operands), (False,) * len(call.results), 0)
    if not any(meta.requires_grad for meta in call.operands) or not any(meta.requires_grad for meta in call.results):
        return nothing
    name = op_base_name(call)
    if name in ATTENTION:
        return _attention_saved(call)
    if on_accelerator and name in DROPOUTS and not is_view(call):
        return Saved(nothing.operands, nothing.results, call.results[0].num_elements)
    try:
        if getattr(call.target, "is_whole", False):
            raise NotImplementedError("a module that runs as it is written")
        return _run(call, mode)
    except Exception as error:  # whatever a fake kernel may raise: an estimate on the safe side must still come back
        logger.debug("%s does not run on fake tensors (%s): taken to keep its operands", call.target_name, error)
        return Saved(tuple(meta.dtype.is_floating_point for meta in call.operands), nothing.results, 0)


def _run(call: OpCall, mode: FakeTensorMode) -> Saved:
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    watch = _LiveStorages()
    with mode, torch.enable_grad():
        operands = [torch.empty(m.shape, dtype=m.dtype, requires_grad=m.requires_grad) for m in call.operands]
        with watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = [leaf for leaf in tree_leaves(call.call(*operands)) if isinstance(leaf, torch.Tensor)]
        storages = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in kept}
        outputs = [result for result in results if result.requires_grad]
        inputs = [operand for operand in operands if operand.requires_grad]
        cotangents = [torch.empty_like(output) for output in outputs]
        with watch:
            grads = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    operand_storages = [_storage(tensor) for tensor in operands]
    result_storages = [_storage(tensor) for tensor in results]
    known = {*operand_storages, *result_storages}
    around = {*known, *storages, *(_storage(t) for t in (*cotangents, *grads) if t is not None)}
    return Saved(
        operands=tuple(storage in storages for storage in operand_storages),
        # a result that is a view of an operand is not kept a second time
        results=tuple(storage in storages and storage not in operand_storages for storage in result_storages),
        extra_bytes=sum(num_bytes for storage, num_bytes in storages.items() if storage not in known),
        temporary_bytes=watch.peak_bytes(around),
    )


class _LiveStorages(TorchDispatchMode):
    """Notes after each kernel which storages made under it are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}  # the weak reference keeps the key from being used again
        self._live: list[set[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in self._made:
                storage = leaf.untyped_storage()
                self._made[_storage(leaf)] = (StorageWeakRef(storage), storage.nbytes())
        self._live.append({key for key, (reference, _) in self._made.items() if not reference.expired()})
        return out

    def peak_bytes(self, around: set[int]) -> int:
        """Most bytes alive at once besides the storages in `around`."""
        return max((sum(self._made[key][1] for key in live - around) for live in self._live), default=0)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _attention_saved(call: OpCall) -> Saved:
    """Query, key, value, result and the log-sum-exp per row (float32), as flash and memory-efficient kernels keep."""
    operands = tuple(index < 3 for index in range(len(call.operands)))
    log_sum_exp = 4 * math.prod(call.operands[0].shape[:-1])
    results = tuple(index == 0 for index in range(len(call.results)))
    return Saved(operands, results, log_sum_exp)
