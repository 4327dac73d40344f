"""Parameters in parts under code that nobody has captured: each is whole while the module that owns
it runs.

The modules' forwards and their own attribute access bring a parameter when it is needed and drop it
afterwards; what autograd saves of it is a recipe, by which it is gathered again
(`comm/saved_tensor_hooks.py`). Elsewhere a parameter in parts has its whole shape and no values
(NaN): code that reaches it past its module computes nothing that could be taken for true.

Ranks need not do the same. They meet in rounds: each says what it needs next, everything that
anybody needs is gathered by all, and who is done serves the others. Nothing hangs where branches,
shapes or numbers of batches differ. Where all are about to do what all did in the step before, one
round agrees on all of it, and gatherings run ahead of their use.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice, takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from alpa_strategy.capture.python_state import patched
from alpa_strategy.comm.collectives import world_size
from alpa_strategy.comm.mesh import Pending
from alpa_strategy.comm.saved_tensor_hooks import SavedTensorHooks
from alpa_strategy.errors import SetupError
from alpa_strategy.options import BUCKET_BYTES
from alpa_strategy.runtime.activation_checkpoint import forward_of_copy
from alpa_strategy.runtime.parameters import ParameterStore

_DONE, _GONE = -1, -2  # what a rank says instead of a unit
_PAUSE = -3  # parts may get new values: nothing is gathered ahead of it
_disable_saved_tensors_hooks = torch.autograd.graph.disable_saved_tensors_hooks

Wait = Callable[[], list[Tensor]]


class LazyEntryGather:
    """Gatherings that all ranks make, whatever each needs. Methods are collective, in any order, if
    not said otherwise.

    Args:
        start: begins to gather all of a unit of parameters, by number; collective.
        may_start: whether a unit may be gathered ahead of its use, beside those that are.
        group: of all ranks, with a CPU backend, used for nothing else.
    """

    def __init__(
        self,
        start: Callable[[int], Wait],
        may_start: Callable[[int, list[int]], bool],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._start, self._may_start, self._group = start, may_start, group
        self._order: list[int] = []  # what this rank has asked for in this step
        self._before: list[int] = []  # and in the one before
        self._follows = False  # so far the same
        self._agreed: deque[int] = (
            deque()
        )  # what all ranks gather next, in this order, come what may
        self._under_way: deque[Wait] = deque()  # of the first of these

    def begin(self) -> None:
        """A step begins, which may be like the last one. No communication."""
        self._before, self._order, self._follows = self._order, [], True

    def fetch(self, unit: int) -> list[Tensor]:
        """What this rank needs now; others may get something else in the same round."""
        self._note(unit)
        if not self._agreed or self._agreed[0] != unit:
            self._serve()
            ahead = self._expected()
            said = self._said(unit, hash(tuple(ahead)) if ahead else 0)
            if len({key for _, key in said}) > 1 or not ahead:
                return {wanted: self._start(wanted)() for wanted in _units(said)}[unit]
            self._agreed.extend(ahead)
        self._fill()
        self._agreed.popleft()
        return self._under_way.popleft()()

    def pause(self) -> None:
        """Nothing that is gathered now may be used later. Communicates where others still count on
        this rank.
        """
        self._note(_PAUSE)
        self._serve()

    def forget(self) -> None:
        """The step has failed. No communication."""
        self._agreed.clear()
        self._under_way.clear()

    def finish(self, for_good: bool = False) -> None:
        """This rank needs no more: serve the others until all say so.

        Args:
            for_good: until nobody comes back, not even from here.
        """
        own = _GONE if for_good else _DONE
        self._note(own)
        self._serve()
        while max(said := self._said(own, 0))[0] > own:
            for unit in _units(said):
                self._start(unit)()

    def _note(self, what: int) -> None:
        at = len(self._order)
        self._follows = self._follows and at < len(self._before) and self._before[at] == what
        self._order.append(what)

    def _expected(self) -> list[int]:
        """What this rank will fetch until it meets the others, from the last fetch on, if the step
        is like the last.
        """
        return (
            list(takewhile(lambda what: what >= 0, self._before[len(self._order) - 1 :]))
            if self._follows
            else []
        )

    def _fill(self) -> None:
        """Begin what is waited for next, and what may go on beside it."""
        while (count := len(self._under_way)) < len(self._agreed):
            unit = self._agreed[count]
            # What is waited for first may be changed before it is gathered again.
            if count and (
                unit == self._agreed[0]
                or not self._may_start(unit, list(islice(self._agreed, 1, count)))
            ):
                return
            self._under_way.append(self._start(unit))

    def _serve(self) -> None:
        """Gather what all have agreed on, though this rank has departed from it."""
        while self._agreed:
            unit = self._agreed.popleft()
            (self._under_way.popleft() if self._under_way else self._start(unit))()

    def _said(self, own: int, key: int) -> list[tuple[int, int]]:
        """(unit, key of what is expected) of every rank."""
        if world_size() == 1:
            return [(own, key)]
        said = torch.empty(2 * world_size(), dtype=torch.int64)
        dist.all_gather_into_tensor(said, torch.tensor([own, key]), self._group)
        return [(unit, of_rank) for unit, of_rank in said.view(-1, 2).tolist()]


def _units(said: list[tuple[int, int]]) -> list[int]:
    return sorted({unit for unit, _ in said if unit >= 0})


class EagerFullyShard:
    """See the file's docstring. Outside of `in_use` parameters are this device's parts.

    Args:
        module: whose parameters `store` holds.
        group: see `LazyEntryGather`.
        keeps: whether parameters stay whole from the first `in_use` until `drop` (ZeRO-2), not only
            while in use.
        has_room: for all of them at once, beside a step.
    """

    def __init__(
        self,
        module: nn.Module,
        store: ParameterStore,
        group: dist.ProcessGroup | None,
        keeps: bool = False,
        has_room: bool = False,
    ) -> None:
        self._module, self._store, self._keeps, self._has_room = module, store, keeps, has_room
        self._sharded = store.sharded_parameters
        self._units: list[list[nn.Parameter]] = []
        self._unit_bytes: list[int] = []
        self._unit_of: dict[nn.Parameter, int] = {}
        self._parts: dict[nn.Parameter, Tensor] = {}
        self._whole: dict[nn.Parameter, Tensor] = {}
        self._users: Counter[int] = Counter()  # modules that run, by unit
        self._without_grad: Counter[int] = (
            Counter()
        )  # gatherings under no_grad since parts had new values, by unit
        self._again: dict[
            nn.Parameter, Tensor
        ] = {}  # of the unit that the backward has gathered last
        self._installed = ExitStack()
        self._regather: SavedTensorHooks | None = None
        self._depth = 0
        self._stays_whole = False  # what is whole, for the backward of functions
        self.on_demand = LazyEntryGather(self._start, self._may_start, group)
        self._install()

    @property
    def is_active(self) -> bool:
        """Whether parameters are gathered when they are used."""
        return self._depth > 0

    # In and out

    @contextmanager
    def in_use(self, for_backward: bool = False) -> Iterator[None]:
        """Context in which parameters are gathered when they are used. May be entered again inside.

        Args:
            for_backward: what autograd saves inside is gathered again in the backward.
        """
        self._depth += 1
        if self._depth == 1:
            self._begin(for_backward)
        failed = True
        try:
            yield
            failed = False
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._end(failed)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """As outside, within `in_use`."""
        if not self.is_active:
            yield
            return
        depth, self._depth, regathers = self._depth, 0, self._regather is not None
        self._end()
        try:
            yield
        finally:
            self._depth = depth
            self._begin(regathers)

    def _begin(self, for_backward: bool) -> None:
        self._parts = {parameter: parameter.data for parameter in self._sharded}
        if self._keeps and not self._whole:  # all ranks are here together
            self._whole = {p: self._store.gather(p) for p in self._sharded}
        set_data(
            (p, self._whole[p] if p in self._whole else self._nothing(p)) for p in self._sharded
        )
        if for_backward and not self._keeps:
            self._regather = SavedTensorHooks(())
            self._regather.__enter__()
            torch.autograd.graph.disable_saved_tensors_hooks = self._within_functions  # type: ignore[assignment]

    @contextmanager
    def _within_functions(self, message: str) -> Iterator[None]:
        """What torch.func begins with (`disable_saved_tensors_hooks`): parameters stay whole until
        they are stepped.
        """
        assert self._regather is not None
        for parameter in self._sharded:
            self.need(parameter)
        self._stays_whole = True
        with self._regather.without_hooks(), _disable_saved_tensors_hooks(message):
            yield

    def _end(self, failed: bool = False) -> None:
        """Parameters are parts again; what was changed in whole ones is kept. See
        `LazyEntryGather.pause`.
        """
        if failed:
            self.on_demand.forget()
        else:
            self.on_demand.pause()
        self._again.clear()
        if self._regather is not None:
            torch.autograd.graph.disable_saved_tensors_hooks = _disable_saved_tensors_hooks
            self._regather.__exit__(None, None, None)
            self._regather = None
        for parameter in () if failed else list(self._whole):
            self._take_changes(parameter)
        if not self._keeps and not self._stays_whole:
            self._whole.clear()
        self._users.clear()
        self._without_grad.clear()
        set_data(self._parts.items())
        self._parts = {}

    def meet(self) -> None:
        """Before a collective of the step's own: serve the other ranks until all have come to
        theirs.
        """
        if self._depth and not self._keeps:
            self.on_demand.finish()

    def drop(self) -> None:
        """Parts have new values: whole copies are old. Not within `in_use`."""
        self._whole.clear()
        self._stays_whole = False

    def take_whole(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """New values, where a copy is kept."""
        if parameter in self._whole and not torch.equal(self._whole[parameter], whole):
            self._whole[parameter].copy_(whole)

    def remove(self) -> None:
        """Give the module back as it was."""
        self._installed.close()

    # While it is active

    def need(self, parameter: nn.Parameter) -> None:
        """Let a parameter be whole. Collective, see `LazyEntryGather`, unless it is."""
        self._stays_whole |= torch._C._functorch.peek_interpreter_stack() is not None
        if parameter in self._whole or parameter not in self._parts:
            return
        unit = self._unit_of[parameter]
        if not torch.is_grad_enabled():
            self._without_grad[unit] += 1
        with torch._C._DisableFuncTorch():  # what a function is given is no parameter's data
            for each, whole in zip(self._units[unit], self.on_demand.fetch(unit), strict=True):
                if each not in self._whole:
                    self._whole[each] = whole
                    set_data([(each, whole)])
                    if self._regather is not None:
                        again = partial(Pending, partial(self.again, each))
                        self._regather.know(self._parts[each], again, whole)

    def again(self, parameter: nn.Parameter) -> Tensor:
        """All of a parameter in the backward. Collective, see `LazyEntryGather`, unless its unit is
        the last that was needed.
        """
        if (whole := self._whole.get(parameter)) is not None:
            return whole
        if self._without_grad:  # what the backward makes may need the memory of what stayed
            self._drop_unused([unit for unit, times in self._without_grad.items() if times > 1])
            self._without_grad.clear()
        if parameter not in self._again:
            self._again.clear()
            unit = self._unit_of[parameter]
            self._again.update(zip(self._units[unit], self.on_demand.fetch(unit), strict=True))
        return self._again[parameter]

    def _install(self) -> None:
        """Units are the parameters of a block, or of a module outside of blocks, up to a bucket's
        bytes.
        """
        block_of, scripted = (
            _blocks(self._module),
            dict[nn.Module, nn.Module](),
        )  # TorchScript runs without Python
        for outer in (
            each for each in self._module.modules() if isinstance(each, torch.jit.ScriptModule)
        ):
            scripted |= {inner: scripted.get(inner, outer) for inner in outer.modules()}
        units_of: dict[
            nn.Module, dict[int, None]
        ] = {}  # that a module needs: of its own, and of its block
        of_block: dict[tuple[nn.Module, torch.dtype], int] = {}  # the unit that is not full yet
        for owner in self._module.modules():
            own = [p for p in owner._parameters.values() if p in self._sharded]
            if not own:
                continue
            ours = _GatherOnAccess(owner._parameters, self)
            self._installed.enter_context(patched([(vars(owner), "_parameters", ours)]))
            block = block_of.get(owner, owner)
            for parameter in own:
                if parameter not in self._unit_of:
                    unit = of_block.get((block, parameter.dtype))
                    num_bytes = self._store.whole_bytes([parameter])
                    if unit is None or self._unit_bytes[unit] + num_bytes > BUCKET_BYTES:
                        unit = of_block[block, parameter.dtype] = len(self._units)
                        self._units.append([])
                        self._unit_bytes.append(0)
                    self._units[unit].append(parameter)
                    self._unit_bytes[unit] += num_bytes
                    self._unit_of[parameter] = unit
                for module in (owner, block, scripted.get(owner, owner)):
                    units_of.setdefault(module, {})[self._unit_of[parameter]] = None
        for module, units in units_of.items():
            if module is not self._module:  # the step itself is no forward of the root's
                self._watch(module, list(units))

    def _watch(self, module: nn.Module, units: list[int]) -> None:
        """Let its parameters be whole while it runs, and what they are gathered with as well."""
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        named = module.parameters() if is_scripted else dict.values(module._parameters)
        own = [p for p in named if p is not None and p in self._unit_of]

        def running(
            module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> Any:
            if (of_copy := forward_of_copy(module)) is not None:
                return of_copy(*args, **kwargs)
            if self._depth and not self._keeps:
                for parameter in own:
                    self.need(parameter)
                self._users.update(units)
            try:
                return forward(*args, **kwargs)
            finally:
                if self._depth and not self._keeps and not self._stays_whole:
                    self._users.subtract(units)
                    self._drop_unused([unit for unit in units if not self._is_for_generation(unit)])

        # Not a hook: code may run a forward alone, once more for the backward
        # (`runtime/activation_checkpoint.py`). A partial, not a decorated function: a copy of the
        # module runs its own.
        self._installed.enter_context(
            patched([(module, "forward", partial(running, module, module.forward))])
        )

    def _is_for_generation(self, unit: int) -> bool:
        """Used again and again without a backward, as by a model that writes a token at a time: it
        stays whole then,
        until it is used with one, or one begins."""
        return self._has_room and not torch.is_grad_enabled() and self._without_grad[unit] > 1

    def _drop_unused(self, units: list[int]) -> None:
        for parameter in (p for unit in units if self._users[unit] <= 0 for p in self._units[unit]):
            if parameter in self._whole:
                self._take_changes(parameter)
                del self._whole[parameter]
                set_data([(parameter, self._nothing(parameter))])

    @torch.inference_mode(False)
    @torch.no_grad()
    def _start(self, unit: int) -> Wait:
        wait = self._store.start_gather({p: self._parts[p] for p in self._units[unit]})
        return torch.inference_mode(False)(torch.no_grad()(wait))

    def _may_start(self, unit: int, ahead: list[int]) -> bool:
        """Always the next, more where they fit. What is or will be whole may change until it is
        gathered again.
        """
        has_room = (
            not ahead
            or sum(self._unit_bytes[each] for each in (*ahead, unit)) <= self._store.ahead_bytes
        )
        return (
            has_room and unit not in ahead and not any(p in self._whole for p in self._units[unit])
        )

    def _take_changes(self, parameter: nn.Parameter) -> None:
        """Into the part, of this device's own; `data`: nobody's version of it counts this."""
        if self._store.holds(parameter):
            with torch.inference_mode(False), torch.no_grad():
                self._parts[parameter].data.copy_(self._store.shard_like(parameter, parameter.data))

    def _nothing(self, parameter: nn.Parameter) -> Tensor:
        """NaN in the whole shape, one element of memory."""
        value = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
        one = torch.full((), value, dtype=parameter.dtype, device=parameter.device)
        return one.expand(self._store.whole_shape(parameter))


def set_data(tensors: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Give parameters their data, under any mode."""
    with torch.inference_mode(False), torch.no_grad():
        for parameter, data in tensors:
            parameter.data = data


