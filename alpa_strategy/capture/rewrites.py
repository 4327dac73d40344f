"""Ops that capture replaces: mean losses as sum over count, norms with their new statistics as
results (see ops.py); and, on the finished graph, fused projections (query, key and value; gate and
up), split segment by segment.

A column-parallel shard of a fused weight must take its share of *every* segment: rows [0, n) of a
[3n, k] weight are the whole query and nothing of the key. Seen as [3, n, k] the same weight is
sharded along n like any other, so
`segment_fused_linears` gives the parameter that shape in the step (`ParameterInput.module_shape`:
the module's own).
"""

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from alpa_strategy.capture import ops
from alpa_strategy.capture.graph_builder import Builder, map_refs
from alpa_strategy.capture.ops import segmented_linear
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import Op, StepGraph, ValueRef
from alpa_strategy.ir.op import Slot, TensorMeta, bind, bound_arguments

aten = torch.ops.aten
_MEAN, _SUM = 1, 2
_NLL = (aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
_BAGS = (aten.embedding_bag.default, aten.embedding_bag.padding_idx)
_HALF = (torch.float16, torch.bfloat16)


def rewrite_loss(
    builder: Builder,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    summed_in: torch.dtype | None,
) -> ValueRef | None:
    """Sum-and-count form of a cross entropy or NLL loss; None when the call stays as it is.

    Half-precision logits are summed in fp32, as a sum (unlike the mean) may overflow; the result
    has the call's dtype.

    Args:
        summed_in: dtype of the sum, and of the result, where it is not that of the logits
            (`Autocast.loss_dtype`).
    """
    is_cross_entropy = target is aten.cross_entropy_loss.default
    if not is_cross_entropy and target not in _NLL:
        return None
    a = bound_arguments(target, args, kwargs)
    logits, labels, weight = (
        a["self"],
        a["target"],
        a["weight"],
    )  # [rows, classes, *d], [rows, *d], [classes]
    dtype, smoothing = builder.meta(logits).dtype, a.get("label_smoothing", 0.0)
    is_row_wise = a["reduction"] not in (_MEAN, _SUM)
    if is_row_wise and summed_in is None:
        return None
    if dtype in _HALF and weight is not None:
        weight = builder.emit(aten.to.dtype, weight, torch.float32)
    if dtype in _HALF and (summed_in is None or is_row_wise):
        logits = builder.emit(aten.to.dtype, logits, torch.float32)
    if is_row_wise:
        return builder.emit(
            target, logits, labels, weight, a["reduction"], a["ignore_index"], smoothing
        )
    probabilities = builder.meta(
        labels
    ).dtype.is_floating_point  # labels are then [rows, classes, *d]
    if is_cross_entropy:
        dtypes = () if summed_in is None else (summed_in,)
        loss = builder.emit(
            ops.cross_entropy_sum, logits, labels, weight, a["ignore_index"], smoothing, *dtypes
        )
    else:
        loss = builder.emit(ops.nll_sum, logits, labels, weight, a["ignore_index"])
    if a["reduction"] == _MEAN and probabilities:
        meta = builder.meta(logits)
        num_rows = meta.num_elements // meta.shape[1] if len(meta.shape) > 1 else 1
        loss = builder.emit(aten.div.Tensor, loss, num_rows)
    elif a["reduction"] == _MEAN:
        # Of all ranks together: labels that are ignored may lie unevenly over them.
        count = builder.emit(
            ops.target_weight_sum, labels, weight, a["ignore_index"], builder.meta(loss).dtype
        )
        loss = builder.emit(aten.div.Tensor, loss, count)
    return (
        builder.emit(aten.to.dtype, loss, dtype) if dtype in _HALF and summed_in is None else loss
    )


def rewrite_bags(
    builder: Builder, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ValueRef | None:
    """`bag_lookup` for an `embedding_bag` whose bags have one length, as nn.EmbeddingBag asks for
    ids [n, k].

    Its offsets are then `arange(0, n k, k)`, which nothing in the op's schema says. None: the call
    stays as it is.
    """
    if node.target not in _BAGS or any(
        u.target is not operator.getitem or (u.args[1] and u.users) for u in node.users
    ):
        return None
    given = bound_arguments(node.target, tuple(node.args), dict(node.kwargs))
    a = bound_arguments(node.target, args, kwargs)
    offsets, num_ids = given["offsets"], builder.meta(a["indices"]).num_elements
    if getattr(offsets, "target", None) is not aten.arange.start_step or a["scale_grad_by_freq"]:
        return None
    start, stop, step = (*offsets.args, 1)[:3]
    if a["include_last_offset"] or (start, stop) != (0, num_ids) or step == 0 or num_ids % step:
        return None
    ids, weights = (  # both [num_ids] -> [bags, step]
        x if x is None else builder.emit(aten.reshape.default, x, (num_ids // step, step))
        for x in (a["indices"], a["per_sample_weights"])
    )
    padding = a.get("padding_idx", -1)
    return builder.emit(
        ops.bag_lookup, a["weight"], ids, weights, a["mode"], -1 if padding is None else padding
    )


def without_empty_tensors(builder: Builder, target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a `cat` without tensors of no elements: caches start with those, and their shape
    fits no rule.
    """
    if target not in (aten.cat.default, aten.concat.default):
        return args
    metas = [builder.meta(ref) for ref in args[0]]
    kept = [ref for ref, meta in zip(args[0], metas, strict=True) if meta.num_elements]
    if not kept or len({meta.dtype for meta in metas}) > 1:
        return args
    return (kept, *args[1:])


def with_traced_dtype(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], traced: Any
) -> dict[str, Any]:
    """Keyword arguments of a factory (torch.ones) with its dtype: when the graph runs, the default
    may be another.
    """
    given = bound_arguments(target, args, kwargs).get("dtype", "no such argument")
    is_factory = given is None and isinstance(traced, Tensor) and not _refs((args, kwargs))
    return {**kwargs, "dtype": traced.dtype} if is_factory else kwargs


def emit_from_whole_numbers(
    builder: Builder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> ValueRef | None:
    """A call whose operands are all whole numbers or booleans and whose result has the default
    dtype, as in
    `num_correct / num_rows`, with the dtype that it was traced with. None: it is no such call.
    """
    metas = [builder.meta(ref) for ref in _refs((args, kwargs))]
    if not dtype.is_floating_point or any(
        m.dtype.is_floating_point or m.dtype.is_complex for m in metas
    ):
        return None
    if target is aten.where.Scalar:
        condition, *numbers = args
        filled = [builder.emit(aten.full.default, (), number, dtype=dtype) for number in numbers]
        return builder.emit(aten.where.self, condition, *filled)
    args, kwargs = map_refs((args, kwargs), lambda ref: builder.emit(aten.to.dtype, ref, dtype))
    return builder.emit(target, *args, **kwargs)


def _refs(tree: Any) -> list[ValueRef]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, ValueRef)]


def rewrite_norm(
    builder: Builder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ValueRef, ...] | None:
    """(y,) or (y, new running mean, new running variance) of a norm that updates statistics; None
    of other calls.
    """
    if target not in (aten.batch_norm.default, aten.instance_norm.default):
        return None
    a = bound_arguments(target, args, kwargs)
    if target is aten.instance_norm.default:
        if (
            a["use_input_stats"] and a["running_mean"] is not None
        ):  # written into without saying so in the schema
            raise CaptureError(
                f"an InstanceNorm updates running statistics in the step ({builder.source})",
                "leave out track_running_stats, or normalise by BatchNorm or GroupNorm",
            )
        return None
    # With given statistics it is an op like any other, and keeps its own rule.
    if not a["training"]:
        return None
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    return builder.emit(ops.batch_norm_train, *(a[name] for name in names))


_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int)
_PERMUTATIONS = (aten.permute.default, aten.transpose.int, aten.movedim.int)
_PICKS = (aten.unbind.int, aten.select.int, *_SPLITS)
_CASTS = (aten.to.dtype, aten._to_copy.default)


def segment_fused_linears(step: StepGraph) -> StepGraph:
    """The same step with every fused linear whose weight (and bias) it alone uses made
    segmented.
    """
    pass_ = _FusedLinears(step)
    for index, op in enumerate(step.ops):
        if op.call.target is aten.linear.default and index not in pass_.replaced:
            num_segments = pass_.num_segments(index)
            if num_segments is not None:
                pass_.segment(index, num_segments)
    return pass_.result()


class _FusedLinears:
    """Collects replaced ops and reshaped values."""

    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.parameters = {p.value for p in step.parameters}
        self.metas: dict[int, TensorMeta] = {}
        self.replaced: dict[int, Op] = {}

    def num_segments(self, index: int) -> int | None:
        """How many equal segments the output of linear `index` is cut into along its last dim;
        None: it is not.
        """
        op = self.step.ops[index]
        sources = [self.parameter_chain(value) for value in op.operands[1:]]
        if any(chain is None for chain in sources):
            return None
        (output,) = op.results
        uses = self.step.consumers.get(output, ())
        if len(uses) != 1 or output in self.step.escaping:
            return None
        user = self.step.ops[uses[0][0]]
        shape = self.step.values[output].shape
        if user.call.target in _SPLITS:
            return self._pieces(user, dim=len(shape) - 1)
        if (
            user.call.target in _VIEWS
        ):  # [*b, s * n] seen as [*b, s, n], or [*b, s, heads, head_dim]
            seen = self.step.values[user.results[0]].shape
            last = len(shape) - 1
            if len(seen) > len(shape) and seen[:last] == shape[:last] and seen[last] > 1:
                return seen[last] if self._picked_apart(user.results[0], last) else None
        return None

    def parameter_chain(self, value: int) -> tuple[int, ...] | None:
        """Values from a parameter through dtype casts to `value`, each used once; None when it is
        anything else.
        """
        chain = [value]
        while True:
            if len(self.step.consumers.get(chain[-1], ())) != 1 or chain[-1] in self.step.escaping:
                return None
            if chain[-1] in self.parameters:
                return tuple(chain)
            producer = self.step.makers.get(chain[-1])
            if producer is None or self.step.ops[producer].call.target not in _CASTS:
                return None
            chain.append(self.step.ops[producer].operands[0])

    def _pieces(self, user: Op, dim: int) -> int | None:
        """Number of equal pieces, when `user` splits its operand along `dim` into equal pieces."""
        sizes = [meta.shape[dim] for meta in user.call.results]
        return len(sizes) if _works_along(user, dim) and len(set(sizes)) == 1 < len(sizes) else None

    def _picked_apart(self, value: int, dim: int) -> bool:
        """True when every use of `value` (through one permutation) takes it apart along `dim`."""
        uses = [self.step.ops[index] for index, _ in self.step.consumers.get(value, ())]
        if len(uses) == 1 and uses[0].call.target in _PERMUTATIONS:
            # Where the dim goes is found by permuting a tensor of which no other dim is 2 long.
            marker = torch.empty(
                [2 if d == dim else 1 for d in range(len(self.step.values[value].shape))]
            )
            dim = list(uses[0].call.call(marker).shape).index(2)
            value = uses[0].results[0]
            uses = [self.step.ops[index] for index, _ in self.step.consumers.get(value, ())]
        taken = all(op.call.target in _PICKS and _works_along(op, dim) for op in uses)
        return bool(uses) and value not in self.step.escaping and taken

    def segment(self, index: int, num_segments: int) -> None:
        """Give weight, bias and output of linear `index` their segment dim; splits of the output
        become unbinds, and
        an unflatten, whose dim is another now, a reshape."""
        op = self.step.ops[index]
        for value in op.operands[1:]:
            for link in self.parameter_chain(value) or ():
                self.metas[link] = _segmented(
                    self.step.values[link], num_segments, dim=0
                )  # [s, n, k] or [s, n]
        (output,) = op.results
        last = len(self.step.values[output].shape) - 1
        self.metas[output] = _segmented(
            self.step.values[output], num_segments, dim=last
        )  # [*b, s, n]
        args = (Slot(0), Slot(1), Slot(2) if len(op.operands) == 3 else None)
        self.replaced[index] = replace(
            op, call=replace(op.call, target=segmented_linear, args=args, kwargs=())
        )
        user_index = self.step.consumers[output][0][0]
        user = self.step.ops[user_index]
        if user.call.target in _SPLITS:
            call = replace(user.call, target=aten.unbind.int, args=(Slot(0), last), kwargs=())
            self.replaced[user_index] = replace(user, call=call)
        elif user.call.target is aten.unflatten.int:
            (result,) = user.call.results
            call = replace(
                user.call, target=aten.reshape.default, args=(Slot(0), result.shape), kwargs=()
            )
            self.replaced[user_index] = replace(user, call=call)

    def result(self) -> StepGraph:
        """The rewritten step; the given one when nothing was fused."""
        if not self.replaced:
            return self.step
        values = tuple(self.metas.get(i, meta) for i, meta in enumerate(self.step.values))
        parameters = tuple(
            replace(p, meta=self.metas[p.value], module_shape=p.meta.shape)
            if p.value in self.metas
            else p
            for p in self.step.parameters
        )
        ops = tuple(
            _with_metas(self.replaced.get(i, op), values) for i, op in enumerate(self.step.ops)
        )
        return replace(self.step, values=values, parameters=parameters, ops=ops)


def _works_along(op: Op, dim: int) -> bool:
    """Whether this dim of its first operand is the one that the op's `dim` names."""
    return bind(op.call)["dim"] % len(op.call.operands[0].shape) == dim


def _segmented(meta: TensorMeta, num_segments: int, dim: int) -> TensorMeta:
    shape = meta.shape
    return meta.with_shape(
        (*shape[:dim], num_segments, shape[dim] // num_segments, *shape[dim + 1 :])
    )


def _with_metas(op: Op, values: Sequence[TensorMeta]) -> Op:
    """The op with its call's metadata read from `values`."""
    operands, results = (tuple(values[v] for v in ends) for ends in (op.operands, op.results))
    return replace(op, call=replace(op.call, operands=operands, results=results))
