"""Sharded parameters under eager code: each is full while the module that owns it runs (ZeRO-3).

Forwards of modules, and the access to their own parameters, gather a parameter when it is needed
and drop it afterwards. What autograd saves of it is a recipe, by which the backward re-gathers it
(`comm/saved_tensor_hooks.py`). Elsewhere a sharded parameter has its full shape and no values
(NaN): code that reads it without its module computes NaN instead of a wrong number.

Ranks need not do the same work: `on_demand_gather.py` lets each gather what it needs next.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alpa_strategy.capture.python_state import patched
from alpa_strategy.comm.mesh import Pending
from alpa_strategy.comm.saved_tensor_hooks import SavedTensorHooks
from alpa_strategy.extras.eager_sharding.on_demand_gather import OnDemandGather, Wait
from alpa_strategy.options import BUCKET_BYTES
from alpa_strategy.runtime.module_copies import forward_of_copy
from alpa_strategy.runtime.parameters import ParameterStore
from alpa_strategy.runtime.sharded_parameter import set_data

_disable_saved_tensors_hooks = torch.autograd.graph.disable_saved_tensors_hooks


class EagerFullyShard:
    """Gathers the parameters of a module when they are used; see the module's docstring.

    Outside of `in_use` the data of parameters are this rank's shards.

    Args:
        module: whose parameters `store` has sharded.
        store: of these parameters.
        group: of all ranks, with a CPU backend, used for nothing else.
        keeps: whether parameters stay full from the first `in_use` until `drop` (ZeRO-2), not only
            while they are in use.
        has_room: whether memory suffices for all full parameters at once, in addition to a step.
    """

    def __init__(
        self,
        module: nn.Module,
        store: ParameterStore,
        group: dist.ProcessGroup | None,
        keeps: bool = False,
        has_room: bool = False,
    ) -> None:
        self._module = module
        self._store = store
        self._keeps = keeps
        self._has_room = has_room
        self._sharded = store.sharded_parameters

        # Parameters that are gathered together, and the bytes of each such unit.
        self._units: list[list[nn.Parameter]] = []
        self._unit_bytes: list[int] = []
        self._unit_of: dict[nn.Parameter, int] = {}

        # Data of parameters within `in_use`: the shards, and what is full at the moment.
        self._shards: dict[nn.Parameter, Tensor] = {}
        self._full: dict[nn.Parameter, Tensor] = {}

        # By unit: the number of modules that run with it.
        self._users: Counter[int] = Counter()

        # By unit: the number of gatherings under `no_grad` since shards had new values.
        self._without_grad: Counter[int] = Counter()

        # Full parameters of the unit that the backward has re-gathered last.
        self._regathered: dict[nn.Parameter, Tensor] = {}

        self._installed = ExitStack()
        self._saved_hooks: SavedTensorHooks | None = None

        # Number of `in_use` contexts that are entered.
        self._depth = 0

        # Whether full parameters stay full until `drop`: the backward of functions of torch.func
        # cannot re-gather them.
        self._stays_full = False

        # Is called with a parameter and its full value before its shard is taken from that.
        self._look: Callable[[nn.Parameter, Tensor], None] | None = None

        self.on_demand = OnDemandGather(self._start, self._may_start, group)
        self._install()

    @property
    def is_active(self) -> bool:
        """Whether parameters are gathered when they are used."""
        return self._depth > 0

    # Entering and leaving

    @contextmanager
    def in_use(self, for_backward: bool = False) -> Iterator[None]:
        """Context in which parameters are gathered when they are used. May be nested.

        Args:
            for_backward: whether the backward re-gathers what autograd saves of them inside.
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
        """Context within `in_use` in which parameters are shards, as outside of it. Nothing changes
        where it is not active.
        """
        if not self.is_active:
            yield
            return

        depth = self._depth
        had_hooks = self._saved_hooks is not None
        self._depth = 0
        self._end()
        try:
            yield
        finally:
            self._depth = depth
            self._begin(had_hooks)

    def _begin(self, for_backward: bool) -> None:
        """Set the parameters' data for a pass: full if they are to stay in memory, else gathered on
        use.

        With `for_backward`, full parameters that the pass saves are not stored, but re-gathered in
        its backward.
        """
        self._shards = {parameter: parameter.data for parameter in self._sharded}
        if self._keeps and not self._full:
            # All ranks come here together: an ordinary gathering does.
            self._full = {p: self._store.gather(p) for p in self._sharded}

        set_data((parameter, self._initial_data(parameter)) for parameter in self._sharded)

        if for_backward and not self._keeps:
            self._saved_hooks = SavedTensorHooks(())
            self._saved_hooks.__enter__()
            graph: Any = torch.autograd.graph
            graph.disable_saved_tensors_hooks = self._within_functions

    @contextmanager
    def _within_functions(self, message: str) -> Iterator[None]:
        """Replacement of `disable_saved_tensors_hooks`, with which functions of torch.func start:
        all parameters become full and stay so until `drop`.
        """
        assert self._saved_hooks is not None
        for parameter in self._sharded:
            self.need(parameter)
        self._stays_full = True
        with self._saved_hooks.without_hooks(), _disable_saved_tensors_hooks(message):
            yield

    def _end(self, failed: bool = False) -> None:
        """Give parameters their shards back, with what user code changed in full ones.

        Collective as `OnDemandGather.pause`; without communication if the step has failed.
        """
        if failed:
            self.on_demand.forget()
        else:
            self.on_demand.pause()

        self._regathered.clear()
        if self._saved_hooks is not None:
            torch.autograd.graph.disable_saved_tensors_hooks = _disable_saved_tensors_hooks
            self._saved_hooks.__exit__(None, None, None)
            self._saved_hooks = None

        if not failed:
            for parameter in list(self._full):
                self._take_changes(parameter)
        if not self._keeps and not self._stays_full:
            self._full.clear()
        self._users.clear()
        self._without_grad.clear()

        set_data(self._shards.items())
        self._shards = {}

    def begin_step(self) -> None:
        """Start a step, which may gather parameters before their first use as the previous step
        used them. No communication.
        """
        self.on_demand.begin()

    def end_step(self, for_good: bool = False) -> None:
        """Serve the other ranks until none uses a parameter any more.

        Args:
            for_good: no rank comes back, this one included.
        """
        self.on_demand.finish(for_good)

    def meet(self) -> None:
        """Serve the other ranks until all have come to a collective of the user's step."""
        if self._depth and not self._keeps:
            self.on_demand.finish()

    def drop(self) -> None:
        """Forget full copies: shards have new values. Not to be called within `in_use`."""
        self._full.clear()
        self._stays_full = False

    def load_full(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Write the new full value `full` into the full copy of `parameter`, if there is one."""
        if parameter in self._full and not torch.equal(self._full[parameter], full):
            self._full[parameter].copy_(full)

    def watch_changes(self, look: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Let `look` see parameters and full values before shards are taken from these."""
        self._look = look

    def remove(self) -> None:
        """Undo all changes to the module."""
        self._installed.close()

    # While it is active

    def need(self, parameter: nn.Parameter) -> None:
        """Make a sharded parameter full, with the others of its unit. Collective as
        `OnDemandGather.fetch`; no effect if it is full or not sharded, or outside of `in_use`.
        """
        self._stays_full |= torch._C._functorch.peek_interpreter_stack() is not None
        if parameter in self._full or parameter not in self._shards:
            return

        unit = self._unit_of[parameter]
        if not torch.is_grad_enabled():
            self._without_grad[unit] += 1

        # Tensors of torch.func's transforms cannot become the data of a parameter.
        with torch._C._DisableFuncTorch():
            gathered = self.on_demand.fetch(unit)
            for member, full in zip(self._units[unit], gathered, strict=True):
                if member in self._full:
                    continue
                self._full[member] = full
                set_data([(member, full)])
                if self._saved_hooks is not None:
                    regather = partial(Pending, partial(self.again, member))
                    self._saved_hooks.know(self._shards[member], regather, full)

    def again(self, parameter: nn.Parameter) -> Tensor:
        """Return the full parameter for the backward.

        Collective as `OnDemandGather.fetch`, unless the parameter is full or of the unit that was
        re-gathered last.
        """
        full = self._full.get(parameter)
        if full is not None:
            return full

        if self._without_grad:
            # The backward may need the memory of units that stayed full for generation.
            repeated = [unit for unit, times in self._without_grad.items() if times > 1]
            self._drop_unused(repeated)
            self._without_grad.clear()

        if parameter not in self._regathered:
            self._regathered.clear()
            unit = self._unit_of[parameter]
            gathered = self.on_demand.fetch(unit)
            self._regathered.update(zip(self._units[unit], gathered, strict=True))
        return self._regathered[parameter]

    def _install(self) -> None:
        """Divide the parameters into units, and let modules gather those that they need.

        A unit has the parameters of a block, or of a module outside of blocks, of one dtype, up to
        a bucket's bytes.
        """
        block_of = _blocks(self._module)
        scripted_of = _scripted_modules(self._module)

        # Units that a module needs: of its own parameters, and of its block. Dicts keep the order.
        units_of: dict[nn.Module, dict[int, None]] = {}

        # The last unit of a block and a dtype, which may have space left.
        open_units: dict[tuple[nn.Module, torch.dtype], int] = {}

        for owner in self._module.modules():
            sharded = [p for p in owner._parameters.values() if p in self._sharded]
            if not sharded:
                continue
            gathering = _GatherOnAccess(owner._parameters, self)
            self._installed.enter_context(patched([(vars(owner), "_parameters", gathering)]))

            block = block_of.get(owner, owner)
            for parameter in sharded:
                if parameter not in self._unit_of:
                    self._add_to_unit(parameter, block, open_units)
                unit = self._unit_of[parameter]
                for module in (owner, block, scripted_of.get(owner, owner)):
                    units_of.setdefault(module, {})[unit] = None

        for module, units in units_of.items():
            # The step calls `training_step`, not the root's forward.
            if module is not self._module:
                self._watch(module, list(units))

    def _add_to_unit(
        self,
        parameter: nn.Parameter,
        block: nn.Module,
        open_units: dict[tuple[nn.Module, torch.dtype], int],
    ) -> None:
        """Put a parameter into the open unit of its block and dtype, or into a new one if full."""
        key = (block, parameter.dtype)
        num_bytes = self._store.full_bytes([parameter])
        unit = open_units.get(key)
        if unit is None or self._unit_bytes[unit] + num_bytes > BUCKET_BYTES:
            unit = len(self._units)
            open_units[key] = unit
            self._units.append([])
            self._unit_bytes.append(0)
        self._units[unit].append(parameter)
        self._unit_bytes[unit] += num_bytes
        self._unit_of[parameter] = unit

    def _watch(self, module: nn.Module, units: list[int]) -> None:
        """Let the parameters of `module`, and all of its `units`, be full while it runs."""
        if isinstance(module, torch.jit.ScriptModule):
            # TorchScript reads parameters without Python, those of submodules included.
            parameters: list[nn.Parameter | None] = list(module.parameters())
        else:
            # Not through `_GatherOnAccess`, which would gather them.
            own_parameters: dict[str, Any] = module._parameters
            parameters = list(dict.values(own_parameters))
        present = [parameter for parameter in parameters if parameter is not None]
        needed = [parameter for parameter in present if parameter in self._unit_of]

        def running(
            module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> Any:
            copy_forward = forward_of_copy(module)
            if copy_forward is not None:
                return copy_forward(*args, **kwargs)

            if self._depth and not self._keeps:
                for parameter in needed:
                    self.need(parameter)
                self._users.update(units)
            try:
                return forward(*args, **kwargs)
            finally:
                if self._depth and not self._keeps and not self._stays_full:
                    self._users.subtract(units)
                    finished = [unit for unit in units if not self._is_for_generation(unit)]
                    self._drop_unused(finished)

        # Not a hook: `extras/activation_checkpoint.py` calls a forward alone, once more for the
        # backward. A partial, not a decorated function: a copy of the module runs its own.
        forward = partial(running, module, module.forward)
        self._installed.enter_context(patched([(module, "forward", forward)]))

    def _is_for_generation(self, unit: int) -> bool:
        """Whether a unit is used repeatedly without a backward, as by a model that generates a
        token at a time.

        It then stays full until it is used with a backward, or until a backward starts. False if
        there is no room for all full parameters.
        """
        return self._has_room and not torch.is_grad_enabled() and self._without_grad[unit] > 1

    def _drop_unused(self, units: list[int]) -> None:
        """Free the full parameters of those of `units` with which no module runs."""
        for unit in units:
            if self._users[unit] > 0:
                continue
            for parameter in self._units[unit]:
                if parameter in self._full:
                    self._take_changes(parameter)
                    del self._full[parameter]
                    set_data([(parameter, self._without_values(parameter))])

    @torch.inference_mode(False)
    @torch.no_grad()
    def _start(self, unit: int) -> Wait:
        """Launch the gathering of a unit's parameters."""
        wait = self._store.start_gather({p: self._shards[p] for p in self._units[unit]})
        return torch.inference_mode(False)(torch.no_grad()(wait))

    def _may_start(self, unit: int, prefetched: list[int]) -> bool:
        """Whether `unit` may be prefetched in addition to those that are.

        The next unit always may, more if they fit. A unit that is full now, or will be earlier, may
        be changed by user code until it is re-gathered.
        """
        if prefetched:
            num_bytes = sum(self._unit_bytes[member] for member in (*prefetched, unit))
            if num_bytes > self._store.prefetched_bytes or unit in prefetched:
                return False
        return not any(parameter in self._full for parameter in self._units[unit])

    def _take_changes(self, parameter: nn.Parameter) -> None:
        """Write this rank's part of the full data into its shard, if it has one.

        `data` of the shard: the version that autograd counts for it stays the same.
        """
        if self._look is not None:
            self._look(parameter, parameter.data)
        if self._store.holds(parameter):
            with torch.inference_mode(False), torch.no_grad():
                shard = self._store.shard_like(parameter, parameter.data)
                self._shards[parameter].data.copy_(shard)

    def _initial_data(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter's data at the start of a pass: full, or a placeholder without
        memory.
        """
        full = self._full.get(parameter)
        return self._without_values(parameter) if full is None else full

    def _without_values(self, parameter: nn.Parameter) -> Tensor:
        """Return NaN (of integers 0) in the full shape, in the memory of one element."""
        has_nan = parameter.is_floating_point() or parameter.is_complex()
        value = float("nan") if has_nan else 0
        one = torch.full((), value, dtype=parameter.dtype, device=parameter.device)
        return one.expand(self._store.full_shape(parameter))


def _blocks(root: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return module -> the outermost item of a list of modules that contains it.

    Modules outside of lists are left out.
    """
    block_of: dict[nn.Module, nn.Module] = {}
    for container in root.modules():
        is_list = isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        if not is_list or container in block_of:
            continue
        for block in container.children():
            block_of.update((module, block) for module in block.modules() if module not in block_of)
    return block_of


def _scripted_modules(root: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return module -> the outermost TorchScript module that contains it.

    TorchScript runs the modules inside without Python, so the outermost has to gather for them.
    """
    scripted_of: dict[nn.Module, nn.Module] = {}
    for outer in root.modules():
        if isinstance(outer, torch.jit.ScriptModule):
            scripted_of |= {inner: scripted_of.get(inner, outer) for inner in outer.modules()}
    return scripted_of


class _GatherOnAccess(dict[str, Any]):
    """A module's own parameters by name, gathered when they are accessed."""

    def __init__(self, plain: dict[str, Any], on_use: EagerFullyShard) -> None:
        super().__init__(plain)
        self._on_use = on_use

    def __getitem__(self, name: str) -> Any:
        return self._gathered(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._gathered(super().get(name, default))

    def items(self) -> Any:
        return [(name, self._gathered(parameter)) for name, parameter in super().items()]

    def values(self) -> Any:
        return [self._gathered(parameter) for parameter in super().values()]

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module has ordinary parameters; within a step these have values.
        return dict, (dict(self.items()),)

    def _gathered(self, parameter: Any) -> Any:
        """Return the parameter, gathered first if the step is running."""
        if self._on_use.is_active and parameter is not None:
            self._on_use.need(parameter)
        return parameter
