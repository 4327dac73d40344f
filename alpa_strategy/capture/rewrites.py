"""Replace ops at capture: mean losses by sum / count, norms by ops with their new statistics as
results (ops.py), and, in the finished graph, fused projections by segmented ones.

A column-parallel shard of a fused weight (query, key and value; gate and up) must have a shard of
*every* segment: rows [0, n) of a [3n, k] weight are the full query and no key. As [3, n, k] the
same weight is sharded along n like any other. So `segment_fused_linears` gives the parameter that
shape in the step; `ParameterInput.module_shape` is its shape in the module.
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
    """Emit a cross entropy or NLL loss as sum / count; return None for any other call.

    Half-precision logits are summed in fp32, as a sum (unlike the mean) may overflow. The result
    has the call's dtype. A loss per row is emitted only with `summed_in`: in fp32, and without a
    sum.

    Args:
        summed_in: dtype of the sum and of the result, if it is not that of the logits
            (`Autocast.loss_dtype`).
    """
    is_cross_entropy = target is aten.cross_entropy_loss.default
    if not is_cross_entropy and target not in _NLL:
        return None
    a = bound_arguments(target, args, kwargs)
    logits = a["self"]  # [samples, classes, *d]
    labels = a["target"]  # [samples, *d]
    weight = a["weight"]  # [classes]
    dtype = builder.meta(logits).dtype
    smoothing = a.get("label_smoothing", 0.0)
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
    # Labels that are probabilities have the shape [samples, classes, *d].
    are_probabilities = builder.meta(labels).dtype.is_floating_point
    if is_cross_entropy:
        dtypes = () if summed_in is None else (summed_in,)
        loss = builder.emit(
            ops.cross_entropy_sum, logits, labels, weight, a["ignore_index"], smoothing, *dtypes
        )
    else:
        loss = builder.emit(ops.nll_sum, logits, labels, weight, a["ignore_index"])
    if a["reduction"] == _MEAN and are_probabilities:
        meta = builder.meta(logits)
        num_rows = meta.num_elements // meta.shape[1] if len(meta.shape) > 1 else 1
        loss = builder.emit(aten.div.Tensor, loss, num_rows)
    elif a["reduction"] == _MEAN:
        # Over all ranks: they may have different numbers of ignored labels.
        count = builder.emit(
            ops.target_weight_sum, labels, weight, a["ignore_index"], builder.meta(loss).dtype
        )
        loss = builder.emit(aten.div.Tensor, loss, count)
    if dtype in _HALF and summed_in is None:
        return builder.emit(aten.to.dtype, loss, dtype)
    return loss


def rewrite_bags(
    builder: Builder, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ValueRef | None:
    """Emit `bag_lookup` for an `embedding_bag` whose bags have one length; else return None. So it
    does if the step reads another result than the first, or with `scale_grad_by_freq` or
    `include_last_offset`.

    nn.EmbeddingBag calls it so for ids [n, k]. Its offsets are then `arange(0, n k, k)`, which
    cannot be seen from the op's schema.

    Args:
        args, kwargs: the node's arguments, with ValueRefs.
    """
    if node.target not in _BAGS or _uses_other_results(node):
        return None
    a = bound_arguments(node.target, args, kwargs)
    num_ids = builder.meta(a["indices"]).num_elements
    bag_length = _bag_length(node, num_ids)
    if bag_length is None or a["scale_grad_by_freq"] or a["include_last_offset"]:
        return None

    # [num_ids] -> [bags, bag_length]
    shape = (num_ids // bag_length, bag_length)
    ids = builder.emit(aten.reshape.default, a["indices"], shape)
    weights = a["per_sample_weights"]
    if weights is not None:
        weights = builder.emit(aten.reshape.default, weights, shape)
    padding = a.get("padding_idx", -1)
    if padding is None:
        padding = -1
    return builder.emit(ops.bag_lookup, a["weight"], ids, weights, a["mode"], padding)


def _uses_other_results(node: fx.Node) -> bool:
    """Whether the step reads another result of an op than the first, or all of them as a tuple."""
    for user in node.users:
        if user.target is not operator.getitem:
            return True
        if user.args[1] and user.users:
            return True
    return False


def _bag_length(node: fx.Node, num_ids: int) -> int | None:
    """Return the number of ids in each bag of an `embedding_bag`; None if it is not known, or not
    the same for all.

    Args:
        num_ids: number of ids of all bags.
    """
    offsets = bound_arguments(node.target, tuple(node.args), dict(node.kwargs))["offsets"]
    if getattr(offsets, "target", None) is not aten.arange.start_step:
        return None
    start, stop, step = (*offsets.args, 1)[:3]
    if (start, stop) != (0, num_ids) or step == 0 or num_ids % step:
        return None
    return step


def without_empty_tensors(builder: Builder, target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a `cat` without tensors of no elements.

    Caches start with empty tensors, and no rule fits their shape. Arguments of other ops are
    returned unchanged. So are those of a `cat` of empty tensors alone, and of several dtypes: an
    empty tensor counts for the result's dtype.

    Args:
        target: the op.
        args: its arguments, with ValueRefs.
    """
    if target not in (aten.cat.default, aten.concat.default):
        return args
    nonempty = [ref for ref in args[0] if builder.meta(ref).num_elements]
    dtypes = {builder.meta(ref).dtype for ref in args[0]}
    if not nonempty or len(dtypes) > 1:
        return args
    return (nonempty, *args[1:])


