"""Carries out cross-mesh transfers: a bundle of tensors from one mesh to another, one message per
pair of ranks.

What is sent where was decided in `sharding/cross_mesh.py`. Receives are posted early and waited for
when they are needed; sends never hold up the sender (`Outbox`). Tags keep bundles, directions and
micro-batches apart on gloo; NCCL ignores tags, so there every channel and direction has a group of
its own (`mesh.message_groups`).
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

from alpa_strategy.comm.collectives import Background
from alpa_strategy.comm.mesh import MeshComm, as_bytes
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.errors import LostRankError
from alpa_strategy.ir.placement import INVARIANT, DualLayout, Layout, shard
from alpa_strategy.sharding.cross_mesh import Box, Piece, TransferPlan

ALIGNMENT = 16  # bytes: tensors of any dtype may begin there
HELD_BYTES = 8 * 2**20


@dataclass(frozen=True)
class _Slot:
    """Where piece `piece` of tensor `value` lies in a message."""

    value: int
    piece: Piece
    offset: int
    num_bytes: int


class Outbox:
    """Sends under way: keeps their buffers until they have left, without holding up the sender.

    gloo tells only who waits that a send is done: a thread does, once buffers add up. Other
    backends are asked.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[dist.P2POp, Any]] = deque()  # with the handle of each
        self._held_bytes = 0
        self._background = Background("alpa-outbox")

    def send(self, ops: Sequence[dist.P2POp]) -> None:
        """Start all sends."""
        for op in ops:
            self._held.append((op, _begin(op)))
            self._held_bytes += op.tensor.numel()
            if dist.get_backend(op.group) != "gloo":
                while self._held and self._held[0][1].is_completed():
                    self._held_bytes -= self._held.popleft()[0].tensor.numel()
            elif self._held_bytes > HELD_BYTES:
                held, self._held, self._held_bytes = self._held, deque(), 0
                self._background.run(partial(_wait_for, held))

    def drain(self) -> None:
        """Wait until everything has left. LostRankError when a receiver is gone."""
        _wait_for(self._held)
        self._held_bytes = 0
        self._background.wait()


def _wait_for(held: deque[tuple[dist.P2POp, Any]]) -> None:
    """Each buffer goes when it has left."""
    while held:
        op, work = held.popleft()
        _named(op, work.wait)


