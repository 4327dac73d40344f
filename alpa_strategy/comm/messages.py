"""Executes cross-mesh transfers: a bundle of tensors from one mesh to another, one message per pair
of ranks.

`sharding/cross_mesh.py` plans the messages. Receives are posted early and waited for when they are
needed; sends never block the sender (`Outbox`). On gloo, tags keep bundles, directions and
micro-batches apart. NCCL ignores tags, so there every channel and direction has a process group
(`mesh.message_groups`).
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

# Bytes: tensors of any dtype may start at multiples of it.
ALIGNMENT = 16
# Bytes of gloo's sends in flight, beyond which a thread waits for them.
HELD_BYTES = 8 * 2**20


@dataclass(frozen=True)
class _Slot:
    """The position of a piece of tensor `value` in a message, in bytes."""

    value: int
    piece: Piece
    offset: int
    num_bytes: int


class Outbox:
    """Sends in flight: stores their buffers until they have been sent, without blocking the sender.

    gloo reports only to a thread that waits that a send is done: once buffers add up, a background
    thread waits. Other backends are polled.
    """

    def __init__(self) -> None:
        # sends with their handles
        self._held: deque[tuple[dist.P2POp, Any]] = deque()
        self._held_bytes = 0
        self._background = Background("alpa-outbox")

    def send(self, ops: Sequence[dist.P2POp]) -> None:
        """Launch sends, and keep their tensors until they are sent. With gloo, a background thread
        waits for them when they hold more than `HELD_BYTES`. LostRankError if one cannot be
        launched.
        """
        for op in ops:
            self._held.append((op, _launch(op)))
            self._held_bytes += op.tensor.numel()
            if dist.get_backend(op.group) != "gloo":
                self._drop_completed()
            elif self._held_bytes > HELD_BYTES:
                self._background.run(partial(_wait_for, self._held))
                self._held = deque()
                self._held_bytes = 0

    def _drop_completed(self) -> None:
        """Release the oldest messages, up to the first whose send is not complete."""
        while self._held:
            op, work = self._held[0]
            if not work.is_completed():
                return
            self._held.popleft()
            self._held_bytes -= op.tensor.numel()

    def drain(self) -> None:
        """Wait until everything has been sent.

        Raises:
            LostRankError: a receiver is gone.
        """
        _wait_for(self._held)
        self._held_bytes = 0
        self._background.wait()


def _wait_for(held: deque[tuple[dist.P2POp, Any]]) -> None:
    """Wait for the sends in order; each buffer is freed when it has been sent. LostRankError if a
    receiver is gone.
    """
    while held:
        op, work = held.popleft()
        _named(op, work.wait)


class Transfer:
    """One bundle of tensors from one mesh to another, any number of times.

    Args:
        plans: one per tensor; all between the same two meshes.
        rank: this process's rank in the plans.
        mesh: the target's mesh if `rank` is on it and a plan gathers, else None.
        group: process group of the messages.
        ranks: the job's rank of each of the plans' ranks; None: the same.
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
        # pieces that stay on this device
        self._local: list[tuple[int, Piece]] = []
        for value, plan in enumerate(plans):
            for piece in plan.pieces:
                if piece.source == piece.target == rank:
                    self._local.append((value, piece))
        # tag -> tensors of these pieces, of each bundle that is not received yet
        self._local_tensors: dict[int, deque[list[Tensor]]] = {}
        self._is_target = bool(plans) and rank in plans[0].received_boxes
        self._gathers: list[Reshard | None] = []
        for plan in plans:
            gather = None
            if plan.gathers and mesh is not None and self._is_target:
                gather = Reshard(_dual(plan.received), _dual(plan.target.layout), plan.shape, mesh)
            self._gathers.append(gather)

    def _slots(self, peer_of: Callable[[Piece], int | None]) -> dict[int, list[_Slot]]:
        """Return the job's rank of a peer -> the slots of its message.

        `peer_of` gives the peer of a piece; None: it is in no message.

        Both ends make the same list from the same plans.
        """
        messages: dict[int, list[_Slot]] = {}
        ends: dict[int, int] = {}
        for value, plan in enumerate(self._plans):
            for piece in plan.pieces:
                peer = peer_of(piece)
                if peer is None or peer == self._rank:
                    continue
                offset = ends.get(peer, 0)
                num_bytes = piece.num_elements * plan.dtype.itemsize
                messages.setdefault(peer, []).append(_Slot(value, piece, offset, num_bytes))
                aligned_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
                ends[peer] = offset + aligned_bytes
        ranks = self._numbers or range(max(messages, default=0) + 1)
        return {ranks[peer]: slots for peer, slots in sorted(messages.items())}

    def send_ops(self, tensors: Sequence[Tensor | None], tag: int) -> list[dist.P2POp]:
        """Return the messages with this rank's pieces of `tensors`, which the caller launches.

        Pieces that stay on this device are stored until `assemble` with the same tag.

        Args:
            tensors: local tensors; None stands for zeros.
        """
        if not self._outgoing and not self._local:
            return []
        local = []
        for plan, tensor in zip(self._plans, tensors, strict=True):
            if tensor is None:
                shape = [stop - start for start, stop in plan.source_boxes[self._rank]]
                tensor = torch.zeros(shape, dtype=plan.dtype, device=self._device)
            local.append(tensor.detach())
        if self._local:
            pieces = [self._piece_of(local[value], value, piece) for value, piece in self._local]
            self._local_tensors.setdefault(tag, deque()).append(pieces)
        ops = []
        for peer, slots in self._outgoing.items():
            pieces = [self._piece_of(local[s.value], s.value, s.piece) for s in slots]
            ops.append(dist.P2POp(dist.isend, _pack(slots, pieces), peer, self._group, tag))
        return ops

    def receive(self, tag: int, start: bool = True) -> "Receipt":
        """Return the receives of this rank's pieces of one bundle, whose messages have `tag`.

        Args:
            start: whether they are launched; if not, the caller launches `Receipt.ops`.
        """
        ops = []
        for peer, slots in self._incoming.items():
            buffer = torch.empty(
                slots[-1].offset + slots[-1].num_bytes, dtype=torch.uint8, device=self._device
            )
            ops.append(dist.P2POp(dist.irecv, buffer, peer, self._group, tag))
        receipt = Receipt(self, ops, tag)
        if start:
            receipt.works = [_launch(op) for op in ops]
        return receipt

    def forget(self) -> None:
        """Drop pieces that are stored for bundles of a step that was aborted."""
        self._local_tensors.clear()

    def assemble(self, buffers: Sequence[Tensor], tag: int) -> list[Tensor]:
        """Return this rank's local tensors in the target's layouts; [] if it is not on its mesh.

        Collective on the target's mesh if a plan gathers.

        Args:
            buffers: the received messages.
        """
        if not self._is_target:
            return []
        pieces: list[list[tuple[Piece, Tensor]]] = [[] for _ in self._plans]
        if self._local:
            local_tensors = self._local_tensors[tag].popleft()
            for (value, piece), tensor in zip(self._local, local_tensors, strict=True):
                pieces[value].append((piece, tensor))
        for buffer, slots in zip(buffers, self._incoming.values(), strict=True):
            for slot in slots:
                raw = buffer[slot.offset : slot.offset + slot.num_bytes]
                shape = [stop - start for start, stop in slot.piece.box]
                tensor = raw.view(self._plans[slot.value].dtype).view(shape)
                pieces[slot.value].append((slot.piece, tensor))
        results = []
        for value, plan in enumerate(self._plans):
            tensor = self._join(pieces[value], plan.received_boxes[self._rank], plan.dtype)
            gather = self._gathers[value]
            results.append(tensor if gather is None else gather.values(tensor))
        return results

    def _join(self, pieces: list[tuple[Piece, Tensor]], box: Box, dtype: torch.dtype) -> Tensor:
        """Return the tensor of `box`, put together from the pieces that cover it."""
        if len(pieces) == 1:
            piece, tensor = pieces[0]
            if piece.box == box:
                return tensor
        shape = [stop - start for start, stop in box]
        result = torch.empty(shape, dtype=dtype, device=self._device)
        for piece, tensor in pieces:
            result[_within(piece.box, box)].copy_(tensor)
        return result

    def _piece_of(self, tensor: Tensor, value: int, piece: Piece) -> Tensor:
        """A piece of a local tensor."""
        local_box = self._plans[value].source_boxes[self._rank]
        return tensor if piece.box == local_box else tensor[_within(piece.box, local_box)]


