"""What autograd saves of one op, read off a run on fake CPU tensors (docs/formulas.md#costs).

Two conventions differ from what such a run shows, because accelerators run other kernels.
Attention saves what flash and memory-efficient kernels save: query, key, value, mask, result and
the log-sum-exp per row. Dropout on an accelerator saves a mask of one byte per element.
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alpa_strategy.cost.flops import ATTENTION, DROPOUTS, is_view, op_base_name
from alpa_strategy.ir.op import OpCall, TensorMeta, aten_name

logger = logging.getLogger(__name__)

FLOAT32_BYTES = 4

# Calls whose `Saved` is remembered in a process: all of a large model's, in all local shapes.
REMEMBERED_CALLS = 2**15

# Kernels that PyTorch's partitioner recomputes in the backward, in addition to those tagged
# pointwise. A number per row is saved of each.
FUSED_KERNELS = {
    "native_layer_norm",
    "_fused_rms_norm",
    "_softmax",
    "_log_softmax",
    "nll_loss_forward",
    "mean",
    "sum",
    "var_mean",
    "cat",
    "_to_copy",
    "clone",
    "expand",
    "_unsafe_view",
}


@dataclass(frozen=True)
class Saved:
    """The tensors of one op that autograd saves until its backward."""

    # of each operand, whether it is saved
    operands: tuple[bool, ...]
    # of each result, whether it is saved
    results: tuple[bool, ...]
    # bytes of saved tensors that are neither (dropout masks, log-sum-exp, ...)
    extra_bytes: int
    # (forward, backward) bytes that are alive only while the op runs, in addition to operands and
    # results; in the backward in addition to the gradients of both. The second is negative when
    # these gradients are not all alive at once.
    temporary_bytes: tuple[int, int] = (0, 0)
    # whether a compiler recomputes the op's results in the backward from its operands, so that none
    # of the results is saved
    fuses: bool = False


def find_saved(call: OpCall, *, on_accelerator: bool = False, compiled: bool = False) -> Saved:
    """Find which tensors autograd saves when `call` runs at its local shapes, in about 1 ms.

    Results are remembered for ATen ops. Kernels of other ops may be replaced between two calls.

    A saved tensor counts as operand or result when it shares that one's storage. The others count
    in bytes, each storage once. An op that cannot run on fake tensors is assumed to save all its
    floating point operands.

    Args:
        on_accelerator: whether the kernels are a GPU's; see the top of this file.
        compiled: whether ops that can be fused are. Of these, only numbers per row are saved in
            addition to operands and results.
    """
    is_aten = getattr(call.target, "namespace", None) == "aten"
    find = _remembered if is_aten else _saved_of
    return find(call, on_accelerator, compiled)


@lru_cache(REMEMBERED_CALLS)
def _remembered(call: OpCall, on_accelerator: bool, compiled: bool) -> Saved:
    return _saved_of(call, on_accelerator, compiled)


@cache
def _fake_mode() -> FakeTensorMode:
    """The mode in which all ops run, forward and backward."""
    return FakeTensorMode()


def _saved_of(call: OpCall, on_accelerator: bool, compiled: bool) -> Saved:
    """Return the tensors of an op that autograd saves, without a cache.

    An op that does not run on fake tensors is assumed to save its floating-point operands.

    Args: as of `find_saved`.
    """
    nothing = Saved((False,) * len(call.operands), (False,) * len(call.results), 0)
    operands_need_grad = any(meta.requires_grad for meta in call.operands)
    results_need_grad = any(meta.requires_grad for meta in call.results)
    if not operands_need_grad or not results_need_grad:
        return nothing

    name = op_base_name(call)
    num_rows = math.prod(call.operands[0].shape[:-1])

    # CPUs write the scores out when a bias that is learned is added to them.
    has_learned_bias = any(meta.requires_grad for meta in call.operands[3:])
    if name in ATTENTION and (on_accelerator or not has_learned_bias):
        return _saved_by_attention(call, nothing.results, num_rows)

    if on_accelerator and name in DROPOUTS and not is_view(call):
        mask_bytes = call.results[0].num_elements
        return Saved(nothing.operands, nothing.results, mask_bytes)

    if on_accelerator and name == "rms_norm":
        # One kernel, which saves a reciprocal per row.
        saved_operands = tuple(index < 2 for index in range(len(call.operands)))
        return Saved(saved_operands, nothing.results, FLOAT32_BYTES * num_rows, fuses=compiled)

    try:
        return _saved_in_run(call, _fake_mode(), compiled)
    except Exception as error:
        # A fake kernel may raise anything. The estimate must come back, on the safe side.
        logger.debug(
            "%s does not run on fake tensors (%s): assumed to save its operands",
            call.target_name,
            error,
        )
        floating_point = tuple(meta.dtype.is_floating_point for meta in call.operands)
        return Saved(floating_point, nothing.results, 0)


def _saved_by_attention(call: OpCall, no_results: tuple[bool, ...], num_rows: int) -> Saved:
    """Return the tensors that flash attention saves: operands, the result and the log-sum-exp per
    row in float32. A boolean mask is saved as numbers of the query's dtype.

    Args:
        no_results: False for each result.
        num_rows: rows of the queries, over all batch dims and heads.
    """
    is_mask = [meta.dtype == torch.bool for meta in call.operands]
    mask_elements = 0
    for meta in call.operands:
        if meta.dtype == torch.bool:
            mask_elements += meta.num_elements
    mask_bytes = mask_elements * call.operands[0].dtype.itemsize
    return Saved(
        operands=tuple(not mask for mask in is_mask),
        results=(True, *no_results[1:]),
        extra_bytes=FLOAT32_BYTES * num_rows + mask_bytes,
    )


def _saved_in_run(call: OpCall, mode: FakeTensorMode, compiled: bool) -> Saved:
    """Return what autograd saves in a run of `call`, forward and backward, on fake tensors of
    `mode`; whatever its kernels raise is passed on.

    Args:
        compiled: as of `find_saved`.
    """
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    watch = LiveStorages()
    with mode, torch.enable_grad():
        operands = without_data(call)
        with watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = tensors_in(call.call(*operands))
        num_forward = len(watch.kernels)
        fuses = compiled and all(map(_can_fuse, watch.kernels))
        if fuses:
            metas = (*call.operands, *call.results)
            saved = _saved_if_fused(saved, [*operands, *results], metas)
        saved_storages = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
        # Kernels of the backward free what they have used, unless it is referenced here.
        saved.clear()
        cotangents, _ = differentiated(operands, results, watch)

    operand_storages = [_storage(tensor) for tensor in operands]
    result_storages = [_storage(tensor) for tensor in results]
    known = {*operand_storages, *result_storages}
    extra_bytes = 0
    for storage, num_bytes in saved_storages.items():
        if storage not in known:
            extra_bytes += num_bytes

    forward_bytes = watch.peak_bytes({*known, *saved_storages}, 0, num_forward)
    known_in_backward = {*known, *map(_storage, cotangents)}
    backward_bytes = watch.peak_bytes(known_in_backward, num_forward) - extra_bytes
    # The operands' gradients are counted with the values that they belong to.
    for meta in call.operands:
        if meta.requires_grad:
            backward_bytes -= meta.num_bytes

    saved_results = []
    for storage in result_storages:
        # A result that is a view of an operand is not saved a second time.
        saved_results.append(storage in saved_storages and storage not in operand_storages)
    return Saved(
        operands=tuple(storage in saved_storages for storage in operand_storages),
        results=tuple(saved_results),
        extra_bytes=extra_bytes,
        temporary_bytes=(forward_bytes, backward_bytes),
        fuses=fuses,
    )


def _can_fuse(kernel: torch._ops.OpOverload) -> bool:
    """Whether the partitioner recomputes a kernel; True for kernels outside of ATen."""
    if kernel.namespace != "aten":
        return True
    is_pointwise = torch.Tag.pointwise in kernel.tags
    return is_pointwise or kernel.is_view or aten_name(kernel) in FUSED_KERNELS


def _saved_if_fused(
    saved: list[Tensor], ends: list[Tensor], metas: Iterable[TensorMeta]
) -> list[Tensor]:
    """Return those of `saved` that a fused op saves: its ends, and tensors smaller than the largest
    of it.

    Args:
        ends: the op's operands and results.
        metas: of `ends`.
    """
    largest = max(meta.num_elements for meta in metas)
    end_storages = {_storage(tensor) for tensor in ends}
    remaining = []
    for tensor in saved:
        if tensor.numel() < largest or _storage(tensor) in end_storages:
            remaining.append(tensor)
    return remaining


class LiveStorages(TorchDispatchMode):
    """Records the kernels, and which storages made under it are alive after each of them."""

    def __init__(self) -> None:
        super().__init__()
        # storage -> (reference, bytes). The weak reference keeps the key from being used again.
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._live: list[set[int]] = []
        self.kernels: list[torch._ops.OpOverload] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.kernels.append(func)
        for tensor in tensors_in(out):
            if _storage(tensor) not in self._made:
                storage = tensor.untyped_storage()
                self._made[_storage(tensor)] = (StorageWeakRef(storage), storage.nbytes())

        live = set()
        for key, (reference, _) in self._made.items():
            if not reference.expired():
                live.add(key)
        self._live.append(live)
        return out

    def peak_bytes(self, around: set[int], first: int = 0, end: int | None = None) -> int:
        """Return the most bytes alive at once after the kernels `first` to `end` - 1 (None: to the
        last); 0 without any.

        Storages in `around` are not counted.
        """
        peak = 0
        for live in self._live[first:end]:
            num_bytes = sum(self._made[key][1] for key in live - around)
            peak = max(peak, num_bytes)
        return peak


def _storage(tensor: Tensor) -> int:
    """Return an identity of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors of a nested structure, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def without_data(call: OpCall, device: str | None = None) -> list[Tensor]:
    """Return new, contiguous, uninitialised operands for `call`, with its `requires_grad`.

    Args:
        device: where; None: the default device, or fake tensors under a `FakeTensorMode`.
    """
    operands = []
    for meta in call.operands:
        operand = torch.empty(
            meta.shape, dtype=meta.dtype, device=device, requires_grad=meta.requires_grad
        )
        operands.append(operand)
    return operands


def differentiated(
    operands: list[Tensor], results: list[Tensor], watch: TorchDispatchMode
) -> tuple[list[Tensor], list[Tensor]]:
    """Run the backward of `results` under `watch`.

    Returns:
        (uninitialised gradients of the results that require grad, gradients that the operands get,
        those that get none left out). [] for the latter if nothing requires grad.
    """
    outputs = [result for result in results if result.requires_grad]
    inputs = [operand for operand in operands if operand.requires_grad]
    cotangents = [torch.empty_like(output) for output in outputs]
    if not outputs or not inputs:
        return cotangents, []
    with watch:
        gradients = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    return cotangents, [gradient for gradient in gradients if gradient is not None]