class Transfer:
    """One bundle of tensors from one mesh to another, as often as wanted.

    Args:
        plans: one per tensor; all between the same two meshes.
        rank: this process's, as the plans count.
        mesh: the target's mesh where `rank` is on it and a plan gathers, else None.
        group: process group of the messages.
        ranks: the job's number of each of the plans' ranks; None: the same.
    """

    def __init__(
        self,
        plans: Sequence[TransferPlan],
        rank: int,
        device: torch.device,
        mesh: MeshComm | None = None,
        group: Any = None,
        ranks: Sequence[int] | None = None,
    ) -> None:

        def receiver_of(piece: Piece) -> int | None:
            return piece.target if piece.source == rank else None

        def sender_of(piece: Piece) -> int | None:
            return piece.source if piece.target == rank else None

        self._plans = tuple(plans)
        self._numbers = ranks
        self._rank = rank
        self._device = device
        self._group = group
        self._outgoing = self._slots(receiver_of)
        self._incoming = self._slots(sender_of)
        self._kept = [
            (value, piece)
            for value, plan in enumerate(plans)
            for piece in plan.pieces
            if piece.source == piece.target == rank
        ]
        self._kept_parts: dict[
            int, deque[list[Tensor]]
        ] = {}  # tag -> parts that stay on this device
        self._is_target = bool(plans) and rank in plans[0].received_boxes
        self._gathers = [
            Reshard(_dual(plan.received), _dual(plan.target.layout), plan.shape, mesh)
            if plan.gathers and mesh is not None and self._is_target
            else None
            for plan in plans
        ]

    def _slots(self, peer_of: Callable[[Piece], int | None]) -> dict[int, list[_Slot]]:
        """The job's number of a peer -> the slots of its message; both ends make the same list from
        the same plans.
        """
        messages: dict[int, list[_Slot]] = {}
        ends: dict[int, int] = {}
        for value, plan in enumerate(self._plans):
            for piece in plan.pieces:
                peer = peer_of(piece)
                if peer is None or peer == self._rank:
                    continue
                offset, size = ends.get(peer, 0), piece.num_elements * plan.dtype.itemsize  # bytes
                messages.setdefault(peer, []).append(_Slot(value, piece, offset, size))
                ends[peer] = offset + -(-size // ALIGNMENT) * ALIGNMENT
        ranks = self._numbers or range(max(messages, default=0) + 1)
        return {ranks[peer]: slots for peer, slots in sorted(messages.items())}

    def send_ops(self, tensors: Sequence[Tensor | None], tag: int) -> list[dist.P2POp]:
        """Messages with this rank's parts of `tensors` (local tensors; None stands for zeros).

        Parts that stay on this device are kept until `receive` with the same tag asks for them.
        """
        if not self._outgoing and not self._kept:
            return []
        local = []
        for plan, tensor in zip(self._plans, tensors, strict=True):
            if tensor is None:
                shape = [stop - start for start, stop in plan.source_boxes[self._rank]]
                tensor = torch.zeros(shape, dtype=plan.dtype, device=self._device)
            local.append(tensor.detach())
        if self._kept:
            parts = [self._part(local[value], value, piece) for value, piece in self._kept]
            self._kept_parts.setdefault(tag, deque()).append(parts)
        ops = []
        for peer, slots in self._outgoing.items():
            parts = [self._part(local[slot.value], slot.value, slot.piece) for slot in slots]
            ops.append(dist.P2POp(dist.isend, _pack(slots, parts), peer, self._group, tag))
        return ops

    def receive(self, tag: int, start: bool = True) -> "Receipt":
        """Post the receives of this rank's parts of one bundle; with `start=False` the caller
        starts `receipt.ops`.
        """
        ops = []
        for peer, slots in self._incoming.items():
            buffer = torch.empty(
                slots[-1].offset + slots[-1].num_bytes, dtype=torch.uint8, device=self._device
            )
            ops.append(dist.P2POp(dist.irecv, buffer, peer, self._group, tag))
        receipt = Receipt(self, ops, tag)
        if start:
            receipt.works = [_begin(op) for op in ops]
        return receipt

    def forget(self) -> None:
        """Drop parts that were kept for a receive that never came (a step that was broken off)."""
        self._kept_parts.clear()

    def assemble(self, buffers: Sequence[Tensor], tag: int) -> list[Tensor]:
        """This rank's local tensors in the target's layouts from its messages."""
        if not self._is_target:
            return []
        found: list[list[tuple[Piece, Tensor]]] = [[] for _ in self._plans]
        if self._kept:
            parts = self._kept_parts[tag].popleft()
            for (value, piece), part in zip(self._kept, parts, strict=True):
                found[value].append((piece, part))
        for buffer, slots in zip(buffers, self._incoming.values(), strict=True):
            for slot in slots:
                raw = buffer[slot.offset : slot.offset + slot.num_bytes]
                shape = [stop - start for start, stop in slot.piece.box]
                found[slot.value].append(
                    (slot.piece, raw.view(self._plans[slot.value].dtype).view(shape))
                )
        results = []
        for value, plan in enumerate(self._plans):
            tensor = self._join(found[value], plan.received_boxes[self._rank], plan.dtype)
            gather = self._gathers[value]
            results.append(tensor if gather is None else gather.values(tensor))
        return results

    def _join(self, parts: list[tuple[Piece, Tensor]], box: Box, dtype: torch.dtype) -> Tensor:
        if len(parts) == 1 and parts[0][0].box == box:
            return parts[0][1]
        result = torch.empty(
            [stop - start for start, stop in box], dtype=dtype, device=self._device
        )
        for piece, part in parts:
            result[_within(piece.box, box)].copy_(part)
        return result

    def _part(self, tensor: Tensor, value: int, piece: Piece) -> Tensor:
        own = self._plans[value].source_boxes[self._rank]
        return tensor if piece.box == own else tensor[_within(piece.box, own)]


class Receipt:
    """A bundle that is on its way to this rank."""

    def __init__(self, transfer: Transfer, ops: list[dist.P2POp], tag: int) -> None:
        self._transfer, self.ops, self._tag = transfer, ops, tag
        self.works: list[Any] = []

    def wait(self) -> list[Tensor]:
        """The local tensors, in the bundle's order. Collective on the target's mesh where a plan
        gathers.
        """
        for op, work in zip(
            self.ops, self.works, strict=False
        ):  # none: whoever has started them has waited for them
            _named(op, work.wait)
        return self._transfer.assemble([op.tensor for op in self.ops], self._tag)


def exchange(
    transfers: Sequence[tuple[Transfer, Sequence[Tensor | None]]], tag: int
) -> list[list[Tensor]]:
    """Carry out several transfers at once; every rank of the job calls with the same list. Tags
    from `tag` on.

    Returns, per transfer, this rank's local tensors ([] where it is not on the target's mesh).
    """
    # All receives and sends start before the first is waited for: any order among the ranks would
    # do.
    receipts = [transfer.receive(tag + i, start=False) for i, (transfer, _) in enumerate(transfers)]
    sends = [
        op
        for i, (transfer, tensors) in enumerate(transfers)
        for op in transfer.send_ops(tensors, tag + i)
    ]
    ops = [*(op for receipt in receipts for op in receipt.ops), *sends]
    if ops and dist.get_backend(ops[0].group) == "gloo":
        for op, work in [(op, _begin(op)) for op in ops]:
            _named(op, work.wait)
    elif ops:
        for work in dist.batch_isend_irecv(
            ops
        ):  # one NCCL group: alone, a send could wait for its receive for ever
            work.wait()
    return [receipt.wait() for receipt in receipts]


def _pack(slots: list[_Slot], parts: list[Tensor]) -> Tensor:
    """One flat buffer of bytes; a single part is sent from where it lies."""
    flat = [as_bytes(part.contiguous()) for part in parts]
    if len(flat) == 1:
        return flat[0]
    buffer = flat[0].new_empty(slots[-1].offset + slots[-1].num_bytes)
    for slot, part in zip(slots, flat, strict=True):
        buffer[slot.offset : slot.offset + slot.num_bytes].copy_(part)
    return buffer


def _within(box: Box, whole: Box) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, whole, strict=True))


