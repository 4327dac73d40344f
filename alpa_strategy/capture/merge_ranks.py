"""One step on the batches of all ranks, which gives what every rank computes on its own batch.

A step is captured on one rank's batch. `merge_ranks` makes it the step of all ranks: DDP's losses,
gradients and logs, as a graph that can be sharded in any way. It treats the ranks like one more
axis. Every value is of one of two kinds:

- the same on all ranks: parameters, buffers, constants, and what is made of them;
- of every rank: the ranks' tensors follow one another along one dim, in rank order. A number per
  rank is a vector over ranks.

An op whose sharding rule proves that it treats every sample alike runs once, on the samples of all
ranks: in the merged call, the shard of one rank is the call that was captured. Any other op runs
for each rank (`PerRank`). So no value of a rank depends on another rank's samples, and nothing is
assumed about what a dim means.

The loss is the mean of the ranks' losses. Each rank updates its buffers from its own batch; before
the next forward they become rank 0's, as under DDP.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from alpa_strategy.capture.communication import is_of_all_ranks
from alpa_strategy.capture.graph_builder import Builder, infer
from alpa_strategy.capture.graph_results import Numbering, renumbered_ops
from alpa_strategy.capture.ops import batch_norm_train
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import (
    AppendRecord,
    Check,
    LogRecord,
    MetricRecord,
    Op,
    SetRecord,
    StepGraph,
    ValueRef,
    ancestors,
    values_of,
)
from alpa_strategy.ir.of_ranks import OfRanks
from alpa_strategy.ir.op import AxisStrategy, OpCall, TensorMeta, aten_name, bind, rebuild
from alpa_strategy.ir.per_rank import per_rank_call
from alpa_strategy.sharding.rule_families import is_reshape
from alpa_strategy.sharding.rule_table import is_pointwise
from alpa_strategy.sharding.strategies import (
    SIZE_ARGUMENT,
    axis_strategies,
    is_random,
    localize,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Merged:
    """A value of the merged step."""

    ref: ValueRef

    # Dim along which the ranks' tensors follow one another; None: it is the same on all ranks.
    dim: int | None = None

    @property
    def is_same(self) -> bool:
        """Whether all ranks have the same value."""
        return self.dim is None


def merge_ranks(
    step: StepGraph,
    num_ranks: int,
    synced: Collection[str] = frozenset(),
    used_by_each: bool = False,
) -> StepGraph:
    """Return the step of all ranks, each on its own batch.

    Args:
        step: captured on the batch of one rank.
        num_ranks: ranks that load batches, all of the same shapes; at least 2.
        synced: paths of the BatchNorms whose statistics are those of all ranks' samples
            (SyncBatchNorm).
        used_by_each: whether each rank goes on with values that leave the step, by code of its own
            (submodules of an eager step): values that are the same on all ranks get a gradient from
            each of them, too.

    Returns:
        A step with `batch_scope="rank"` at the shapes of all batches together. Its `of_ranks` tells
        which values of the output and of records belong to single ranks.
    """
    return _Merger(step, num_ranks, synced, used_by_each).merged()


def synced_norms(module: nn.Module) -> frozenset[str]:
    """Return the paths of the module's BatchNorms that take statistics of all ranks' samples.

    These are SyncBatchNorms; all under `Trainer(sync_batchnorm=True)`.

    Raises:
        CaptureError: a SyncBatchNorm names a process group of some ranks.
    """
    strategy = getattr(getattr(module, "_trainer", None), "strategy", None)
    every = getattr(strategy, "_layer_sync", None) is not None
    paths = set()
    for path, submodule in module.named_modules():
        is_synced = isinstance(submodule, nn.SyncBatchNorm)
        if is_synced and not is_of_all_ranks(submodule.process_group):
            raise CaptureError(
                f"the SyncBatchNorm {path!r} names a process group",
                "leave out its process_group, to take the statistics of all ranks",
            )
        if is_synced or (every and isinstance(submodule, _BatchNorm)):
            paths.add(path)
    return frozenset(paths)


class _Merger:
    """Writes the merged step op by op. Args: as of `merge_ranks`."""

    def __init__(
        self, step: StepGraph, num_ranks: int, synced: Collection[str], used_by_each: bool
    ) -> None:
        self.step = step
        self.num_ranks = num_ranks
        self.synced = synced
        self.used_by_each = used_by_each
        self.builder = Builder()

        # Value of the step -> its value in the merged step.
        self.state: dict[int, Merged] = {}

        # Value index in the builder -> the same with a leading dim of ranks.
        self._by_rank: dict[int, ValueRef] = {}

        # (value of the step, dim) -> the value repeated for each rank along the dim.
        self._repeated: dict[tuple[int, int], ValueRef] = {}

    def merged(self) -> StepGraph:
        """Return the step of the global batch: the ranks' batch leaves are joined along dim 0.
        CaptureError if ranks change a parameter apart.
        """
        for entry in (*self.step.parameters, *self.step.constant_inputs):
            self.state[entry.value] = Merged(self.builder.add_value(entry.meta))
        for leaf in self.step.batch:
            meta = self._of_all(leaf.meta, 0)
            self.state[leaf.value] = Merged(self.builder.add_value(meta), 0)

        for op in self.step.ops:
            self.builder.module = op.module
            self.builder.source = op.source
            results = self._op(op)
            self.state.update(zip(op.results, results, strict=True))
        return self._finish()

    # Shapes

    def _of_all(self, meta: TensorMeta, dim: int | None) -> TensorMeta:
        """Return metadata with ranks joined along `dim` (None: as it is); a number's: [ranks]."""
        if dim is None:
            return meta
        if not meta.shape:
            return meta.with_shape((self.num_ranks,))
        shape = list(meta.shape)
        shape[dim] *= self.num_ranks
        return meta.with_shape(tuple(shape))

    def by_rank(self, value: int) -> ValueRef:
        """Return a value that differs between ranks as [ranks, *shape of one]."""
        state = self.state[value]
        shape = self.step.values[value].shape
        assert state.dim is not None
        if not shape:
            return state.ref
        if state.ref.index not in self._by_rank:
            dim = state.dim
            unflattened = (*shape[:dim], self.num_ranks, *shape[dim:])
            ref = self.builder.emit(aten.reshape.default, state.ref, unflattened)
            if dim > 0:
                order = (dim, *range(dim), *range(dim + 1, len(unflattened)))
                ref = self.builder.emit(aten.permute.default, ref, order)
            self._by_rank[state.ref.index] = ref
        return self._by_rank[state.ref.index]

    def _flattened(self, ref: ValueRef) -> Merged:
        """Return a value [ranks, *shape of one] with the ranks along dim 0 of their tensors."""
        shape = self.builder.meta(ref).shape
        if len(shape) == 1:
            return Merged(ref, 0)
        flat = self.builder.emit(aten.reshape.default, ref, (shape[0] * shape[1], *shape[2:]))
        self._by_rank[flat.index] = ref
        return Merged(flat, 0)

    def _repeat(self, value: int, dim: int) -> ValueRef:
        """Return a value that all ranks have, repeated for each rank along `dim`."""
        key = (value, dim)
        if key not in self._repeated:
            shape = self.step.values[value].shape
            emit = self.builder.emit
            ref = emit(aten.unsqueeze.default, self.state[value].ref, dim)
            ref = emit(aten.expand.default, ref, (*shape[:dim], self.num_ranks, *shape[dim:]))
            merged_shape = list(shape)
            merged_shape[dim] *= self.num_ranks
            self._repeated[key] = emit(aten.reshape.default, ref, tuple(merged_shape))
        return self._repeated[key]

    # Ops

    def _op(self, op: Op) -> list[Merged]:
        """Write an op for all ranks, and return its results."""
        states = [self.state[value] for value in op.operands]
        is_same = all(state.is_same for state in states)
        if is_same and not is_random(op.call):
            operands = [state.ref for state in states]
            return [Merged(ref) for ref in self._append(op.call, operands)]

        for attempt in (self._synced_norm, self._reshaped, self._proven, self._pointwise):
            results = attempt(op, states)
            if results is not None:
                return results
        return self._for_each_rank(op, states)

    def _append(self, call: OpCall, operands: Sequence[ValueRef]) -> list[ValueRef]:
        """Add an op to the merged step, without running it, and return its results.

        Args:
            call: with the metas of its results.
            operands: values of the merged step.
        """
        builder = self.builder
        refs = [builder.add_value(meta) for meta in call.results]
        operand_values = tuple(ref.index for ref in operands)
        result_values = tuple(ref.index for ref in refs)
        builder.ops.append(
            Op("", call, operand_values, result_values, builder.module, builder.source)
        )
        return refs

    def _synced_norm(self, op: Op, states: list[Merged]) -> list[Merged] | None:
        """Add a BatchNorm in training over the samples of all ranks, and return its results.

        Args:
            op: of the captured step.
            states: its operands in the merged step.

        Returns:
            None for any other op, for a norm with statistics per rank, and if an operand beside the
            input differs between ranks.
        """
        call = op.call
        if call.target is not batch_norm_train or op.module not in self.synced:
            return None
        x = bind(call)["x"].index
        others = [state for index, state in enumerate(states) if index != x]
        if not all(state.is_same for state in others):
            return None

        operands = [state.ref for state in states]
        if states[x].dim != 0:
            operands[x] = self._flattened(self.by_rank(op.operands[x])).ref
        y, *statistics = call.results
        merged = replace(
            call,
            operands=tuple(map(self.builder.meta, operands)),
            results=(self._of_all(y, 0), *statistics),
        )
        first, *new_statistics = self._append(merged, operands)
        return [Merged(first, 0), *map(Merged, new_statistics)]

    def _reshaped(self, op: Op, states: list[Merged]) -> list[Merged] | None:
        """Add a view that may merge or split dims, and return its result; None for any other op.

        Args: as of `_synced_norm`.
        """
        call = op.call
        if not is_reshape(call) or len(states) != 1:
            return None
        (state,) = states
        source = call.operands[0].shape
        target = call.results[0].shape
        assert state.dim is not None

        ref = state.ref
        dim = _dim_after_view(source, target, state.dim) if source else 0
        if dim is None:
            ref = self._flattened(self.by_rank(op.operands[0])).ref
            dim = 0
        merged = self._of_all(call.results[0], dim)
        return [Merged(self.builder.emit(aten.reshape.default, ref, merged.shape), dim)]

    def _proven(self, op: Op, states: list[Merged]) -> list[Merged] | None:
        """Add the op once for the samples of all ranks, and return its results; None if no sharding
        rule proves that this is right.

        Args: as of `_synced_norm`. Of several proofs, the one that repeats the fewest elements.
        """
        best: tuple[int, _Proof] | None = None
        for proof in self._proofs(op, states):
            if best is None or proof.repeated_elements < best[0]:
                best = proof.repeated_elements, proof
            if best[0] == 0:
                break
        if best is None:
            return None

        proof = best[1]
        operands = []
        for value, state, dim in zip(op.operands, states, proof.operand_dims, strict=True):
            if state.is_same and dim is not None:
                operands.append(self._repeat(value, dim))
            else:
                operands.append(state.ref)
        refs = self._append(proof.call, operands)
        return [Merged(ref, dim) for ref, dim in zip(refs, proof.result_dims, strict=True)]

    def _proofs(self, op: Op, states: list[Merged]) -> "Iterator[_Proof]":
        """Yield the merged calls whose shard for one rank is the captured call.

        Args: as of `_synced_norm`.
        """
        call = op.call
        for strategy in axis_strategies(call, 1):
            if not self._takes(strategy, states, call):
                continue
            operand_dims = tuple(dual.shard_dim for dual in strategy.inputs)
            result_dims = tuple(dual.shard_dim for dual in strategy.outputs)
            if not result_dims or None in result_dims:
                continue
            merged = self._merged_call(call, operand_dims, result_dims)
            if merged is None or not self._is_proven(merged, call, strategy):
                continue
            repeated = 0
            for state, dim, meta in zip(states, operand_dims, call.operands, strict=True):
                if state.is_same and dim is not None:
                    repeated += meta.num_elements
            yield _Proof(merged, operand_dims, result_dims, repeated)

    def _takes(self, strategy: AxisStrategy, states: list[Merged], call: OpCall) -> bool:
        """Whether a strategy takes the operands with the ranks' samples along their dims."""
        if strategy.implementation is not None:
            return False
        for dual, state, meta in zip(strategy.inputs, states, call.operands, strict=True):
            if not state.is_same and (dual.shard_dim != state.dim or not meta.shape):
                return False
        return True

    def _merged_call(
        self,
        call: OpCall,
        operand_dims: tuple[int | None, ...],
        result_dims: tuple[int | None, ...],
    ) -> OpCall | None:
        """Return the call on the samples of all ranks; None if it has other results.

        Args:
            call: of one rank.
            operand_dims, result_dims: the dim of each along which ranks are joined; None: the same
                on all ranks.
        """
        operands = tuple(map(self._of_all, call.operands, operand_dims))
        results = tuple(map(self._of_all, call.results, result_dims))
        changes: dict[str, Any] = {}
        if aten_name(call.target) in SIZE_ARGUMENT:
            changes["size"] = results[0].shape
        merged = rebuild(call, operands, results, changes)
        return merged if _gives_its_results(merged) else None

    def _is_proven(self, merged: OpCall, call: OpCall, strategy: AxisStrategy) -> bool:
        """Whether a rule shards the merged call over the ranks, and a rank's shard is `call`."""
        shapes = [dual.shard_dim for dual in (*strategy.inputs, *strategy.outputs)]
        for candidate in axis_strategies(merged, self.num_ranks):
            duals = (*candidate.inputs, *candidate.outputs)
            is_alike = [dual.shard_dim for dual in duals] == shapes
            if is_alike and candidate.implementation is None:
                local = localize(merged, (candidate,), (self.num_ranks,), (0,)).call
                return local == _with_explicit_size(call)
        return False

    def _pointwise(self, op: Op, states: list[Merged]) -> list[Merged] | None:
        """Add a pointwise op on tensors with a leading dim of ranks, and return its result; None
        for any other op, and for one that takes or gives other tensors then.

        It takes numbers per rank, and tensors of the ranks along different dims.

        Args: as of `_synced_norm`.
        """
        call = op.call
        if not is_pointwise(call.target) or len(call.results) != 1:
            return None
        num_dims = len(call.results[0].shape)
        operands = []
        for value, state in zip(op.operands, states, strict=True):
            if state.is_same:
                operands.append(state.ref)
                continue
            ref = self.by_rank(value)
            shape = self.step.values[value].shape
            if len(shape) < num_dims:
                aligned = (self.num_ranks, *[1] * (num_dims - len(shape)), *shape)
                ref = self.builder.emit(aten.reshape.default, ref, aligned)
            operands.append(ref)
        metas = tuple(map(self.builder.meta, operands))
        (result,) = call.results
        expected = result.with_shape((self.num_ranks, *result.shape))
        merged = replace(call, operands=metas, results=(expected,))
        # An op may take a number only, and one among the operands may promote dtypes otherwise.
        if not _gives_its_results(merged):
            return None
        (ref,) = self._append(merged, operands)
        return [self._flattened(ref)]

    def _for_each_rank(self, op: Op, states: list[Merged]) -> list[Merged]:
        """Add an op that runs once for each rank, and return its results.

        `states`: of the op's operands.
        """
        operands = []
        for value, state in zip(op.operands, states, strict=True):
            operands.append(state.ref if state.is_same else self.by_rank(value))
        mapped = tuple(not state.is_same for state in states)
        call = per_rank_call(op.call, mapped, self.num_ranks)
        return [self._flattened(ref) for ref in self._append(call, operands)]

    # The end

    def _finish(self) -> StepGraph:
        """Return the graph of ops with effects; CaptureError if ranks change a parameter apart."""
        step = self.step
        records, of_ranks = self._records()
        loss = self.state[step.loss]
        mean_loss = loss.ref
        if not loss.is_same:
            mean_loss = self.builder.emit(aten.mean.default, loss.ref)
        # Value of a buffer in the step -> its new value.
        updates = {}
        for buffer in step.buffers:
            if buffer.update is None:
                continue
            # DDP sends buffers of rank 0 to all ranks, and no parameters.
            if buffer.is_parameter and not self.state[buffer.update].is_same:
                raise CaptureError(
                    f"each rank changes parameter {buffer.name} by its own batch",
                    "register it as a buffer",
                )
            updates[buffer.value] = self._merged_ref(buffer.update, of_ranks)

        leaving = {mean_loss.index, *(ref.index for ref in updates.values())}
        leaving.update(values_of(list(records.values())))
        live_ops = [self.builder.ops[index] for index in ancestors(self.builder.ops, leaving)]

        numbering = Numbering(self.builder.values)
        inputs = self._inputs(numbering)
        ops = renumbered_ops(live_ops, numbering)
        new = numbering.index

        buffers = []
        for original, buffer in zip(step.buffers, inputs["buffers"], strict=True):
            update = updates.get(original.value)
            buffers.append(replace(buffer, update=None if update is None else new[update.index]))

        def renumbered(ref: ValueRef) -> ValueRef:
            return ValueRef(new[ref.index])

        parts: dict[str, Any] = {**inputs, "buffers": tuple(buffers)}
        for name, record in records.items():
            parts[name] = _map_refs(record, renumbered)
        return replace(
            step,
            **parts,
            values=tuple(numbering.values),
            ops=tuple(ops),
            loss=new[mean_loss.index],
            loss_of_ranks=-1 if loss.is_same else new[loss.ref.index],
            batch_size=step.batch_size * self.num_ranks,
            of_ranks=tuple((new[value], how) for value, how in sorted(of_ranks.items())),
        )

    def _records(self) -> tuple[dict[str, Any], dict[int, OfRanks]]:
        """Return the output and the records by name, and how their values hold those of ranks."""
        of_ranks: dict[int, OfRanks] = {}

        def merged_ref(ref: ValueRef) -> ValueRef:
            return self._merged_ref(ref.index, of_ranks)

        records = {}
        for name in ("output", "logs", "metrics", "checks", "appended", "assigned"):
            records[name] = _map_refs(getattr(self.step, name), merged_ref)
        return records, of_ranks

    def _merged_ref(self, value: int, of_ranks: dict[int, OfRanks]) -> ValueRef:
        """Return the merged value of one that leaves the step.

        With `used_by_each`, a value with a gradient that all ranks have is repeated for each rank.

        Args:
            value: of the captured step.
            of_ranks: merged value -> along which dim the ranks' values are joined; this one is
                added, unless it is the same on all ranks.
        """
        state = self.state[value]
        if self.used_by_each and state.is_same and self.step.values[value].requires_grad:
            state = self._separated(value)
        if state.dim is not None:
            is_number = not self.step.values[value].shape
            of_ranks[state.ref.index] = OfRanks(state.dim, is_number)
        return state.ref

    def _separated(self, value: int) -> Merged:
        """Return a value that all ranks have, once for each rank: each gives its own gradient."""
        if self.step.values[value].shape:
            return Merged(self._repeat(value, 0), 0)
        ref = self.state[value].ref
        return Merged(self.builder.emit(aten.expand.default, ref, (self.num_ranks,)), 0)

    def _inputs(self, numbering: Numbering) -> dict[str, tuple[Any, ...]]:
        """Return the step's inputs by group, renumbered; batch leaves have the ranks' tensors."""
        inputs: dict[str, tuple[Any, ...]] = {}
        for group in ("parameters", "buffers", "batch", "constants"):
            entries = []
            for entry in getattr(self.step, group):
                index = numbering.define(self.state[entry.value].ref.index)
                entries.append(replace(entry, value=index))
            inputs[group] = tuple(entries)

        batch = []
        for leaf in inputs["batch"]:
            meta = numbering.values[leaf.value]
            is_split = bool(leaf.meta.shape) and leaf.meta.shape[0] == self.step.batch_size
            batch.append(replace(leaf, meta=meta, batch_dim=0, is_split=is_split))
        return inputs | {"batch": tuple(batch)}


