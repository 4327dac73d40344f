"""Kernels that a user's autograd.Function runs, found on tensors without data, forward and
backward.

Matmuls, convolutions and attention are recorded as the ops that they are, at the dtype of their
data: float8 under a wrapper such as torchao's. All other kernels move bytes, either one by one, or
fused: then a tensor is read once, or twice if it is reduced first.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from alpa_strategy.cost.flops import PRODUCTS, Work
from alpa_strategy.cost.saved_tensors import differentiated, tensors_in, without_data
from alpa_strategy.ir.op import OpCall, TensorMeta, aten_name, with_slots


@dataclass
class Kernels:
    """The kernels of one direction of an op."""

    # matmuls, convolutions and attention
    products: list[OpCall] = field(default_factory=list)
    # bytes that each other kernel moves when they run one by one
    single: list[int] = field(default_factory=list)
    # what the other kernels do when they are fused
    fused: Work = field(default_factory=Work)
    # bytes that fused kernels write for `products` to read
    fused_bytes: int = 0


def kernels_of(call: OpCall, mode: FakeTensorMode) -> tuple[Kernels, Kernels] | None:
    """Record the kernels of `call`: (forward, backward).

    None when the user's code needs values, which fake tensors do not have.
    """
    forward = _KernelRecorder()
    backward = _KernelRecorder()
    with mode, torch.enable_grad():
        operands = without_data(call)
        try:
            with forward:
                results = tensors_in(call.call(*operands))
            _, gradients = differentiated(operands, results, backward)
        except Exception:
            # The user's code needs values; the error may be of any type.
            return None
        return forward.kernels(results), backward.kernels(gradients)


class _KernelRecorder(TorchDispatchMode):
    """Records products, and from which stored tensors the results of other kernels are computed."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels = Kernels()
        # Tensors are referenced so that no storage's address is used again.
        self._alive: list[Tensor] = []
        # storage that a kernel wrote -> the storages in memory that it is computed from
        self._made_of: dict[int, set[int]] = {}
        # storages that a reduction reads
        self._summed: set[int] = set()
        # storages that products read, so that they must be in memory
        self._read_by_products: set[int] = set()
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace != "aten" or func.is_view:
            return out
        operands: list[Tensor] = []
        frozen = with_slots(tuple(args), Tensor, operands)
        results = tensors_in(out)
        self._alive += [*operands, *results]
        read = [self._note(tensor) for tensor in operands]
        written = [self._note(tensor) for tensor in results]

        if aten_name(func) in PRODUCTS:
            operand_metas = tuple(map(_meta, operands))
            result_metas = tuple(map(_meta, results))
            self._kernels.products.append(OpCall(func, frozen, (), operand_metas, result_metas))
            self._read_by_products.update(read)
            return out

        moved_bytes = sum(_meta(tensor).num_bytes for tensor in (*operands, *results))
        self._kernels.single.append(moved_bytes)
        roots: set[int] = set()
        for key in read:
            roots |= self._made_of.get(key, {key})
        largest_operand = max((tensor.numel() for tensor in operands), default=0)
        largest_result = max((tensor.numel() for tensor in results), default=0)
        is_reduction = largest_operand > largest_result
        if is_reduction:
            self._summed |= roots
        self._made_of.update(dict.fromkeys(written, roots))
        return out

    def _note(self, tensor: Tensor) -> int:
        """Record the bytes of a tensor's storage; return the storage's key."""
        key = _data(tensor).untyped_storage()._cdata
        self._bytes.setdefault(key, _meta(tensor).num_bytes)
        return key

    def kernels(self, results: list[Tensor]) -> Kernels:
        """Return the recorded kernels, after setting their `fused` and `fused_bytes`: the work of
        all but products if these are fused, and the bytes of results that stay inside.

        Args:
            results: of the op, which are written to memory.
        """
        leaving = {self._note(tensor) for tensor in results}
        needed = self._read_by_products | leaving
        written = [key for key in self._made_of if key in needed]
        read: set[int] = set()
        for roots in self._made_of.values():
            read |= roots

        moved = sum(self._bytes[key] for key in written)
        for key in read:
            num_reads = 2 if key in self._summed else 1
            moved += self._bytes[key] * num_reads
        self._kernels.fused = Work(0.0, moved, len(written) + len(self._summed))
        self._kernels.fused_bytes = sum(self._bytes[key] for key in written if key not in leaving)
        return self._kernels


def _data(tensor: Tensor) -> Tensor:
    """Return the first tensor inside of a wrapper, which stores its elements."""
    while is_traceable_wrapper_subclass(tensor):
        inner_names, _ = tensor.__tensor_flatten__()
        tensor = getattr(tensor, inner_names[0])
    return tensor


def _meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), _data(tensor).dtype)
