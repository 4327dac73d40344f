"""Moving parameters' shards to the device that steps the full tensor, and new values back.

One exchange among all devices of a mesh moves the shards of all parameters of one dtype. Its layout
is fixed by the plan: no device needs to know what another has.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from alpa_strategy.comm.mesh import MeshComm, Pending
from alpa_strategy.runtime.sharded_parameter import ShardedParameter


@dataclass(eq=False)
class OwnedParameter:
    """A parameter that one device of its mesh, the owner, steps in full."""

    sharded: ShardedParameter

    # Index of the owner in `mesh.all_devices`.
    owner: int

    # The devices whose shards make up the full tensor: one for each shard, near the owner.
    senders: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        mesh = self.sharded.mesh
        coordinates = np.ndindex(*mesh.shape)
        near = np.unravel_index(self.owner, mesh.shape)
        senders = []
        for device, coordinate in enumerate(coordinates):
            # Along an axis on which it is not sharded, every device has a copy.
            is_near = [
                mode.dim is not None or mine == owners
                for mode, mine, owners in zip(
                    self.sharded.plan.modes, coordinate, near, strict=True
                )
            ]
            if all(is_near):
                senders.append(device)
        self.senders = tuple(senders)

    @property
    def is_here(self) -> bool:
        """Whether this device is the owner."""
        return self.owner == self.sharded.mesh.all_devices.index

    def new_full(self) -> Tensor:
        """Return memory for the full tensor, of `module_shape`, where the shard is."""
        parameter = self.sharded.parameter
        return torch.empty(
            self.sharded.module_shape, dtype=parameter.dtype, device=self.sharded.device
        )

    def shard_of(self, full: Tensor, device: int) -> Tensor:
        """Return the view of a full tensor that `device` stores, with the dims of the step."""
        return self.sharded.piece_at(full, _coordinate(self.sharded.mesh, device))


# A part of an exchange: what this device sends (a tensor of any shape), or where it writes what it
# gets.
_Part = tuple[int, Tensor]


class OwnerExchange:
    """Exchanges of tensors that are laid out as the parameters are.

    Args:
        mesh: of the parameters.
        owned: the parameters, in the same order on every device.
    """

    def __init__(self, mesh: MeshComm, owned: Sequence[OwnedParameter]) -> None:
        self._mesh = mesh
        self._owned = tuple(owned)

    def start_to_owners(
        self,
        shards: Callable[[OwnedParameter], Iterable[Tensor]],
        targets: Callable[[OwnedParameter, int], Iterable[Tensor]],
    ) -> Callable[[], None]:
        """Start to move shards to owners. Collective over the mesh.

        Args:
            shards: returns what this device sends of a parameter, tensors of one dtype.
            targets: returns where the owner writes what the device of that index sends.

        Returns:
            A function that waits, and writes to the targets.
        """
        here = self._mesh.all_devices.index
        sent: list[_Part] = []
        received: list[_Part] = []
        for parameter in self._owned:
            if here in parameter.senders:
                sent += [(parameter.owner, tensor) for tensor in shards(parameter)]
            if parameter.is_here:
                for device in parameter.senders:
                    received += [(device, tensor) for tensor in targets(parameter, device)]
        return self._start(sent, received)

    def start_to_shards(
        self,
        fulls: Callable[[OwnedParameter], Tensor],
        targets: Callable[[OwnedParameter], Tensor],
    ) -> Callable[[], None]:
        """Start to move full tensors from owners to all devices that store shards of them.

        Collective over the mesh.

        Args:
            fulls: returns the full tensor of a parameter, at its owner.
            targets: returns where this device writes its shard, with the dims of the step.

        Returns:
            A function that waits, and writes to the targets.
        """
        sent: list[_Part] = []
        received: list[_Part] = []
        for parameter in self._owned:
            if parameter.is_here:
                full = fulls(parameter)
                for device in range(self._mesh.all_devices.size):
                    sent.append((device, parameter.shard_of(full, device)))
            received.append((parameter.owner, targets(parameter)))
        return self._start(sent, received)

    def _start(self, sent: list[_Part], received: list[_Part]) -> Callable[[], None]:
        """Start one exchange for each dtype of the parameters, and return a function that waits
        until all tensors are received.

        Args:
            sent: (receiving device, tensor) of each shard.
            received: (sending device, tensor that is written) of each, in the sender's order.
        """
        dtypes = sorted({p.sharded.parameter.dtype for p in self._owned}, key=str)
        waits = []
        for dtype in dtypes:
            of_dtype = [part for part in sent if part[1].dtype == dtype]
            into_dtype = [part for part in received if part[1].dtype == dtype]
            waits.append(self._start_of_dtype(of_dtype, into_dtype, dtype))

        def wait() -> None:
            for wait_for_dtype in waits:
                wait_for_dtype()

        return wait

    def _start_of_dtype(
        self, sent: list[_Part], received: list[_Part], dtype: torch.dtype
    ) -> Callable[[], None]:
        """Start the exchange of one dtype; shards that this device sends to itself are copied.
        Args and result: as of `_start`.
        """
        all_devices = self._mesh.all_devices
        here = all_devices.index
        local_sent = [tensor for device, tensor in sent if device == here]
        local_received = [tensor for device, tensor in received if device == here]
        for source, target in zip(local_sent, local_received, strict=True):
            target.copy_(source.reshape(target.shape))
        if all_devices.size == 1:
            return lambda: None

        flat, num_sent = _flat(sent, here, all_devices.size, dtype, self._owned[0].sharded.device)
        num_received = _num_elements(received, here, all_devices.size)
        pending = all_devices.start_exchange(flat, num_sent, num_received)
        targets = _in_order(received, here)
        return lambda: _write(pending, targets)


def _flat(
    sent: list[_Part], here: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[int]]:
    """Return the elements that are sent to all devices, flat in their order, and the number of
    elements for each of them.

    Args:
        sent: (receiving device, tensor) of each shard.
        here: index of this device, which sends itself nothing.
        size: number of devices.
    """
    counts = _num_elements(sent, here, size)
    flat = torch.empty(sum(counts), dtype=dtype, device=device)
    start = 0
    for tensor in _in_order(sent, here):
        flat[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
        start += tensor.numel()
    return flat, counts


def _in_order(parts: list[_Part], here: int) -> list[Tensor]:
    """Return the tensors of other devices, in the order of the devices."""
    ordered = sorted(parts, key=lambda part: part[0])
    return [tensor for device, tensor in ordered if device != here]


def _num_elements(parts: list[_Part], here: int, size: int) -> list[int]:
    """Return for each device the number of elements exchanged with it; 0 for `here`."""
    counts = [0] * size
    for device, tensor in parts:
        if device != here:
            counts[device] += tensor.numel()
    return counts


def _write(pending: Pending, targets: list[Tensor]) -> None:
    """Wait for an exchange, and write what has come to its targets, in their order."""
    flat = pending.wait()
    start = 0
    for target in targets:
        target.copy_(flat[start : start + target.numel()].view(target.shape))
        start += target.numel()


def _coordinate(mesh: MeshComm, device: int) -> tuple[int, ...]:
    """Return the mesh coordinate of a device."""
    return tuple(int(index) for index in np.unravel_index(device, mesh.shape))