@dataclass(frozen=True)
class _Proof:
    """An op on the samples of all ranks, which a sharding rule allows."""

    call: OpCall

    # Per operand and result the dim along which the ranks' tensors follow one another.
    operand_dims: tuple[int | None, ...]
    result_dims: tuple[int | None, ...]

    # Elements of operands that are repeated for each rank.
    repeated_elements: int


def _gives_its_results(call: OpCall) -> bool:
    """Whether the op takes the operands of `call` and gives results with its metadata."""
    try:
        inferred, _ = infer(replace(call, results=()))
    # The op may refuse the shapes in any way: then it runs for each rank.
    except Exception:
        return False
    return inferred.results == call.results


def _with_explicit_size(call: OpCall) -> OpCall:
    """Return the call with its result's shape as argument `size`; unchanged if it has no `size`."""
    if aten_name(call.target) not in SIZE_ARGUMENT:
        return call
    return rebuild(call, call.operands, call.results, {"size": call.results[0].shape})


def _map_refs(node: Any, fn: Callable[[ValueRef], ValueRef]) -> Any:
    """Return an output structure or records with `fn` of each ValueRef in its place."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, ValueRef):
            return fn(leaf)
        if isinstance(leaf, LogRecord | MetricRecord | AppendRecord | SetRecord | Check):
            fields = {name: _map_refs(value, fn) for name, value in vars(leaf).items()}
            return replace(leaf, **fields)
        return leaf

    return pytree.tree_map(mapped, node)


def _dim_after_view(source: tuple[int, ...], target: tuple[int, ...], dim: int) -> int | None:
    """Return the target's dim that the ranks' blocks along `dim` of the source become, or None.

    The blocks stay one after the other if as many elements are in front of both dims.
    """
    before = 1
    for size in source[:dim]:
        before *= size
    front = 1
    for target_dim, size in enumerate(target):
        if front == before:
            return target_dim
        front *= size
    if not target and before == 1:
        # A number per rank.
        return 0
    return None
