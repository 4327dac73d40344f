"""Fused projections: a weight that makes several tensors (query, key and value; gate and up), split segment by segment.

A column-parallel shard of such a weight must take its share of *every* segment: rows [0, n) of a [3n, k] weight are the
whole query and nothing of the key. Seen as [3, n, k] the same weight is sharded along n like any other, so this pass
gives the parameter that shape in the step (its memory does not move: `ParameterInput.module_shape` keeps the module's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from alpa_strategy.capture.ops import segmented_linear
from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.ir.op import OpCall, Slot, TensorMeta

aten = torch.ops.aten
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int)
_PERMUTATIONS = (aten.permute.default, aten.transpose.int, aten.movedim.int)
_PICKS = (aten.unbind.int, aten.select.int, *_SPLITS)
_CASTS = (aten.to.dtype, aten._to_copy.default)


def segment_fused_linears(step: StepGraph) -> StepGraph:
    """The same step with every fused linear whose weight (and bias) it alone uses made segmented."""
    pass_ = _Pass(step)
    for index, op in enumerate(step.ops):
        if op.call.target is aten.linear.default and index not in pass_.replaced:
            num_segments = pass_.num_segments(index)
            if num_segments is not None:
                pass_.segment(index, num_segments)
    return pass_.result()


class _Pass:
    """Collects replaced ops and reshaped values."""

    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.producers = {value: index for index, op in enumerate(step.ops) for value in op.results}
        self.parameters = {p.value for p in step.parameters}
        self.metas: dict[int, TensorMeta] = {}
        self.replaced: dict[int, Op] = {}

    def num_segments(self, index: int) -> int | None:
        """How many equal segments the output of linear `index` is cut into along its last dim; None: it is not."""
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
            seen = self.step.values[user.results[0]].shape
            last = len(shape) - 1
            if len(seen) > len(shape) and seen[:last] == shape[:last] and seen[last] > 1:
                return seen[last] if self._picked_apart(user.results[0], last) else None
        return None

    def parameter_chain(self, value: int) -> tuple[int, ...] | None:
        """Values from a parameter through dtype casts to `value`, each used once; None when it is anything else."""
        chain = [value]
        while True:
            if len(self.step.consumers.get(chain[-1], ())) != 1 or chain[-1] in self.step.escaping:
                return None
            if chain[-1] in self.parameters:
                return tuple(chain)
            producer = self.producers.get(chain[-1])
            if producer is None or self.step.ops[producer].call.target not in _CASTS:
                return None
            chain.append(self.step.ops[producer].operands[0])

    def _pieces(self, user: Op, dim: int) -> int | None:
        """Number of equal pieces, when `user` splits its operand along `dim` into equal pieces."""
        call = user.call
        rank = len(call.operands[0].shape)
        arguments = [*call.args[1:], *[value for _, value in call.kwargs]]
        split_dim = arguments[1] if len(arguments) > 1 else 0
        sizes = {meta.shape[dim] for meta in call.results}
        if split_dim % rank != dim or len(sizes) != 1 or len(call.results) < 2:
            return None
        return len(call.results)

    def _picked_apart(self, value: int, dim: int) -> bool:
        """True when every use of `value` (through one permutation) takes it apart along `dim`."""
        uses = [self.step.ops[index] for index, _ in self.step.consumers.get(value, ())]
        if len(uses) == 1 and uses[0].call.target in _PERMUTATIONS:
            marker = torch.empty([2 if d == dim else 1 for d in range(len(self.step.values[value].shape))])
            dim = list(uses[0].call.call(marker).shape).index(2)
            value = uses[0].results[0]
            uses = [self.step.ops[index] for index, _ in self.step.consumers.get(value, ())]
        rank = len(self.step.values[value].shape)

        def taken(op: Op) -> bool:
            if op.call.target not in _PICKS:
                return False
            position = 1 if op.call.target in (aten.unbind.int, aten.select.int) else 2
            picked = op.call.args[position] if len(op.call.args) > position else dict(op.call.kwargs).get("dim", 0)
            return picked % rank == dim

        return bool(uses) and value not in self.step.escaping and all(map(taken, uses))

    def segment(self, index: int, num_segments: int) -> None:
        """Give weight, bias and output of linear `index` their segment dim; splits of the output become unbinds, and
        an unflatten, whose dim is another now, a reshape."""
        op = self.step.ops[index]
        for value in op.operands[1:]:
            for link in self.parameter_chain(value) or ():
                self.metas[link] = _segmented(self.step.values[link], num_segments, dim=0)
        (output,) = op.results
        last = len(self.step.values[output].shape) - 1
        self.metas[output] = _segmented(self.step.values[output], num_segments, dim=last)
        args = (Slot(0), Slot(1), Slot(2) if len(op.operands) == 3 else None)
        self.replaced[index] = replace(op, call=replace(op.call, target=segmented_linear, args=args, kwargs=()))
        user_index = self.step.consumers[output][0][0]
        user = self.step.ops[user_index]
        if user.call.target in _SPLITS:
            call = replace(user.call, target=aten.unbind.int, args=(Slot(0), last), kwargs=())
            self.replaced[user_index] = replace(user, call=call)
        elif user.call.target is aten.unflatten.int:
            (result,) = user.call.results
            call = replace(user.call, target=aten.reshape.default, args=(Slot(0), result.shape), kwargs=())
            self.replaced[user_index] = replace(user, call=call)

    def result(self) -> StepGraph:
        """The rewritten step; the given one when nothing was fused."""
        if not self.replaced:
            return self.step
        values = tuple(self.metas.get(i, meta) for i, meta in enumerate(self.step.values))
        parameters = tuple(
            replace(p, meta=self.metas[p.value], module_shape=p.meta.shape) if p.value in self.metas else p
            for p in self.step.parameters
        )
        ops = tuple(_with_metas(self.replaced.get(i, op), values) for i, op in enumerate(self.step.ops))
        return replace(self.step, values=values, parameters=parameters, ops=ops)


def _segmented(meta: TensorMeta, num_segments: int, dim: int) -> TensorMeta:
    shape = meta.shape
    return meta.with_shape((*shape[:dim], num_segments, shape[dim] // num_segments, *shape[dim + 1 :]))


def _with_metas(op: Op, values: Sequence[TensorMeta]) -> Op:
    """The op with its call's metadata read from `values`."""
    call: OpCall = op.call
    operands = tuple(values[v] for v in op.operands)
    results = tuple(values[v] for v in op.results)
    if operands == call.operands and results == call.results:
        return op
    return replace(op, call=replace(call, operands=operands, results=results))
