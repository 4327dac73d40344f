"""Ops that capture puts in place of PyTorch's, and custom `torch.autograd.Function`s, each one op
of the captured step.

Its own ops let every loss and statistic split exactly over devices. A mean with `ignore_index` is a
sum divided by a
count: both are plain sums over rows, so they can be sharded without ever taking a mean of means
(docs/formulas.md#capture). BatchNorm returns its new statistics instead of mutating buffers. CTC is
computed row by row, as PyTorch's own has no shape function where lengths are tensors. `grouped_mm`
(experts) has a shape function for
every dtype and can leave out groups: a device that holds some of the experts multiplies the rows of
these only.

The op of a Function takes and gives lists of tensors; what else the call was given is part of the
op. It is composite, so autograd sees what runs inside, the user's own backward included. How it may
be sharded: sharding/functions.py.
"""

import hashlib
import inspect
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import stable_text
from alpa_strategy.ir.op import CUSTOM_OPS, CustomOp
from alpa_strategy.ir.user_code import user_frame


def cross_entropy_sum(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the cross entropy, summed over all samples.

    Args:
        logits: [samples, classes], [samples, classes, *d] or [classes].
        target: class indices, or probabilities of classes in the shape of the logits.
        weight, ignore_index, label_smoothing: as of `torch.nn.functional.cross_entropy`.
        dtype: in which logarithms of the logits' dtype are summed, as under autocast on GPUs; None:
            in the logits' dtype.
    """
    if dtype is None:
        return F.cross_entropy(
            logits,
            target,
            weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="sum",
        )
    # Dim of the classes.
    dim = min(1, logits.dim() - 1)
    num_classes = logits.shape[dim]
    log_probs = F.log_softmax(logits, dim)
    weighted = log_probs
    if weight is not None:
        num_other_dims = logits.dim() - 1 - dim
        weighted = log_probs * weight.view([-1, *[1] * num_other_dims])

    if target.is_floating_point():
        smoothed = target * (1 - label_smoothing) + label_smoothing / num_classes
        return -(weighted * smoothed).sum(dtype=dtype)

    total = F.nll_loss(
        log_probs.to(dtype), target, weight, ignore_index=ignore_index, reduction="sum"
    )
    if label_smoothing > 0:
        smooth = weighted.sum(dim, dtype=dtype).masked_fill(target == ignore_index, 0.0).sum()
        total = (1 - label_smoothing) * total - label_smoothing / num_classes * smooth
    return total


def nll_sum(log_probs: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the negative log likelihood, summed over all samples.

    Args:
        log_probs: [samples, classes, *d].
        target: class indices, [samples, *d].
        weight, ignore_index: as of `torch.nn.functional.nll_loss`.
    """
    return F.nll_loss(log_probs, target, weight, ignore_index=ignore_index, reduction="sum")


def target_weight_sum(
    target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Return the number by which a mean cross entropy divides the sum, [] of `dtype`: the count of
    targets that are not ignored, or the sum of their classes' weights.

    Args:
        target: class indices, [samples, *d].
        weight: of classes, [classes]; None: targets are counted.
    """
    # [samples, *d]
    is_counted = target != ignore_index
    if weight is None:
        return is_counted.sum().to(dtype)
    weights = weight[torch.where(is_counted, target, 0)]
    return torch.where(is_counted, weights, 0.0).sum().to(dtype)


def bag_lookup(
    weight: Tensor, ids: Tensor, per_sample_weights: Tensor | None, mode: int, padding_idx: int
) -> Tensor:
    """Sum (mode 0), mean (1) or maximum (2) of the rows that each bag names: weight [v, d], ids [n,
    k] -> [n, d].

    `padding_idx` (negative: none) is left out of its bag. Bags of one length are rows of a batch:
    they split.
    """
    kind, padding = ("sum", "mean", "max")[mode], padding_idx if padding_idx >= 0 else None
    return F.embedding_bag(
        ids, weight, mode=kind, per_sample_weights=per_sample_weights, padding_idx=padding
    )


def batch_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return a BatchNorm in training, which changes none of its arguments.

    Args:
        x: [samples, channels, *d]; the others [channels], as of `torch.nn.functional.batch_norm`.

    Returns:
        (normalised x, new running mean, new running variance); (normalised x,) without running
        statistics.
    """
    if running_mean is None or running_var is None:
        return (F.batch_norm(x, None, None, weight, bias, True, momentum, eps),)
    # [channels], which F.batch_norm writes into.
    mean, var = running_mean.clone(), running_var.clone()
    y = F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
    return y, mean, var


def segmented_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a linear whose output has equal segments, [*batch, segments, n].

    It is one matmul, as `F.linear` with the weight [segments * n, k]; the segments are views of its
    result.

    Args:
        x: [*batch, k].
        weight: [segments, n, k].
        bias: [segments, n].
    """
    # [segments * n]
    flat_bias = None if bias is None else bias.flatten()
    # [*batch, segments * n]
    y = F.linear(x, weight.flatten(0, 1), flat_bias)
    return y.view(*y.shape[:-1], *weight.shape[:2])


_LIBRARY = torch.library.Library("alpa", "FRAGMENT")
_SIGNATURE = inspect.signature(F.ctc_loss)


def _rows(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Return the CTC loss of every sample, [batch]; any values of that shape for tensors without
    data.

    Args: as of `torch.nn.functional.ctc_loss`.
    """
    if isinstance(log_probs, FakeTensor) or log_probs.is_meta:
        # Any differentiable [batch]: PyTorch's op has no shape function for lengths in tensors.
        return log_probs[0, :, 0] * 1
    return F.ctc_loss(
        log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity
    )


_LIBRARY.define(
    "ctc_rows(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int"
    " blank, "
    "bool zero_infinity) -> Tensor"
)
_LIBRARY.impl("ctc_rows", _rows, "CompositeImplicitAutograd")
ctc_rows = torch.ops.alpa.ctc_rows.default


def ctc_replacement(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the loss of a call of `F.ctc_loss` on a batch [time, batch, classes], made of losses
    per sample; None if it is another call, or its lengths are no tensors. The losses themselves
    for reduction `none`. Half-precision `log_probs` become float32.

    Args:
        function: that is called, with `args` and `kwargs`.
    """
    if function is not F.ctc_loss:
        return None
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    lengths = a["input_lengths"], a["target_lengths"]
    if not all(isinstance(length, Tensor) for length in lengths) or a["log_probs"].dim() != 3:
        return None
    log_probs = a["log_probs"]
    if log_probs.dtype in (torch.float16, torch.bfloat16):  # as autocast does
        log_probs = log_probs.float()
    # log_probs [t, b, c], lengths [b]; targets [b, s], or one after the other
    rows = ctc_rows(log_probs, a["targets"], *lengths, a["blank"], a["zero_infinity"])
    if a["reduction"] == "none":
        return rows
    # The mean is one of means: each row is divided by the length of its targets first.
    return (
        rows.sum() if a["reduction"] == "sum" else (rows / a["target_lengths"].clamp(min=1)).mean()
    )


@torch.library.custom_op("alpa::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return the product of groups of rows with a matrix each, [rows, n].

    Group i has the rows from offsets[i - 1] to offsets[i]; all other rows of the result are zeros.

    Args:
        x: [rows, k].
        weight: [groups, k, n].
        offsets: the end of each group's rows, ascending, [groups]; or [groups + 1], beginning with
            the start of the first group.
    """
    result = x.new_zeros(x.shape[0], weight.shape[2])
    for group, (start, end) in enumerate(_bounds(weight, offsets)):
        if start < end:
            torch.mm(x[start:end], weight[group], out=result[start:end])  # [rows, k] @ [k, n]
    return result


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return a result without values; ValueError if the shapes of `x` and `weight` do not fit."""
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"grouped_mm takes [s, k] and [e, k, n], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    return x.new_empty(x.shape[0], weight.shape[2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    """Return the gradients of `x` [rows, k], `weight` [groups, k, n] and the offsets (None)."""
    x, weight, offsets = ctx.saved_tensors
    grad_x, grad_weight = (
        torch.zeros_like(x),
        torch.zeros_like(weight, memory_format=torch.contiguous_format),
    )
    for group, (start, end) in enumerate(_bounds(weight, offsets)):
        if start < end:
            torch.mm(grad[start:end], weight[group].T, out=grad_x[start:end])  # [rows, n] @ [n, k]
            torch.mm(
                x[start:end].T, grad[start:end], out=grad_weight[group]
            )  # [k, rows] @ [rows, n]
    return grad_x, grad_weight, None


grouped_mm.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def _bounds(weight: Tensor, offsets: Tensor) -> Iterable[tuple[int, int]]:
    """Return (first row, last row + 1) of each group. On GPUs this waits for the device.

    Args: as of `grouped_mm`.
    """
    ends = offsets.tolist()
    return pairwise(ends if len(ends) > len(weight) else [0, *ends])


def grouped_mm_replacement(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Return the result of `grouped_mm` for a call of PyTorch's grouped matmul; None if `function`
    is another one, or has other arguments than [rows, k], [groups, k, n] and offsets.
    """
    if function not in (torch._grouped_mm, F.grouped_mm):
        return None
    names = ("x", "weight", "offs", "bias", "out_dtype")
    bound = dict(zip(names, args, strict=False)) | kwargs
    x, weight, offsets, *others = (bound.get(name) for name in names)
    if x is None or weight is None or offsets is None or any(other is not None for other in others):
        return None
    return grouped_mm(x, weight, offsets) if (x.dim(), weight.dim()) == (2, 3) else None


FUNCTIONS = "alpa_function"  # namespace of the ops; saved plans name them

_FUNCTION_OPS = torch.library.Library(FUNCTIONS, "FRAGMENT")
_APPLY = vars(torch.autograd.Function)["apply"].__func__  # capture puts its own in place of it


@dataclass(frozen=True)
class _Structure:
    """A pytree without its tensors."""

    spec: pytree.TreeSpec

    # Its leaves, with the class `Tensor` in place of each tensor.
    constants: tuple[Any, ...]

    def __hash__(self) -> int:
        return hash(stable_text(self.identity))

    @classmethod
    def of(cls, tree: Any) -> "_Structure":
        """Return the structure of a pytree."""
        leaves, spec = pytree.tree_flatten(tree)
        constants: list[Any] = []
        for leaf in leaves:
            constants.append(Tensor if isinstance(leaf, Tensor) else leaf)
        return cls(spec, tuple(constants))

    @property
    def identity(self) -> tuple[Any, ...]:
        """Return (structure of the arguments as text, constants), whose `stable_text` is the same
        in every process.
        """
        return str(self.spec), self.constants

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """Return the pytree with these tensors."""
        remaining = iter(tensors)
        leaves = []
        for constant in self.constants:
            leaves.append(next(remaining) if constant is Tensor else constant)
        return pytree.tree_unflatten(leaves, self.spec)


class _FunctionCall:
    """A call of `function.apply` as an op on tensors (`run`).

    Args:
        function: the autograd.Function.
        arguments: of the call, without tensors.
        autocast: device type and dtype of the autocast region around the call, or None. The op runs
            under it.
    """

    def __init__(
        self, function: Any, arguments: _Structure, autocast: tuple[str, torch.dtype] | None
    ) -> None:
        self.function = function
        self._arguments = arguments
        self._autocast = autocast
        self.op = self._define()

        # The structure of the Function's result in the last run.
        self.returned: _Structure

    def _define(self) -> OpOverload:
        """Define an op for the call, with a unique name, add it to `CUSTOM_OPS`, and return it."""
        text = stable_text((self.function, *self._arguments.identity, self._autocast))
        stem = re.sub("[^A-Za-z0-9]+", "_", self.function.__qualname__)
        stem += f"_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        name = stem
        number = 1
        # Other code may have the same name and text.
        while hasattr(getattr(torch.ops, FUNCTIONS), name):
            number += 1
            name = f"{stem}_{number}"
        _FUNCTION_OPS.define(f"{name}(Tensor[] tensors) -> Tensor[]")
        _FUNCTION_OPS.impl(name, self.run, "CompositeImplicitAutograd")
        op = getattr(getattr(torch.ops, FUNCTIONS), name).default
        CUSTOM_OPS[op] = CustomOp(f"{FUNCTIONS}.{stem}.default", self.function)
        return op

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Call the Function, and return the tensors of its result. `returned` gets its structure.

        Raises:
            CaptureError: the Function returns something else than tensors and None.
        """
        context: AbstractContextManager[Any] = nullcontext()
        if self._autocast is not None:
            device_type, dtype = self._autocast
            context = torch.autocast(device_type, dtype=dtype)
        with context:
            result = _APPLY(self.function, *self._arguments.filled(tensors))
        self.returned = _Structure.of(result)
        if not all(constant is Tensor or constant is None for constant in self.returned.constants):
            raise CaptureError(
                f"the autograd.Function {self.function.__name__} returns something that is no"
                " tensor",
                "return tensors only",
            )
        return [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]


# (function, arguments, autocast) -> the op; one for each.
_call_of = cache(_FunctionCall)


def apply_as_op(function: Any, *args: Any) -> Any:
    """Return `function.apply(*args)`, as one op of the step that is being traced. It is called as
    it is if no step is traced, there is no tensor among `args`, or it is PyTorch's own wrapper.

    Raises:
        CaptureError: the op changes a tensor in place, or returns something else than tensors and
            None.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    # Outside tracing; inside another Function; PyTorch's own wrapper of a custom op's backward.
    if get_proxy_mode() is None or not tensors or function.__module__.startswith("torch._library"):
        return _APPLY(function, *args)
    device = tensors[0].device.type
    autocast = None
    if torch.is_autocast_enabled(device):
        autocast = (device, torch.get_autocast_dtype(device))
    call = _call_of(function, _Structure.of(args), autocast)
    versions = [tensor._version for tensor in tensors]
    results = call.op(tensors)
    if [tensor._version for tensor in tensors] != versions:
        raise CaptureError(
            f"the autograd.Function {function.__name__} changes a tensor in place ({user_frame()})",
            "return a new tensor (and leave out ctx.mark_dirty)",
        )
    return call.returned.filled(results)
