"""What a user's autograd.Function costs: by the kernels that it runs on tensors without data, forward and backward.

Products are priced as the ops that they are, at the dtype of their data: float8 under a wrapper such as torchao's. All
else moves bytes: kernel by kernel, or fused, where a tensor is read once, and once more if its sum or maximum is needed
first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from alpa_strategy.cost.flops import PRODUCTS, Work
from alpa_strategy.ir.op import OpCall, TensorMeta, with_slots


@dataclass
class Kernels:
    """Products, and what the other kernels move: bytes of each, or fused, and then write for products to read."""

    products: list[OpCall] = field(default_factory=list)
    single: list[int] = field(default_factory=list)
    fused: Work = field(default_factory=Work)
    fused_bytes: int = 0


def kernels_of(call: OpCall, mode: FakeTensorMode) -> tuple[Kernels, Kernels] | None:
    """What `call` runs, forward and backward; None where fake tensors are not enough for the user's code."""
    with mode, torch.enable_grad():
        operands = [torch.empty(m.shape, dtype=m.dtype, requires_grad=m.requires_grad) for m in call.operands]
        try:
            with _Recorder() as forward:
                results = [each for each in pytree.tree_leaves(call.call(*operands)) if isinstance(each, Tensor)]
            outputs = [result for result in results if result.requires_grad]
            inputs = [operand for operand in operands if operand.requires_grad]
            gradients = [torch.empty_like(output) for output in outputs]
            with _Recorder() as backward:
                found = autograd.grad(outputs, inputs, gradients, allow_unused=True) if outputs and inputs else ()
        except Exception:  # the user's code, of any type: it wants data
            return None
        return forward.kernels(results), backward.kernels([each for each in found if each is not None])


class _Recorder(TorchDispatchMode):
    """Notes products, and of which whole tensors the results of the other kernels are made."""

    def __init__(self) -> None:
        super().__init__()
        self._found = Kernels()
        self._alive: list[Tensor] = []  # a storage's number is not used again while it is there
        self._made_of: dict[int, set[int]] = {}  # storage that a kernel wrote -> those in memory that it was made of
        self._summed: set[int] = set()  # that a reduction reads
        self._read_whole: set[int] = set()  # by products, so that it must be in memory
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace != "aten" or func.is_view:
            return out
        operands: list[Tensor] = []
        frozen = with_slots(tuple(args), Tensor, operands)
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        self._alive += [*operands, *results]
        read, written = ([self._note(tensor) for tensor in tensors] for tensors in (operands, results))
        if func._schema.name.partition("::")[2] in PRODUCTS:
            metas = tuple(map(_meta, operands)), tuple(map(_meta, results))
            self._found.products.append(OpCall(func, frozen, (), *metas))
            self._read_whole.update(read)
            return out
        self._found.single.append(sum(_meta(tensor).num_bytes for tensor in (*operands, *results)))
        roots = set().union(*(self._made_of.get(key, {key}) for key in read))
        if operands and max(t.numel() for t in operands) > max((t.numel() for t in results), default=0):
            self._summed |= roots
        self._made_of.update(dict.fromkeys(written, roots))
        return out

    def _note(self, tensor: Tensor) -> int:
        key = _data(tensor).untyped_storage()._cdata
        self._bytes.setdefault(key, _meta(tensor).num_bytes)
        return key

    def kernels(self, results: list[Tensor]) -> Kernels:
        """What was found; `results` leave the op, so they are written."""
        leaving = {self._note(tensor) for tensor in results}
        written = [key for key in self._made_of if key in self._read_whole | leaving]
        read = set().union(*self._made_of.values()) if self._made_of else set()
        moved = sum(self._bytes[key] for key in written)
        moved += sum(self._bytes[key] * (1 + (key in self._summed)) for key in read)
        self._found.fused = Work(0.0, moved, len(written) + len(self._summed))
        self._found.fused_bytes = sum(self._bytes[key] for key in written if key not in leaving)
        return self._found


def _data(tensor: Tensor) -> Tensor:
    """The first tensor inside of a wrapper, which holds its elements."""
    while is_traceable_wrapper_subclass(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


def _meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), _data(tensor).dtype)