def with_traced_dtype(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], traced: Any
) -> dict[str, Any]:
    """Return the keyword arguments of a factory (torch.ones) with its dtype; those of other ops
    unchanged.

    When the graph runs, the default dtype may be another.

    Args:
        target: the op.
        args, kwargs: its arguments, with ValueRefs.
        traced: its result in the trace.
    """
    dtype = bound_arguments(target, args, kwargs).get("dtype", "no such argument")
    is_factory = dtype is None and isinstance(traced, Tensor) and not _refs((args, kwargs))
    return {**kwargs, "dtype": traced.dtype} if is_factory else kwargs


def emit_from_whole_numbers(
    builder: Builder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> ValueRef | None:
    """Emit a call on integers or booleans with a result of the default dtype; else return None.

    Such as `num_correct / num_samples`. The default dtype may be another when the graph runs.

    Args:
        dtype: of the result in the trace.
    """
    if not dtype.is_floating_point:
        return None
    for ref in _refs((args, kwargs)):
        operand_dtype = builder.meta(ref).dtype
        if operand_dtype.is_floating_point or operand_dtype.is_complex:
            return None
    if target is aten.where.Scalar:
        condition, *numbers = args
        filled = [builder.emit(aten.full.default, (), number, dtype=dtype) for number in numbers]
        return builder.emit(aten.where.self, condition, *filled)
    args, kwargs = map_refs((args, kwargs), lambda ref: builder.emit(aten.to.dtype, ref, dtype))
    return builder.emit(target, *args, **kwargs)


def _refs(tree: Any) -> list[ValueRef]:
    """Return the references to values in the leaves of a pytree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, ValueRef)]


def rewrite_norm(
    builder: Builder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ValueRef, ...] | None:
    """Emit a BatchNorm in training; return None for any other call.

    Returns:
        (y,) or (y, new running mean, new running variance).

    Raises:
        CaptureError: it is an InstanceNorm with running statistics.
    """
    if target not in (aten.batch_norm.default, aten.instance_norm.default):
        return None
    a = bound_arguments(target, args, kwargs)
    if target is aten.instance_norm.default:
        # Its schema does not show that it writes to the statistics.
        if a["use_input_stats"] and a["running_mean"] is not None:
            raise CaptureError(
                f"an InstanceNorm updates running statistics in the step ({builder.source})",
                "leave out track_running_stats, or normalise by BatchNorm or GroupNorm",
            )
        return None
    # In evaluation it is an op like any other.
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
    """Return the step with a segmented linear in place of each fused one; the same step if it has
    none.

    Linears that share their weight or bias with another op are left as they are.
    """
    pass_ = _FusedLinears(step)
    for index, op in enumerate(step.ops):
        if op.call.target is aten.linear.default and index not in pass_.replaced:
            num_segments = pass_.num_segments(index)
            if num_segments is not None:
                pass_.segment(index, num_segments)
    return pass_.result()


class _FusedLinears:
    """Collects the ops and values that segmented linears replace."""

    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.parameters = {parameter.value for parameter in step.parameters}

        # Value index -> its new metadata.
        self.metas: dict[int, TensorMeta] = {}

        # Op index -> its new op.
        self.replaced: dict[int, Op] = {}

    def num_segments(self, index: int) -> int | None:
        """Return into how many equal segments the output of linear `index` is split; None: none.

        It is split along its last dim. None as well if weight, bias or output have another use.
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
        if user.call.target in _VIEWS:
            # [*b, s * n] viewed as [*b, s, n], or as [*b, s, heads, head_dim].
            viewed = self.step.values[user.results[0]].shape
            last = len(shape) - 1
            adds_dims = len(viewed) > len(shape) and viewed[:last] == shape[:last]
            if adds_dims and viewed[last] > 1 and self._picked_apart(user.results[0], last):
                return viewed[last]
        return None

    def parameter_chain(self, value: int) -> tuple[int, ...] | None:
        """Return the values from `value` through dtype casts back to a parameter, which is the
        last.

        None if there is no parameter at the end, or one of the values is not used exactly once or
        leaves the step.
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
        """Return the number of pieces if `user` splits its operand along `dim` equally; None if
        not, or for one piece.
        """
        if not _works_along(user, dim):
            return None
        sizes = [meta.shape[dim] for meta in user.call.results]
        if len(sizes) == 1 or len(set(sizes)) > 1:
            return None
        return len(sizes)

    def _picked_apart(self, value: int, dim: int) -> bool:
        """Whether every use of `value` takes slices along `dim`, maybe after one permutation. False
        if there is no use, or it leaves the step.
        """
        uses = self._users(value)
        if len(uses) == 1 and uses[0].call.target in _PERMUTATIONS:
            # Permute a tensor in which only this dim has size 2 to see where the dim goes.
            shape = [1] * len(self.step.values[value].shape)
            shape[dim] = 2
            permuted = uses[0].call.call(torch.empty(shape))
            dim = list(permuted.shape).index(2)
            value = uses[0].results[0]
            uses = self._users(value)
        if not uses or value in self.step.escaping:
            return False
        if any(op.call.target not in _PICKS for op in uses):
            return False
        return all(_works_along(op, dim) for op in uses)

    def _users(self, value: int) -> list[Op]:
        """Return the ops that read a value, once per operand."""
        return [self.step.ops[index] for index, _ in self.step.consumers.get(value, ())]

    def segment(self, index: int, num_segments: int) -> None:
        """Give weight, bias and output of linear `index` their segment dim.

        A split of the output becomes an unbind. An unflatten becomes a reshape, because its dim is
        another one now.
        """
        op = self.step.ops[index]
        for value in op.operands[1:]:
            for link in self.parameter_chain(value) or ():
                # [s, n, k] or [s, n]
                self.metas[link] = _segmented(self.step.values[link], num_segments, dim=0)
        (output,) = op.results
        last = len(self.step.values[output].shape) - 1
        # [*b, s, n]
        self.metas[output] = _segmented(self.step.values[output], num_segments, dim=last)

        args = (Slot(0), Slot(1), Slot(2) if len(op.operands) == 3 else None)
        linear = replace(op.call, target=segmented_linear, args=args, kwargs=())
        self.replaced[index] = replace(op, call=linear)
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
        """Return the rewritten step, or the same step if it has no fused linear."""
        if not self.replaced:
            return self.step
        values = tuple(self.metas.get(i, meta) for i, meta in enumerate(self.step.values))

        parameters = []
        for parameter in self.step.parameters:
            if parameter.value in self.metas:
                meta = self.metas[parameter.value]
                parameter = replace(parameter, meta=meta, module_shape=parameter.meta.shape)
            parameters.append(parameter)

        ops = []
        for index, op in enumerate(self.step.ops):
            ops.append(_with_metas(self.replaced.get(index, op), values))
        return replace(self.step, values=values, parameters=tuple(parameters), ops=tuple(ops))


def _works_along(op: Op, dim: int) -> bool:
    """Whether the op's `dim` argument is this dim of its first operand."""
    return bind(op.call)["dim"] % len(op.call.operands[0].shape) == dim


def _segmented(meta: TensorMeta, num_segments: int, dim: int) -> TensorMeta:
    """Return the metadata with `dim` split into [num_segments, size of a segment]."""
    shape = meta.shape
    return meta.with_shape(
        (*shape[:dim], num_segments, shape[dim] // num_segments, *shape[dim + 1 :])
    )


def _with_metas(op: Op, values: Sequence[TensorMeta]) -> Op:
    """Return the op with its call's metadata taken from `values`."""
    operands = tuple(values[value] for value in op.operands)
    results = tuple(values[value] for value in op.results)
    return replace(op, call=replace(op.call, operands=operands, results=results))


def with_dense_gradients(target: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return positional arguments with `sparse=False`: reductions support dense gradients only."""
    dense = []
    for argument, value in zip(target._schema.arguments, args, strict=False):
        dense.append(False if argument.name == "sparse" else value)
    return tuple(dense)