def _blocks(root: nn.Module) -> dict[nn.Module, nn.Module]:
    """Module -> the outermost element of a list of modules that holds it, for those inside of
    one.
    """
    found: dict[nn.Module, nn.Module] = {}
    for container in root.modules():
        if (
            isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict)
            and container not in found
        ):
            for block in container.children():
                found.update((module, block) for module in block.modules() if module not in found)
    return found


class _GatherOnAccess(dict[str, Any]):
    """A module's own parameters by name, whole when somebody asks for one."""

    def __init__(self, plain: dict[str, Any], on_use: EagerFullyShard) -> None:
        super().__init__(plain)
        self._on_use = on_use

    def __getitem__(self, name: str) -> Any:
        return self._needed(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._needed(super().get(name, default))

    def items(self) -> Any:
        return [(name, self._needed(parameter)) for name, parameter in super().items()]

    def values(self) -> Any:
        return [self._needed(parameter) for parameter in super().values()]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (
            dict(self.items()),
        )  # a copy of the module is nobody's; within a step it has values

    def _needed(self, parameter: Any) -> Any:
        if self._on_use.is_active and parameter is not None:
            self._on_use.need(parameter)
        return parameter


class UnshardOnAccess(TorchFunctionMode):
    """Context of code that all ranks of a store run alike: parameters in parts are whole from where
    a function of torch first takes them, and their gradients go back into parts.

    Raises:
        SetupError: the code changes what is whole here alone, or looks at gradients, of which there
            are parts.
    """

    def __init__(self, store: ParameterStore) -> None:
        super().__init__()
        self._store, self._parts = store, {id(p) for p in store.sharded_parameters}
        self._wholes: dict[tuple[Any, ...], tuple[nn.Parameter, Tensor, int]] = {}
        self.sees = True  # else the code knows of parts

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.forget()

    def forget(self) -> None:
        """Nothing is whole any more: parts get new values."""
        wholes, self._wholes = self._wholes, {}
        for parameter, whole, version in wholes.values():
            if whole._version != version:
                raise self._error(parameter)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = (
            [p for p in tree_leaves((args, kwargs)) if id(p) in self._parts] if self.sees else []
        )
        if func in _REFUSED and found and sys._getframe(1).f_code.co_name != "zero_grad":
            raise self._error(found[0])
        if func in _OF_PARTS or func in _REFUSED or not found:
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(nn.Parameter, self._whole, (args, kwargs))
        return args[0].detach() if func == _TENSOR.data.__get__ else func(*args, **kwargs)

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        key = id(parameter), parameter.requires_grad, torch.is_grad_enabled()
        if id(parameter) in self._parts and key not in self._wholes:
            whole = self._store.whole_in_step(parameter)
            self._wholes[key] = parameter, whole, whole._version
        return self._wholes[key][1] if key in self._wholes else parameter

    def _error(self, parameter: nn.Parameter) -> SetupError:
        name = self._store.name_of(parameter)
        return SetupError(
            f"code of the step changes {name} or looks at its gradient, of which each rank has a"
            " part",
            f'keep it whole (placements={{"{name}": "R"}}), or do it in a hook',
        )


_TENSOR: Any = Tensor  # its attributes are descriptors
_OF_PARTS = {
    _TENSOR.grad.__set__,
    _TENSOR.grad.__delete__,
    _TENSOR.is_leaf.__get__,
    Tensor.__hash__,
}
_OF_PARTS |= {_TENSOR.requires_grad.__get__, _TENSOR.requires_grad.__set__, Tensor.requires_grad_}
_REFUSED = {
    _TENSOR.grad.__get__,
    _TENSOR.data.__set__,
    Tensor.backward,
    torch.autograd.grad,
    torch.autograd.backward,
}
