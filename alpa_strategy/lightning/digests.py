"""Digests of tensors, compared between the ranks: what must be the same everywhere is known to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from alpa_strategy.comm.collectives import of_all_ranks, world_size
from alpa_strategy.errors import NotRowsError, RuntimeMismatchError
from alpa_strategy.ir.graph import BufferInput, StepGraph
from alpa_strategy.pipeline.step_programs import resolve
from alpa_strategy.runtime.parameters import ParameterStore

REPLICA = (
    'batch_scope="replica" runs the step on each rank\'s own batch, as DDP does; or let the loader yield a row for '
    "each sample, and the same value of what belongs to no sample on every rank"
)
GRADIENT = "the gradient of "
_WIDTH = 4096  # words of 8 bytes: bytes that change places within a row of so many change the digest
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def digest(tensor: Tensor) -> Tensor:
    """A number made of all bytes, `[]` of int64 on the tensor's device: one pass over memory, no GPU is waited for."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    rest = data.numel() % (8 * _WIDTH)
    if rest or data.storage_offset() % 8:
        padded = data.new_zeros((data.numel() - rest + (8 * _WIDTH if rest else 0),))
        padded[: data.numel()] = data
        data = padded
    places = torch.arange(1, 2 * _WIDTH, 2, device=data.device) * _ODD
    return (data.view(torch.int64).view(-1, _WIDTH).sum(0) * places).sum()  # modulo 2^64


def _differing(found: Tensor) -> tuple[int, list[int]] | None:
    """The first column that differs between the rows, one a rank, and the ranks that differ in it from most."""
    unequal = (found != found[0]).any(0)
    if not bool(unequal.any()):
        return None
    column = int(unequal.int().argmax())
    values = found[:, column].tolist()
    most = max(values, key=values.count)
    return column, [rank for rank, value in enumerate(values) if value != most]


class LeafAgreement:
    """Checks of every batch that its leaves that are no rows are the same on all ranks, as the step takes them to be.

    Args:
        step: says which leaves these are.
        batch: one of its batches, for the leaves' names.
    """

    def __init__(self, step: StepGraph, batch: Any) -> None:
        paths = [path for path, _ in pytree.tree_flatten_with_path(batch)[0]]
        used = set(step.consumers)
        self._leaves = [leaf.leaf for leaf in step.batch if leaf.batch_dim is None and leaf.value in used]
        self.names = [pytree.keystr(paths[leaf]) or "the batch" for leaf in self._leaves]
        self._under_way: tuple[Tensor, Any] | None = None

    def digests(self, batch: Any) -> Tensor:
        """`[leaves]` of this rank's batch."""
        leaves = pytree.tree_leaves(batch)
        return torch.stack([digest(leaves[index]) for index in self._leaves])

    def begin(self, batch: Any) -> None:
        """Ask the other ranks for theirs; nothing is waited for. Collective, where there are such leaves."""
        if not self._leaves or world_size() == 1:
            return
        own = self.digests(batch)
        found = own.new_empty(world_size(), len(own))
        self._under_way = found, dist.all_gather(list(found), own, async_op=True)

    def finish(self) -> None:
        """NotRowsError, on all ranks, where a leaf of the batch of `begin` differed."""
        if self._under_way is None:
            return
        (found, work), self._under_way = self._under_way, None
        with torch.cuda.stream(torch.cuda.Stream()) if found.is_cuda else nullcontext():  # not behind the forward
            work.wait()
            found = found.cpu()
        where = _differing(found)
        if where is not None:
            raise _not_rows(self.names[where[0]], f"ranks {where[1]} have another than most")

    def described(self, batch: Any) -> dict[str, tuple[str, int]]:
        """Each leaf's shape and digest by its name, for `check_leaves`."""
        leaves = pytree.tree_leaves(batch)
        found = [leaves[index] for index in self._leaves]
        return {name: (str(list(x.shape)), int(digest(x))) for name, x in zip(self.names, found, strict=True)}


def check_leaves(described: Sequence[dict[str, tuple[str, int]]]) -> None:
    """NotRowsError where `LeafAgreement.described` of the ranks, one batch of each, differ."""
    for name in described[0]:
        found = [each.get(name, ("another leaf", 0)) for each in described]
        if len(set(found)) > 1:
            shown = "; ".join(f"rank {rank}: {shape}" for rank, (shape, _) in enumerate(found))
            raise _not_rows(name, shown if len({shape for shape, _ in found}) > 1 else "in its values")


