"""What must be the same on several ranks is known to be, by digests of tensors; and gradients to be
finite.

`GradientCheck` looks at the gradients that a rank's backward makes, before sums over ranks spread
what is not finite. What is not the training's own can then be told: it begins on one rank, or in a
sum of finite parts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.comm.collectives import all_gather_object, any_rank, world_size
from alpa_strategy.errors import RuntimeMismatchError
from alpa_strategy.ir.graph import BufferInput
from alpa_strategy.runtime.parameters import ParameterStore

if TYPE_CHECKING:
    from alpa_strategy.lightning.step_writes import StepWrites

GRADIENT = "the gradient of "
# Number of 8-byte words in a row. Bytes that are swapped within a row change the digest.
_WIDTH = 4096
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def digest(tensor: Tensor) -> Tensor:
    """Return a checksum of all bytes, `[]` of int64 on the tensor's device.

    It takes one pass over memory, and does not wait for a GPU.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    rest = data.numel() % (8 * _WIDTH)
    if rest or data.storage_offset() % 8:
        padding = 8 * _WIDTH if rest else 0
        padded = data.new_zeros((data.numel() - rest + padding,))
        padded[: data.numel()] = data
        data = padded

    weights = torch.arange(1, 2 * _WIDTH, 2, device=data.device) * _ODD
    # Sums are modulo 2^64.
    return (data.view(torch.int64).view(-1, _WIDTH).sum(0) * weights).sum()


def chained(before: Tensor, after: Tensor) -> Tensor:
    """Return a digest of two digests `[]`, one after the other."""
    return before * _ODD + after