def _dual(layout: Layout) -> DualLayout:
    placements = []
    for placement in layout:
        if isinstance(placement, Shard):
            placements.append(shard(placement.dim))
        else:
            placements.append(INVARIANT)
    return tuple(placements)


def _begin(op: dist.P2POp) -> Any:
    if op.tensor.device.type != "cpu" and dist.get_backend(op.group) == "gloo":
        return _named(op, lambda: StagedThroughHost(op))
    return _named(op, lambda: op.op(op.tensor, op.peer, op.group, op.tag))


class StagedThroughHost:
    """A message of an accelerator's tensor over gloo, whose sends and receives know the host's
    memory alone.
    """

    def __init__(self, op: dist.P2POp) -> None:
        self._op = op
        self._host = (
            op.tensor.cpu() if op.op is dist.isend else torch.empty_like(op.tensor, device="cpu")
        )
        self._work = op.op(self._host, op.peer, op.group, op.tag)

    def wait(self) -> None:
        """The message has left, or is in the op's tensor."""
        self._work.wait()
        if self._op.op is dist.irecv:
            self._op.tensor.copy_(self._host)


def _named(op: dist.P2POp, call: Callable[[], Any]) -> Any:
    """`call()`; a failure of the connection becomes an error that names the other rank."""
    try:
        return call()
    except RuntimeError as error:
        text, peer = str(error), op.peer
        what = "a message to" if op.op is dist.isend else "a message from"
        if "imed out" in text or "imeout" in text:
            problem = f"{what} rank {peer} did not get through in time: rank {peer} hangs, or waits for one that does"
        else:
            problem = f"rank {peer} is gone: {what} it failed"
        raise LostRankError(
            f"rank {dist.get_rank()}: {problem} ({first_sentence(text)})",
            f"look at the output of rank {peer} first",
        ) from error


def first_sentence(text: str) -> str:
    """What a backend says happened, without its source file and advice."""
    line = text.splitlines()[0] if text else "no reason given"
    return re.sub(r"^\[/[^\]]*\] ", "", line).partition(". This is typically")[0]