def _not_rows(name: str, how: str) -> NotRowsError:
    return NotRowsError(
        f"the batch's leaf {name} has no row per sample and differs between the ranks ({how}), while it is taken to be "
        "the same on all ranks, whose batches are one batch of the step",
        REPLICA,
    )


class CopyCheck:
    """Checks that state of which several ranks hold copies is the same in all of them: parameters, or parts of them,
    and buffers that the step reads. Collective, but for `due`.

    Args:
        tensors: gives every rank's state by name, in the same order on all; None where this rank has none of it.
        place: which part of it, by name; equal for copies.
        every: steps between two checks; the first steps are checked more often. 0: never.
        device: of the ranks' collectives.
    """

    def __init__(
        self, tensors: Callable[[], Mapping[str, Tensor | None]], place: Callable[[str], str], every: int, device: Any
    ) -> None:
        self._tensors, self._every, self._device = tensors, every, device
        self._under_way: tuple[str, Tensor, Any] | None = None
        self._first = torch.empty(0)
        if every and world_size() > 1:
            self.names = tuple(tensors())
            places = of_all_ranks([place(name) for name in self.names])
            first = [[column.index(text) for text in column] for column in zip(*places, strict=True)]
            self._first = torch.tensor(first, device=device).T  # [ranks, names]: the first rank with the same part

    def due(self, step: int) -> bool:
        """Whether step number `step` (from 1) is checked."""
        if self._first.numel() == 0:
            return False
        return step % self._every == 0 or (step < self._every and step & (step - 1) == 0)  # 1, 2, 4, 8, ...

    def begin(self, when: str) -> None:
        """Ask the other ranks for their digests; nothing is waited for."""
        self.finish()
        if self._first.numel() == 0:
            return
        nothing = torch.zeros((), dtype=torch.int64, device=self._device)
        own = torch.stack([nothing if x is None else digest(x).to(self._device) for x in self._tensors().values()])
        found = own.new_empty(world_size(), len(own))
        self._under_way = when, found, dist.all_gather(list(found), own, async_op=True)

    def now(self, when: str) -> None:
        """`begin` and `finish`."""
        self.begin(when)
        self.finish()

    def finish(self) -> None:
        """RuntimeMismatchError, on all ranks, that names what differed when `begin` was called."""
        if self._under_way is None:
            return
        (when, found, work), self._under_way = self._under_way, None
        work.wait()
        unequal = found != found.gather(0, self._first)
        if not bool(unequal.any()):
            return
        column = int(unequal.any(0).int().argmax())
        ranks, first = unequal[:, column].nonzero().flatten().tolist(), self._first[:, column].tolist()
        raise RuntimeMismatchError(
            f"copies of {self.names[column]} differ {when}: on ranks {ranks} from those on ranks "
            f"{sorted({first[rank] for rank in ranks})}; so do {int(unequal.any(0).sum())} of {len(self.names)} "
            "that are compared",
            "look for code that changes them on one rank only (a hook, a callback, random numbers of its own); else a "
            "device or link computes wrongly. check_replicas_every=0, check_gradients=False leave these checks out",
        )


def copies_of(
    store: ParameterStore, module: Any, buffers: Sequence[BufferInput], every: int, device: Any, of: str = ""
) -> CopyCheck:
    """The check of a training's parameters as they lie in `store`, and of `buffers`, which its step reads.

    Args:
        of: `GRADIENT`: of the parameters' complete gradients.
    """
    names = {store.name_of(p) or "": p for p in store.parameters}

    def tensors() -> dict[str, Tensor | None]:
        own = {n: p.grad if of else p for n, p in names.items()}
        held: dict[str, Tensor | None] = {of + n: own[n] if store.holds(p) else None for n, p in names.items()}
        return held | {buffer.name: resolve(module, buffer.name) for buffer in buffers}

    def place(name: str) -> str:
        name = name.removeprefix(of)
        if name not in names:
            return "whole"
        chunks = store.chunks(name, names[name].detach())
        return repr([(start, tuple(part.shape)) for start, part in chunks]) if chunks else f"none {dist.get_rank()}"

    return CopyCheck(tensors, place, every, device)