class Receipt:
    """A bundle in flight to this rank."""

    def __init__(self, transfer: Transfer, ops: list[dist.P2POp], tag: int) -> None:
        self._transfer = transfer
        self._tag = tag
        self.ops = ops
        # handles of the receives that `Transfer.receive` has launched
        self.works: list[Any] = []

    def wait(self) -> list[Tensor]:
        """Return the local tensors, in the bundle's order.

        Collective on the target's mesh if a plan gathers. LostRankError if a sender is gone.
        """
        # Receives that the caller launched have no handle here: the caller has waited for them.
        for op, work in zip(self.ops, self.works, strict=False):
            _named(op, work.wait)
        return self._transfer.assemble([op.tensor for op in self.ops], self._tag)


def exchange(
    transfers: Sequence[tuple[Transfer, Sequence[Tensor | None]]], tag: int
) -> list[list[Tensor]]:
    """Execute several transfers at once; every rank of the job calls with the same list.

    Args:
        transfers: each with its local tensors, None for zeros.
        tag: of the first transfer; the others have the following ones.

    Returns:
        Per transfer this rank's local tensors, [] if it is not on the target's mesh.

    Raises:
        LostRankError: another rank is gone (with gloo; of NCCL its own error).
    """
    # All receives and sends are launched before the first is waited for, so that their order among
    # the ranks does not matter.
    receipts = []
    ops: list[dist.P2POp] = []
    for i, (transfer, _) in enumerate(transfers):
        receipt = transfer.receive(tag + i, start=False)
        receipts.append(receipt)
        ops += receipt.ops
    for i, (transfer, tensors) in enumerate(transfers):
        ops += transfer.send_ops(tensors, tag + i)

    if ops and dist.get_backend(ops[0].group) == "gloo":
        for op, work in [(op, _launch(op)) for op in ops]:
            _named(op, work.wait)
    elif ops:
        # One NCCL group: otherwise a send could wait for its receive for ever.
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return [receipt.wait() for receipt in receipts]


