"""An optimizer's step of full tensors, each by one device: its owner.

An optimizer such as Muon needs the full matrix of a gradient. All devices of a mesh share the work:
each matrix has an owner, which gets the shards of value and gradient, steps the full tensor, and
sends new values to where they are stored. The optimizer's state is at the owner only. In the step
the optimizer sees only the parameters that it steps on this device.

Hooks of the optimizer's step do this, so it works however the step is called: by the Trainer, by a
loss scaler, by the user. An optimizer that holds others is stepped as one: what is taken from its
groups is taken from theirs.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.ir.held_optimizers import groups_in, parameters_in
from alpa_strategy.runtime.owner_exchange import OwnedParameter, OwnerExchange
from alpa_strategy.runtime.parameters import ParameterStore


class OwnerStep:
    """Lets an optimizer step owned parameters in full, and leave others alone.

    Args:
        optimizer: of sharded parameters.
        store: of the parameters; those of other optimizers are ignored.
    """

    def __init__(self, optimizer: Optimizer, store: ParameterStore) -> None:
        self._optimizer = optimizer
        stepped = parameters_in(optimizer)
        here = set(stepped)
        by_mesh: dict[int, list[OwnedParameter]] = {}
        # In the same order on all devices of a mesh.
        for sharded in store.sharded:
            if sharded.owner is not None and sharded.parameter in here:
                owned = OwnedParameter(sharded, sharded.owner)
                by_mesh.setdefault(id(sharded.mesh), []).append(owned)

        self._owned = [owned for of_mesh in by_mesh.values() for owned in of_mesh]
        # Of other stages: empty here.
        self._elsewhere = {p for p in stepped if not store.holds(p)}
        has_owners = any(store.is_stepped_in_full(p) for p in stepped)
        self._exchanges = []
        for of_mesh in by_mesh.values():
            self._exchanges.append(OwnerExchange(of_mesh[0].sharded.mesh, of_mesh))

        # While the optimizer steps: the shards and their gradients, and all parameters of the
        # groups.
        self._shards: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}
        self._groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []

        # Each undoes one change of the optimizer.
        self._undo: list[Callable[[], None]] = []
        if has_owners and _has_hooks(optimizer):
            # Hooks of the user see shards, as without owners.
            before = optimizer.register_step_pre_hook(self._before)
            after = optimizer.register_step_post_hook(self._after)
            hooks: Any = optimizer._optimizer_step_post_hooks
            hooks.move_to_end(after.id, last=False)
            self._undo = [before.remove, after.remove]
        elif has_owners:
            self._wrap_step()

    def is_stepping(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer steps the parameter now, in full at its owner."""
        return parameter in self._shards

    def remove(self) -> None:
        """Remove the hooks, and what an interrupted step left. No communication."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._put_shards_back()

    def _wrap_step(self) -> None:
        """Replace the optimizer's `step` by one that calls `_before` and `_after`.

        Hooks cannot be registered, as its class has not called `Optimizer.__init__`.
        """
        optimizer: Any = self._optimizer
        attributes = vars(optimizer)
        # That of a scheduler, or the class's own.
        wrapped = attributes.get("step")
        step = optimizer.step

        @wraps(step)
        def step_in_full(*args: Any, **kwargs: Any) -> Any:
            replaced = self._before(optimizer, (optimizer, *args), kwargs)
            if replaced is not None:
                args, kwargs = replaced[0][1:], replaced[1]
            result = step(*args, **kwargs)
            self._after()
            return result

        def undo() -> None:
            attributes.pop("step", None)
            if wrapped is not None:
                attributes["step"] = wrapped

        attributes["step"] = step_in_full
        self._undo = [undo]

    def _before(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run the closure, then give the parameters that this device owns their full tensors.

        A hook before the optimizer's step. Collective.

        Returns:
            (args, kwargs) of the step with the closure's result in place of the closure; None if
            there is no closure.
        """
        result = _with_closure_called(args, kwargs)
        with torch.no_grad():
            self._put_full_tensors_in()
        return result

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        """Send new values to all devices that store them. Collective."""
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
        """Take parameters of other owners and stages out of the optimizer's groups."""
        others = {owned.sharded.parameter for owned in self._owned if not owned.is_here}
        others |= self._elsewhere
        for group in groups_in(self._optimizer):
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


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step calls hooks."""
    if not getattr(type(optimizer).step, "hooked", False):
        return False
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if not isinstance(getattr(optimizer, name, None), OrderedDict):
            return False
    return True


def _shards(owned: OwnedParameter) -> Sequence[Tensor]:
    """Return the tensors of a parameter that this device sends to the owner: its shard, the shard
    of the gradient (zeros if there is none), and whether there is one, as 1 or 0.
    """
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
