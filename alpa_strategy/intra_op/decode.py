"""Reads a solved intra-op problem back: strategies, parameter plans, collectives, seconds and
bytes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from alpa_strategy.intra_op.build import IntraOp
from alpa_strategy.intra_op.memory_choices import fetched_bytes, recomputed, stored
from alpa_strategy.intra_op.options import REDUCTIONS, bucketed_seconds, step_collectives_of
from alpa_strategy.intra_op.overlap import best_parts, making_seconds
from alpa_strategy.ir.gathers import is_gather, launched_counts, local_bytes
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.placement import DualLayout
from alpa_strategy.ir.plan import Collective, Predicted, StagePlan
from alpa_strategy.ir.value_names import maker_names, op_with_line, without_indices
from alpa_strategy.sharding.redistribute import reshard_steps

# Of the parameters of a block, the usual unit of FSDP: 50 to 400 MB.
BLOCK_BYTES = 100 * 2**20


def decode(
    intra: IntraOp, assignment: Sequence[int], submesh: tuple[int, int], predicted: Predicted
) -> StagePlan:
    """Return the stage plan of an assignment (strategy index per choice of `intra.problem`), with
    first device 0.

    Args:
        submesh: (nodes, devices per node) of the stage.
        predicted: figures of a step, stored as they are.
    """
    step, of_ops = intra.step, assignment[len(intra.parameters) :]
    plans = {
        p.name: options.plans[k]
        for p, options, k in zip(step.parameters, intra.parameters, assignment, strict=False)
    }
    strategies = {
        op.name: o.strategies[k] for op, o, k in zip(step.ops, intra.ops, of_ops, strict=False)
    }
    return StagePlan(
        submesh=submesh,
        first_device=0,
        logical_mesh=intra.mesh.shape,
        ops=(0, len(step.ops)),
        parameter_plans=plans,
        strategies=strategies,
        collectives=collectives(intra, assignment),
        shapes={p.name: tuple(p.module_shape or p.meta.shape) for p in step.parameters},
        predicted=predicted,
        received={
            value: boundary.layouts[assignment[boundary.choice]]
            for value, boundary in intra.received.items()
        },
        sent={
            value: boundary.layouts[assignment[boundary.choice]]
            for value, boundary in intra.sent.items()
        },
        recomputed=recomputed(intra, assignment),
        stored=tuple(step.ops[i].name for i in stored(intra, assignment)),
        num_chunks=_num_chunks(intra, assignment),
    )


def _num_chunks(intra: IntraOp, assignment: Sequence[int]) -> dict[str, int]:
    """Return name -> number of chunks of the matmuls whose sum is priced as overlapped."""
    chunks_of_matmul: dict[str, int] = {}
    for transfer, layouts in zip(intra.problem.transfers, intra.transfers, strict=True):
        source = transfer.source[assignment[transfer.producer]]
        # Such a matmul has one reader.
        use = transfer.uses[0]
        target = int(use.layout[assignment[use.choice]])
        if layouts.hidden[source, target] <= 0:
            continue
        value = layouts.value
        source_layout = layouts.sources[source]
        making = float(making_seconds(intra.step, intra.ops, value, (source_layout,))[0])
        meta = intra.step.values[value]
        parts = best_parts(making, meta, source_layout, layouts.targets[target], intra.mesh)
        if parts > 1:
            chunks_of_matmul[intra.step.ops[intra.step.makers[value]].name] = parts
    return chunks_of_matmul


def used_transfers(
    intra: IntraOp, assignment: Sequence[int]
) -> Iterator[tuple[int, int, DualLayout, tuple[DualLayout, ...]]]:
    """Yield, per transfer, (first op that reads it, value, source layout, the distinct target
    layouts).

    For a value that only leaves the stage, the first is a number larger than any op's.
    """
    for transfer, layouts in zip(intra.problem.transfers, intra.transfers, strict=True):
        source = layouts.sources[transfer.source[assignment[transfer.producer]]]
        targets = dict.fromkeys(
            layouts.targets[int(use.layout[assignment[use.choice]])] for use in transfer.uses
        )
        # Uses are in the order of the ops.
        first = transfer.uses[0].choice - len(intra.parameters)
        yield first, layouts.value, source, tuple(targets)


@dataclass(frozen=True)
class Message:
    """One collective of an assignment: `num_bytes` of the full tensor on the mesh axis."""

    kind: str
    axis: int
    phase: str
    num_bytes: int
    # it gathers a parameter for use, or brings its gradient back: nothing else waits for it
    of_parameter: bool = False

    def communicates(self, intra: IntraOp) -> bool:
        """Whether the message is between devices: one device alone has all that it would get."""
        return intra.mesh.shape[self.axis] > 1

    def seconds(self, intra: IntraOp) -> float:
        """Return the seconds of the message alone; of one per update, its share of a step."""
        axis = intra.mesh.axes[self.axis]
        if self.phase == "step":
            return bucketed_seconds(axis, self.kind, self.num_bytes) / intra.tables.steps_per_update
        return axis.seconds(self.kind, self.num_bytes)

    def seconds_together(self, intra: IntraOp) -> float:
        """Return the seconds of the message as a share of all that is gathered or reduced at once
        for a block.
        """
        return bucketed_seconds(intra.mesh.axes[self.axis], self.kind, self.num_bytes, BLOCK_BYTES)


def collectives(intra: IntraOp, assignment: Sequence[int]) -> tuple[Collective, ...]:
    """Return all collectives of an assignment per step, summed by kind, mesh axis and phase, and
    sorted by these.
    """
    totals: dict[tuple[str, int, str], _CollectiveTotal] = defaultdict(_CollectiveTotal)
    for moved, message in _moved_tensors(intra, assignment):
        totals[message.kind, message.axis, message.phase].add(moved, message, intra)
    names = maker_names(intra.step)
    return tuple(
        Collective(
            kind,
            axis,
            phase,
            total.count,
            int(total.num_bytes),
            total.seconds,
            total.largest_part(intra, names),
        )
        for (kind, axis, phase), total in sorted(totals.items(), key=lambda item: item[0])
    )


class MovedTensor(NamedTuple):
    """A tensor that a message moves: value `number`, or one of op or parameter `number`."""

    # `value`, `op` or `parameter`
    kind: str
    number: int

    def text(self, intra: IntraOp, message: Message, names: Mapping[int, str]) -> str:
        """Return the tensor for users: `the gradient of blocks.0.mlp.fc.weight`.

        Args:
            message: that moves it.
            names: of `maker_names`.
        """
        step = intra.step
        if self.kind == "op":
            return f"a tensor inside {op_with_line(step.ops[self.number])}"
        if self.kind == "parameter":
            name = step.parameters[self.number].name + self._reader(step)
            is_gradient = message.kind in REDUCTIONS
        else:
            name = names[self.number]
            maker = step.makers.get(self.number)
            if maker is not None:
                name = f"the result of {op_with_line(step.ops[maker])}"
            else:
                name += self._reader(step)
            # A parameter is gathered in the backward as well.
            is_reduced = message.kind in REDUCTIONS or not message.of_parameter
            is_gradient = message.phase == "backward" and is_reduced
        return f"the gradient of {name}" if is_gradient else name

    def _reader(self, step: StepGraph) -> str:
        """Return the first op with a line that reads a parameter or input, to append; "" if none
        does.
        """
        is_parameter = self.kind == "parameter"
        value = step.parameters[self.number].value if is_parameter else self.number
        for op, _ in step.consumers.get(value, ()):
            if step.ops[op].source:
                return f", read by {op_with_line(step.ops[op])}"
        return ""


@dataclass
class _CollectiveTotal:
    """The sum of messages, and what they move."""

    count: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    # A message that moves each tensor, and the bytes of all of them.
    messages: dict[MovedTensor, Message] = field(default_factory=dict)
    bytes_of: Counter[MovedTensor] = field(default_factory=Counter)

    def add(self, moved: MovedTensor, message: Message, intra: IntraOp) -> None:
        """Count a message in, which moves the tensor `moved`."""
        self.count += 1
        self.num_bytes += message.num_bytes
        self.seconds += message.seconds(intra)
        self.messages.setdefault(moved, message)
        self.bytes_of[moved] += message.num_bytes

    def largest_part(self, intra: IntraOp, names: Mapping[int, str]) -> str:
        """Return the tensors of most bytes as text, with their share if there are others: `the
        gradient of blocks.*.mlp.fc.weight (40% of the bytes)`.

        Tensors whose names differ in their indices are one part. "" without a message.
        """
        by_text: dict[str, _Part] = {}
        for moved, num_bytes in self.bytes_of.items():
            text = moved.text(intra, self.messages[moved], names)
            same = by_text.setdefault(without_indices(text), _Part(text))
            same.num_bytes += num_bytes
            if same.text != text:
                same.text = without_indices(text)
        if not by_text:
            return ""
        largest = max(by_text.values(), key=lambda part: part.num_bytes)
        if len(by_text) == 1:
            return largest.text
        share = largest.num_bytes / max(1, self.num_bytes)
        return f"{largest.text} ({share:.0%} of the bytes)"


@dataclass
class _Part:
    """What some of the messages of a collective move, for users, and the bytes of all of them."""

    text: str
    num_bytes: int = 0


def _moved_tensors(
    intra: IntraOp, assignment: Sequence[int]
) -> Iterator[tuple[MovedTensor, Message]]:
    """Yield all collectives of an assignment per step with what they move."""
    for resharding, message in transfer_messages(intra, assignment):
        yield MovedTensor("value", resharding.value), message
    for op, message in op_messages(intra, assignment):
        yield MovedTensor("op", op), message
    for parameter, message in parameter_messages(intra, assignment):
        yield MovedTensor("parameter", parameter), message


def messages(intra: IntraOp, assignment: Sequence[int]) -> Iterator[Message]:
    """Yield all collectives of an assignment per step, one by one."""
    for _, message in transfer_messages(intra, assignment):
        yield message
    for _, message in op_messages(intra, assignment):
        yield message
    for _, message in parameter_messages(intra, assignment):
        yield message


class Resharding(NamedTuple):
    """A value that is brought from one layout to another for op number `first` and maybe later
    ones.
    """

    first: int
    value: int
    source: DualLayout
    target: DualLayout


def transfer_messages(
    intra: IntraOp, assignment: Sequence[int]
) -> Iterator[tuple[Resharding, Message]]:
    """Yield the collectives that bring values to the layouts in which ops read them."""
    step, mesh = intra.step, intra.mesh
    # ZeRO-3 keeps no gathered copy: what a backward needs is gathered once more there, for an op's
    # second run as well.
    runs_again = set(recomputed(intra, assignment))
    saved, recomputed_values = set[int](), set[int]()
    for op, options in zip(step.ops, intra.ops, strict=True):
        saved.update(
            value for value, keep in zip(op.operands, options.saved.operands, strict=True) if keep
        )
        recomputed_values.update(op.operands if op.name in runs_again else ())
    for first, value, source, targets in used_transfers(intra, assignment):
        meta = step.values[value]
        is_gathered = value in intra.gathered_again
        once = first in intra.per_step.ops
        for target in targets:
            resharding = Resharding(first, value, source, target)
            more = 0
            if is_gathered and not once and is_gather(source, target):
                more = (value in saved) + (value in recomputed_values)
            for reshard in reshard_steps(source, target, mesh.shape):
                for kind, phase in reshard.collectives(meta.requires_grad):
                    num_bytes = round(reshard.share * meta.num_bytes)
                    if is_gathered and phase == "backward":
                        num_bytes = _gradient_bytes(intra, kind, num_bytes, meta)
                    at = _phase(phase, once)
                    message = Message(kind, reshard.axis, at, num_bytes, is_gathered)
                    if not message.communicates(intra):
                        continue
                    yield resharding, message
                    if phase == "forward":
                        for _ in range(more):
                            again = Message(kind, reshard.axis, "backward", num_bytes, is_gathered)
                            yield resharding, again


def _phase(phase: str, once: bool) -> str:
    """Return when a collective of an op runs.

    Args:
        phase: of the op's collective.
        once: whether the op runs once per step.
    """
    runs_per_step = once and phase == "forward"
    return "step" if runs_per_step else phase


def op_messages(intra: IntraOp, assignment: Sequence[int]) -> Iterator[tuple[int, Message]]:
    """Yield the collectives inside ops, with the index of the op."""
    for i, options in enumerate(intra.ops):
        once = i in intra.per_step.ops
        for axis, strategy in enumerate(options.strategies[assignment[len(intra.parameters) + i]]):
            for c in strategy.collectives:
                message = Message(c.kind, axis, _phase(c.phase, once), c.num_bytes)
                if message.communicates(intra):
                    yield i, message


def parameter_messages(intra: IntraOp, assignment: Sequence[int]) -> Iterator[tuple[int, Message]]:
    """Yield the once-per-step collectives of parameters, with the index of the parameter."""
    step = intra.step
    for i, parameter in enumerate(step.parameters):
        if not parameter.meta.requires_grad:
            continue
        plan = intra.parameters[i].plans[assignment[i]]
        read = step.dtypes_read[parameter.name]
        of_step = step_collectives_of(plan, parameter.meta, read, intra.mesh.shape)
        for kind, axis, num_bytes in of_step:
            moved = _gradient_bytes(intra, kind, num_bytes, parameter.meta)
            message = Message(kind, axis, "step", moved, True)
            if message.communicates(intra):
                yield i, message


def _gradient_bytes(intra: IntraOp, kind: str, num_bytes: int, meta: TensorMeta) -> int:
    """Return the bytes of a parameter's collective that has `num_bytes` in the parameter's dtype:
    those of its gradient if that is reduced.
    """
    itemsize = intra.tables.optimizer.gradient_itemsize
    if itemsize is None or kind not in REDUCTIONS:
        return num_bytes
    return num_bytes * itemsize // meta.dtype.itemsize


def busy_seconds(intra: IntraOp, assignment: Sequence[int]) -> tuple[float, float]:
    """Return the seconds of (the ops' computation, the optimizer), if a step runs each op once."""
    of_ops = assignment[len(intra.parameters) :]
    compute = sum(float(o.compute_seconds[k]) for o, k in zip(intra.ops, of_ops, strict=False))
    return compute, sum(
        float(o.update_seconds[k]) for o, k in zip(intra.parameters, assignment, strict=False)
    )


def working_bytes(intra: IntraOp, assignment: Sequence[int], begins: bool = False) -> float:
    """Return the temporary bytes on top of what is saved: the largest op with its gradients, twice
    the largest gathered parameter, and `fetched_bytes`.

    Args:
        begins: gradients are made, not added to earlier ones: parameters that only earlier ops read
            have none yet.
    """
    of_ops = assignment[len(intra.parameters) :]
    of_op = np.array([float(o.temporary_bytes[k]) for o, k in zip(intra.ops, of_ops, strict=False)])
    if begins:
        new_gradient_bytes = [
            [float(intra.parameters[p].gradient_bytes[assignment[p]]) for p in read]
            for read in read_last(intra)
        ]
        # Its own are among its gradients.
        of_op -= np.cumsum([sum(sizes) for sizes in new_gradient_bytes])
    largest_op = float(of_op.max(initial=0.0))
    gathered = (
        (intra.step.values[value], target) for _, value, _, target in _gathered(intra, assignment)
    )
    largest_gather = max(
        (local_bytes(meta, target, intra.mesh.shape) for meta, target in gathered), default=0
    )
    return largest_op + 2 * largest_gather + fetched_bytes(intra, assignment)


def parameter_bytes(intra: IntraOp, assignment: Sequence[int]) -> dict[str, float]:
    """Return the bytes of `weights`, `gradients` and `state` of all parameters on a device."""
    totals = {"weights": 0.0, "gradients": 0.0, "state": 0.0}
    for options, k in zip(intra.parameters, assignment, strict=False):
        weights = float(options.weight_bytes[k])
        state = float(options.state_bytes[k])
        totals["weights"] += weights
        totals["state"] += state
        totals["gradients"] += float(options.num_bytes[k]) - weights - state
    return totals


def read_last(intra: IntraOp) -> list[list[int]]:
    """Return, per op, the parameters that no later op reads: its backward makes the first of their
    gradients.

    A parameter that no op reads is in no list.
    """
    last_read: list[list[int]] = [[] for _ in intra.ops]
    for index, parameter in enumerate(intra.step.parameters):
        if readers := intra.step.consumers.get(parameter.value, ()):
            last_read[max(op for op, _ in readers)].append(index)
    return last_read


def _gathered(
    intra: IntraOp, assignment: Sequence[int]
) -> Iterator[tuple[int, int, DualLayout, DualLayout]]:
    """Yield, per parameter and layout into which it is gathered for use, (first op that reads it
    so, value, source layout, target layout).
    """
    for op, value, source, targets in used_transfers(intra, assignment):
        if value in intra.gathered_again:
            yield from (
                (op, value, source, target) for target in targets if is_gather(source, target)
            )


# --- How long before its use a parameter is gathered (ZeRO-3).
#
# A gather that is launched when its op is reached delays the op. One that is launched earlier
# overlaps with other ops, and its parameter is full for longer. As many bytes are in flight as hide
# all that can be hidden, and as memory allows.


class _Gathering(NamedTuple):
    """A gather of a parameter into one layout."""

    # Index of the stage's first op that reads it in this layout.
    op: int

    # Of the gathered parameter on one device.
    num_bytes: int

    seconds: float


def bytes_ahead(intra: IntraOp, assignment: Sequence[int], headroom: float) -> int:
    """Return `StagePlan.prefetched_bytes` of an assignment: the bytes of gathered parameters that
    are in flight or wait for their use.

    Tried are 0 and the largest gather's bytes times powers of two: the smallest that is within 0.5
    % of the fastest forward is returned.

    Args:
        assignment: option of every parameter, then of every op.
        headroom: bytes that a device has left, the most that is returned.
    """
    gatherings = sorted(_gatherings(intra, assignment), key=lambda gathering: gathering.op)
    of_ops = zip(intra.ops, assignment[len(intra.parameters) :], strict=False)
    before = np.cumsum([0.0, *(float(options.forward_seconds[k]) for options, k in of_ops)])

    sizes = [gathering.num_bytes for gathering in gatherings]
    largest = max(sizes, default=1)
    doubled = (largest << k for k in range((sum(sizes) // largest).bit_length()))
    tried = [0, *(size for size in doubled if size <= headroom)]
    seconds = [_forward_seconds(gatherings, before, num_bytes) for num_bytes in tried]
    # A gain of less than 0.5 % is not worth twice the memory.
    enough = 1.005 * min(seconds)
    return next(
        num_bytes for num_bytes, taken in zip(tried, seconds, strict=True) if taken <= enough
    )


def _forward_seconds(
    gatherings: Sequence[_Gathering], before: np.ndarray, prefetched_bytes: int
) -> float:
    """Return the seconds of a forward whose links execute one gather after the other.

    Args:
        gatherings: in the order of their ops.
        before: [ops + 1] seconds of the ops up to each.
        prefetched_bytes: bytes that may be launched before they are needed.
    """
    waited = 0.0
    # When the links are free.
    link = 0.0
    ends: list[float] = []
    sizes = [gathering.num_bytes for gathering in gatherings]
    for number, count in enumerate(launched_counts(sizes, prefetched_bytes)):
        now = before[gatherings[number].op] + waited
        while len(ends) < count:
            link = max(link, now) + gatherings[len(ends)].seconds
            ends.append(link)
        waited += max(0.0, ends[number] - now)
    return float(before[-1] + waited)


def _gatherings(intra: IntraOp, assignment: Sequence[int]) -> Iterator[_Gathering]:
    """Yield the gathers of parameters (ZeRO-3) in the forward of one micro-batch, in no order.

    Parameters that are gathered once per step are left out.
    """
    mesh = intra.mesh
    for op, value, source, target in _gathered(intra, assignment):
        if op in intra.per_step.ops:
            continue
        meta = intra.step.values[value]
        seconds = 0.0
        for step in reshard_steps(source, target, mesh.shape):
            num_bytes = step.share * meta.num_bytes
            for kind, _ in step.collectives(differentiable=False):
                seconds += mesh.axes[step.axis].seconds(kind, num_bytes)
        # Outputs read their values after the last op.
        first_use = min(op, len(intra.ops))
        yield _Gathering(first_use, local_bytes(meta, target, mesh.shape), seconds)
