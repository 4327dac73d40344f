"""An optimizer's step of full tensors, each by one device: its owner.

An optimizer such as Muon needs the full matrix of a gradient. All devices of a mesh share the work:
each matrix has an owner, which gets the shards of value and gradient, steps the full tensor, and
sends new values to where they are stored. The optimizer's state is at the owner only. In the step
the optimizer sees only the parameters that it steps on this device.

Hooks of the optimizer's step do this, so it works however the step is called: by the Trainer, by a
loss scaler, by the user.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.runtime.owner_exchange import OwnedParameter, OwnerExchange
from alpa_strategy.runtime.sharded_parameter import ShardedParameter


class OwnerStep:
    """Lets an optimizer step owned parameters in full.

    Args:
        optimizer: of the sharded parameters.
        parameters: those of the meshes of this rank, in the same order on all devices of a mesh;
            those of other optimizers and those without an owner are ignored.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[ShardedParameter]) -> None:
        self._optimizer = optimizer
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        by_mesh: dict[int, list[OwnedParameter]] = {}
        for sharded in parameters:
            if sharded.owner is not None and sharded.parameter in stepped:
                owned = OwnedParameter(sharded, sharded.owner)
                by_mesh.setdefault(id(sharded.mesh), []).append(owned)

        self._owned = [owned for of_mesh in by_mesh.values() for owned in of_mesh]
        self._exchanges = []
        for of_mesh in by_mesh.values():
            self._exchanges.append(OwnerExchange(of_mesh[0].sharded.mesh, of_mesh))

        # While the optimizer steps: the shards and their gradients, and all parameters of the
        # groups.
        self._shards: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}
        self._groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []

        self._handles = []
        if self._owned:
            # Hooks of the user see shards, as without owners.
            before = optimizer.register_step_pre_hook(self._before)
            after = optimizer.register_step_post_hook(self._after)
            hooks: Any = optimizer._optimizer_step_post_hooks
            hooks.move_to_end(after.id, last=False)
            self._handles = [before, after]

    def is_stepping(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer steps the parameter now, in full at its owner."""
        return parameter in self._shards

    def remove(self) -> None:
        """Remove the hooks, and what an interrupted step left. No communication."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._put_shards_back()

    def _before(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run the closure, and let the optimizer see full tensors of what this device owns."""
        result = _with_closure_called(args, kwargs)
        with torch.no_grad():
            self._put_full_tensors_in()
        return result

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        """Send new values to all devices that store them."""
        fulls = {o.sharded.parameter: o.sharded.parameter.detach() for o in self._owned}
        self._put_shards_back()
        waits = []
        for exchange in self._exchanges:
            waits.append(
                exchange.start_to_shards(
                    lambda owned: fulls[owned.sharded.parameter],
                    lambda owned: owned.sharded.in_step(owned.sharded.parameter.detach()),
                )
            )
        for wait in waits:
            wait()

    def _put_full_tensors_in(self) -> None:
        """Gather full parameters and gradients on their owners. Collective; undone by
        `_put_shards_back`.
        """
        values: dict[OwnedParameter, Tensor] = {}
        grads: dict[OwnedParameter, Tensor] = {}
        flags: dict[OwnedParameter, Tensor] = {}
        for owned in self._owned:
            if owned.is_here:
                values[owned] = owned.new_full()
                grads[owned] = owned.new_full()
                flags[owned] = torch.zeros(
                    len(owned.senders), dtype=values[owned].dtype, device=values[owned].device
                )

        def targets(owned: OwnedParameter, device: int) -> Sequence[Tensor]:
            flag = flags[owned][owned.senders.index(device)]
            value = owned.shard_of(values[owned], device)
            return value, owned.shard_of(grads[owned], device), flag

        waits = [exchange.start_to_owners(_shards, targets) for exchange in self._exchanges]
        for wait in waits:
            wait()

        for owned in self._owned:
            parameter = owned.sharded.parameter
            self._shards[parameter] = parameter.data, parameter.grad
            parameter.grad = None
            if owned.is_here:
                parameter.data = values[owned].to(parameter.device)
                # Without a gradient on any device the optimizer skips it.
                if flags[owned].any():
                    parameter.grad = grads[owned].to(parameter.device)
        self._leave_others_out()

    def _leave_others_out(self) -> None:
        """Take parameters of other owners out of the optimizer's groups."""
        others = {owned.sharded.parameter for owned in self._owned if not owned.is_here}
        for group in self._optimizer.param_groups:
            parameters = group["params"]
            self._groups.append((group, parameters))
            group["params"] = [p for p in parameters if p not in others]

    def _put_shards_back(self) -> None:
        """Restore the parameters' shards and gradients, and the optimizer's groups."""
        for group, parameters in self._groups:
            group["params"] = parameters
        self._groups.clear()
        for parameter, (shard, grad) in self._shards.items():
            # A gradient must have the shape of its parameter's data.
            parameter.grad = None
            parameter.data = shard
            parameter.grad = grad
        self._shards.clear()


def _shards(owned: OwnedParameter) -> Sequence[Tensor]:
    """Return what this device sends of a parameter: value, gradient, and whether there is one."""
    sharded = owned.sharded
    parameter = sharded.parameter
    grad = parameter.grad
    flag = parameter.new_full((), float(grad is not None))
    if grad is None:
        grad = torch.zeros_like(parameter)
    value = sharded.in_step(parameter.detach())
    return value, sharded.in_step(grad.to(parameter.dtype)), flag


def _with_closure_called(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call the closure of `step(closure)`, and return the arguments with one that has its result.

    None if there is no closure: the arguments stay.
    """
    positional = args[1] if len(args) > 1 else None
    closure: Callable[[], Any] | None = kwargs.get("closure", positional)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    called = partial(_returns, loss)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": called}
    return (args[0], called, *args[2:]), kwargs


def _returns(result: Any) -> Any:
    return result