class SameBatchCheck:
    """Checks that all ranks have the same batch, if they are to load the same one.

    Args:
        group: the ranks; None: all.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._names: list[str] = []
        self._in_flight: tuple[Tensor, Any] | None = None

    def begin(self, batch: Any) -> None:
        """Launch the exchange of checksums. Collective if the batch has tensors."""
        num_ranks = world_size(self._group)
        if num_ranks == 1:
            return
        self._names = []
        checksums = []
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, Tensor):
                self._names.append(pytree.keystr(path) or "the batch")
                checksums.append(digest(leaf))
        if not checksums:
            return

        local = torch.stack(checksums)  # [leaves]
        of_ranks = local.new_empty(num_ranks, len(local))  # [ranks, leaves]
        work = dist.all_gather(list(of_ranks), local, self._group, async_op=True)
        self._in_flight = of_ranks, work

    def finish(self) -> None:
        """Wait for the exchange of `begin`, and compare.

        Raises:
            RuntimeMismatchError: on all ranks: a tensor of the batch differs.
        """
        if self._in_flight is None:
            return
        of_ranks, work = self._in_flight
        self._in_flight = None
        # On a stream of its own, the copy does not wait for the forward.
        stream = torch.cuda.Stream() if of_ranks.is_cuda else None
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            work.wait()
            of_ranks = of_ranks.cpu()
        unequal = (of_ranks != of_ranks[0]).any(0)
        if not bool(unequal.any()):
            return

        first = int(unequal.int().argmax())
        values = of_ranks[:, first].tolist()
        most = max(values, key=values.count)
        ranks = [rank for rank, value in enumerate(values) if value != most]
        raise RuntimeMismatchError(
            f"the batch's leaf {self._names[first]} differs between the ranks of a replica, or of"
            f' batch_scope="global" (ranks {ranks} have another than most), which are to load the'
            " same rows",
            "call lightning.seed_everything(..., workers=True), and let your own samplers give them"
            ' the same; or leave out batch_scope="global"',
        )


class ReplicaChecksum:
    """Checks that state of which several ranks hold copies is the same in all of them: a training's
    parameters, or parts of them, as they lie in `store`, and buffers that its step reads.
    Collective, but for `due`.

    Args:
        every: steps between two checks; the first steps are checked more often. 0: never.
        device: of the ranks' collectives.
        of: `GRADIENT`: of the parameters' complete gradients.
        writes: what the steps' own code writes to parameters. Copies that differ by that are no
            error.
        differing: names of parameters whose copies differ by such writes already.
    """

    def __init__(
        self,
        store: ParameterStore,
        module: Any,
        buffers: Sequence[BufferInput],
        every: int,
        device: Any,
        of: str = "",
        writes: "StepWrites | None" = None,
        differing: Iterable[str] = (),
    ) -> None:
        self._store = store
        self._module = module
        self._every = every
        self._device = device
        self._of = of
        self._writes = writes
        self._buffers = tuple(buffer.name for buffer in buffers)
        self._first = torch.empty(0)
        # Of what is compared; nothing on one device.
        self.names: tuple[str, ...] = ()
        # Names of parameters whose copies differ by what steps write to them.
        self.differing = set(differing)
        if every and world_size() > 1:
            self.names = (*(of + store.name_of(p) for p in store.parameters), *self._buffers)
            places = all_gather_object(
                [*map(self._place, store.parameters), *("whole" for _ in buffers)]
            )
            first = [
                [column.index(text) for text in column] for column in zip(*places, strict=True)
            ]
            # [ranks, names]: the first rank with the same part.
            self._first = torch.tensor(first, device=device).T
            self._check_written(self.differing)

    def due(self, step: int) -> bool:
        """Whether step number `step` (from 1) is checked."""
        if not self.names:
            return False
        if step % self._every == 0:
            return True
        # Steps 1, 2, 4, 8, ... before the first regular check.
        return step < self._every and step & (step - 1) == 0

    def compare(self, when: str) -> None:
        """Check that all copies of a tensor have the same content on all ranks. Collective.

        Warns of copies that differ by what steps have written to them, once for each.

        Args:
            when: the moment, for the error.

        Raises:
            RuntimeMismatchError: they differ, or steps have written different values to a tensor
                of which there are no copies; on all ranks.
        """
        if self._first.numel() == 0:
            return
        tensors = [*self._tensors(), *self._written()]
        nothing = torch.zeros((), dtype=torch.int64, device=self._device)
        digests = []
        for x in tensors:
            digests.append(nothing if x is None else digest(x).to(self._device))
        local_digests = torch.stack(digests)
        all_digests = local_digests.new_empty(world_size(), len(local_digests))
        dist.all_gather(list(all_digests), local_digests)

        num_names = len(self.names)
        unequal = all_digests[:, :num_names]
        unequal = unequal != unequal.gather(0, self._first)
        # Of each parameter: what a rank's steps have written to it, against rank 0's.
        unlike = (all_digests[:, num_names:] != all_digests[:1, num_names:]).any(0)
        if not bool(unequal.any()) and not bool(unlike.any()):
            return

        written = {self.names[index] for index in unlike.nonzero().flatten().tolist()}
        self._check_written(written)
        columns = unequal.any(0).nonzero().flatten().tolist()
        by_steps = []
        for column in columns:
            if self.names[column] in written or self.names[column] in self.differing:
                by_steps.append(column)
        others = [column for column in columns if column not in by_steps]
        if others:
            raise self._error(others, unequal, when)
        new = [self.names[column] for column in by_steps]
        self._warn_of([name for name in new if name not in self.differing], when)
        self.differing.update(new)

    def _error(self, columns: Sequence[int], unequal: Tensor, when: str) -> RuntimeMismatchError:
        """Return the error for copies that differ.

        Args:
            columns: of the tensors that differ, in `names`.
            unequal: bool [ranks, names].
            when: the moment.
        """
        column, others = columns[0], ", ".join(self.names[index] for index in columns[1:10])
        ranks = unequal[:, column].nonzero().flatten().tolist()
        first = self._first[:, column].tolist()
        return RuntimeMismatchError(
            f"copies of {self.names[column]} differ {when}: on ranks {ranks} from those on ranks "
            f"{sorted({first[rank] for rank in ranks})}; {len(columns)} of {len(self.names)} that"
            " are compared do"
            f"{': also ' * bool(others)}{others}",
            "look for code that changes them on one rank only (a hook, a callback, random numbers"
            " of its own); else a "
            "device or link computes wrongly. check_replicas_every=0, check_gradients=False leave"
            " these checks out",
        )

    def _warn_of(self, names: Sequence[str], when: str) -> None:
        """Warn, on rank 0, of parameters whose copies differ by what steps write to them.

        Args:
            names: of the parameters; none: no warning.
            when: they were compared, for the message.
        """
        if not names:
            return
        lines = self._lines()
        texts = [f"{name}{lines.get(name, '')}" for name in names[:10]]
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        rank_zero_warn(
            f"alpa: {when} the ranks' copies of {', '.join(texts)}{more} differ: the step's own"
            " code writes values of each rank's batch to them. Training goes on with different"
            " weights on the ranks, as under DDP; checkpoints have rank 0's. To keep them equal,"
            " write `self.trainer.strategy.broadcast(value)`, which is rank 0's value"
        )

    def _check_written(self, names: Iterable[str]) -> None:
        """Check that each parameter to which ranks have written different values has a copy on
        every rank, which that rank steps.

        Raises:
            RuntimeMismatchError: one has not.
        """
        store = self._store
        for parameter in store.parameters:
            name = store.name_of(parameter)
            if name not in names:
                continue
            if parameter in store.sharded_parameters:
                reason = "this plan stores one value of it, in shards"
                fix = 'let each rank have its own weights (parallel="data")'
            elif store.is_stepped_in_full(parameter):
                reason = "its optimizer needs full tensors, so one rank steps it for all"
                fix = "use an optimizer that steps single elements, such as AdamW"
            else:
                continue
            raise RuntimeMismatchError(
                f"the step's own code writes different values to {name} on the ranks"
                f"{self._lines().get(name, '')}. Under DDP the ranks' weights would differ from"
                f" then on, but {reason}",
                "write the same value on all ranks: self.trainer.strategy.broadcast(value) is rank"
                f" 0's; or {fix}",
            )

    def _lines(self) -> dict[str, str]:
        """Return where steps write to parameters, as texts by name, for messages: the first rank's
        that knows one. Collective.
        """
        local_lines = {}
        lines = {} if self._writes is None else self._writes.lines
        for parameter, line in lines.items():
            if line:
                local_lines[self._store.name_of(parameter)] = f" ({line})"
        result: dict[str, str] = {}
        for of_rank in reversed(all_gather_object(local_lines)):
            result.update(of_rank)
        return result

    def _tensors(self) -> Iterator[Tensor | None]:
        """Yield this rank's tensor for each of `names`: a parameter or its gradient, or a buffer;
        None if the rank has none of it.
        """
        for parameter in self._store.parameters:
            tensor = parameter.grad if self._of else parameter
            yield tensor if self._store.holds(parameter) else None
        yield from (attrgetter(name)(self._module) for name in self._buffers)

    def _written(self) -> Iterator[Tensor | None]:
        """Yield, per parameter, a digest of the values that steps have written to it; None if they
        have written none.
        """
        if self._writes is not None:
            yield from map(self._writes.digest_of, self._store.parameters)

    def _place(self, parameter: nn.Parameter) -> str:
        """Return a text of the shards of a parameter that this rank has; equal for copies."""
        chunks = self._store.chunks(parameter, parameter.detach())
        return (
            repr([(start, tuple(part.shape)) for start, part in chunks])
            if chunks
            else f"none {dist.get_rank()}"
        )


# Gradients of a step: whether they are finite, and where not first


# Loss is bad, first bad own gradient, first bad sum, batch is bad.
Seen = tuple[bool, str | None, str | None, bool]


class GradientCheck:
    """Looks at each step of the optimizer, when its gradients are complete; `divided` as for
    `report`.
    """

    # Compares gradients of what several ranks hold.
    copies: ReplicaChecksum

    def __init__(self, divided: bool) -> None:
        self._divided = divided
        # Batch and losses of the current step.
        self.batch: Any = None
        self.losses: list[Tensor] = []
        # In the backward's order, each micro-batch's.
        self._own: list[tuple[str, Tensor]] = []
        self._was_finite = True

    def look(self, name: str, used: Tensor) -> None:
        """Record whether the gradient of parameter `name` is finite. A hook of the backward, which
        waits for nothing.

        Args:
            used: whose `grad` is this rank's local gradient.
        """
        assert used.grad is not None
        self._own.append((name, _is_bad(used.grad)))

    def finish(self, gradients: Mapping[str, Tensor | None], step: int) -> None:
        """Report losses and gradients that are not finite, at the first of such steps; else
        compare. Collective.

        What was recorded of the step is dropped.

        Args:
            gradients: reduced, by the parameters' names.

        Raises:
            RuntimeMismatchError: on all ranks: gradients of which they should hold copies differ.
        """
        summed = [(name, _is_bad(grad)) for name, grad in gradients.items() if grad is not None]
        flags = [
            list(map(_is_bad, self.losses)),
            [flag for _, flag in self._own],
            [flag for _, flag in summed],
        ]
        # Some gradients may lie in host memory.
        bad = []
        for group in flags:
            on_device = [flag.to(group[0].device) for flag in group]
            bad.append(bool(on_device) and bool(torch.stack(on_device).any()))
        if any(any_rank(bad)):
            leaves = [x for x in pytree.tree_leaves(self.batch) if isinstance(x, Tensor)]
            bad_batch = any(bool(_is_bad(x)) for x in leaves)
            seen_by_rank = all_gather_object((bad[0], _first(self._own), _first(summed), bad_batch))
            if self._was_finite:
                rank_zero_warn(f"alpa: step {step}: {report(seen_by_rank, self._divided)}")
            self._was_finite = False
        else:
            self._was_finite = True
            self.copies.compare(f"at step {step}")
        self.losses.clear()
        self._own.clear()
        self.batch = None


def report(seen_by_rank: Sequence[Seen], divided: bool) -> str:
    """Return sentences for the user on a step in which something is not finite: which ranks' loss,
    gradients or batch, and the likely cause.

    Args:
        seen_by_rank: (whether the loss is not finite, the first parameter whose local gradient is
            not, the first whose summed gradient is not, whether the batch is not) of each rank.
        divided: one step of all ranks, which exchange values within it: one rank's fault may come
            to all of them.
    """
    ranks = range(len(seen_by_rank))
    losses = [rank for rank in ranks if seen_by_rank[rank][0]]
    bad_ranks = [rank for rank in ranks if seen_by_rank[rank][1]]
    batches = [rank for rank in ranks if seen_by_rank[rank][3]]
    where = "; ".join(f"rank {r}: first that of {seen_by_rank[r][1]}" for r in bad_ranks[:4])
    lost = f"the loss is not finite on ranks {losses}; " if losses else ""
    rows = f" The batch of ranks {batches} holds values that are not finite." if batches else ""
    if len(bad_ranks) == len(seen_by_rank):
        cause = (
            f"every rank's gradients are not finite ({where}): the training's own, as it would be"
            " on one device"
        )
        cause += (
            ', or came with a value that the plan has the ranks exchange (capture="never" tells)'
            if divided
            else ""
        )
    elif bad_ranks:
        cause = (
            f"gradients of ranks {bad_ranks} alone are not finite before they are summed ({where}):"
            " these ranks' rows, or a device. Their rows in another rank's place tell: it is the"
            " rows where it moves with them"
        )
    elif losses:
        cause = "all gradients of the ranks' own are finite"
    else:
        name = next(seen[2] for seen in seen_by_rank if seen[2] is not None)
        cause = (
            f"every rank's own gradients are finite, that of {name} is not once they are summed:"
            " the sum overflows, or "
            "a link or device computes wrongly"
        )
    return lost + cause + "." + rows


def _is_bad(x: Tensor) -> Tensor:
    """Whether a value is not finite, `[]` of bool on its device."""
    return ~torch.isfinite(x).all()


def _first(seen: Sequence[tuple[str, Tensor]]) -> str | None:
    """Return the first name whose flag is set."""
    return next((name for name, flag in seen if flag), None)