def _pack(slots: list[_Slot], pieces: list[Tensor]) -> Tensor:
    """Return one flat buffer with the bytes of all pieces; a single contiguous piece is not copied.

    Args:
        slots: where each piece is in the buffer.
    """
    flat = [as_bytes(piece.contiguous()) for piece in pieces]
    if len(flat) == 1:
        return flat[0]
    buffer = flat[0].new_empty(slots[-1].offset + slots[-1].num_bytes)
    for slot, piece in zip(slots, flat, strict=True):
        buffer[slot.offset : slot.offset + slot.num_bytes].copy_(piece)
    return buffer


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return `box` as slices of a tensor that stores `outer`."""
    slices = []
    for (start, stop), (first, _) in zip(box, outer, strict=True):
        slices.append(slice(start - first, stop - first))
    return tuple(slices)


def _dual(layout: Layout) -> DualLayout:
    """Return the dual layout of values in `layout` whose gradients do not matter here."""
    placements = []
    for placement in layout:
        if isinstance(placement, Shard):
            placements.append(shard(placement.dim))
        else:
            placements.append(INVARIANT)
    return tuple(placements)


def _launch(op: dist.P2POp) -> Any:
    """Launch a p2p transfer, through host memory if the backend cannot send from the device, and
    return its handle. LostRankError if the connection fails.
    """
    if op.tensor.device.type != "cpu" and dist.get_backend(op.group) == "gloo":
        return _named(op, lambda: StagedThroughHost(op))
    return _named(op, lambda: op.op(op.tensor, op.peer, op.group, op.tag))


class StagedThroughHost:
    """A message of an accelerator's tensor over gloo, which sends from host memory only."""

    def __init__(self, op: dist.P2POp) -> None:
        self._op = op
        if op.op is dist.isend:
            self._host = op.tensor.cpu()
        else:
            self._host = torch.empty_like(op.tensor, device="cpu")
        self._work = op.op(self._host, op.peer, op.group, op.tag)

    def wait(self) -> None:
        """Return when the message has been sent, or is in the op's tensor."""
        self._work.wait()
        if self._op.op is dist.irecv:
            self._op.tensor.copy_(self._host)


def _named(op: dist.P2POp, call: Callable[[], Any]) -> Any:
    """Return `call()`; raise LostRankError, which names the other rank, if the connection fails."""
    try:
        return call()
    except RuntimeError as error:
        text = str(error)
        peer = op.peer
        message = "a message to" if op.op is dist.isend else "a message from"
        if "imed out" in text or "imeout" in text:
            problem = (
                f"{message} rank {peer} did not get through in time: rank {peer} hangs, or waits"
                " for one that does"
            )
        else:
            problem = f"rank {peer} is gone: {message} it failed"
        raise LostRankError(
            f"rank {dist.get_rank()}: {problem} ({first_sentence(text)})",
            f"look at the output of rank {peer} first",
        ) from error


def first_sentence(text: str) -> str:
    """Return the first sentence of a backend's error, without its source file and advice."""
    line = text.splitlines()[0] if text else "no reason given"
    return re.sub(r"^\[/[^\]]*\] ", "", line).partition(". This is typically")[0]
