"""User code that becomes one op each: custom `torch.autograd.Function`s, and submodules whose shapes depend on data.

Such an op takes and gives lists of tensors; what else the call was given is part of the op. It is composite, so
autograd sees what runs inside, the user's own backward included. How a Function may be sharded is found by experiment,
as for any op. What a module with data-dependent shapes computes (tokens picked for an expert) has no layout: every
device runs it whole, right whatever the code does, and everything around it is planned as usual.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from alpa_strategy.capture.python_state import patched
from alpa_strategy.errors import CaptureError, RuntimeMismatchError
from alpa_strategy.ir.custom_ops import CustomOp, register_custom_op
from alpa_strategy.ir.graph import stable_text
from alpa_strategy.ir.user_code import user_frame

FUNCTIONS, MODULES = "alpa_function", "alpa_as_written"  # namespaces of the ops; saved plans name them
MAX_ELEMENTS = 2**28  # of what one trial run, which finds the shapes of the results, may allocate

Pause = Callable[[], AbstractContextManager[None]]

_LIBRARIES = {namespace: torch.library.Library(namespace, "FRAGMENT") for namespace in (FUNCTIONS, MODULES)}
_APPLY = vars(torch.autograd.Function)["apply"].__func__  # capture puts its own in place of it


@dataclass(frozen=True)
class _Given:
    """What a call is given besides tensors."""

    spec: pytree.TreeSpec
    constants: tuple[Any, ...]  # leaves of the arguments; a Tensor's place is held by `Tensor` itself
    autocast: tuple[str, torch.dtype] | None

    @classmethod
    def of(cls, arguments: Any, device_type: str) -> _Given:
        """`arguments`: any pytree. The op runs under the autocast that its call stands in."""
        leaves, spec = pytree.tree_flatten(arguments)
        enabled = torch.is_autocast_enabled(device_type)
        autocast = (device_type, torch.get_autocast_dtype(device_type)) if enabled else None
        return cls(spec, tuple(Tensor if isinstance(x, Tensor) else x for x in leaves), autocast)

    @property
    def texts(self) -> tuple[Any, ...]:
        """What tells it from others, the same in every process once made a `stable_text`."""
        return str(self.spec), self.constants, self.autocast

    def __hash__(self) -> int:
        return hash(stable_text(self.texts))

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """The arguments with `tensors` in their places."""
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if x is Tensor else x for x in self.constants], self.spec)

    def region(self) -> AbstractContextManager[Any]:
        """The autocast region to run in."""
        return nullcontext() if self.autocast is None else torch.autocast(self.autocast[0], dtype=self.autocast[1])


class _OpaqueCall:
    """A call of the user's code that is an op: `run` takes and gives tensors."""

    namespace: str
    qualname: str
    text: str  # what the call is, the same in every process
    is_alive = True  # whether what it calls still exists; else its op may be used for another

    def __init__(self, given: _Given) -> None:
        self.given = given
        self._result_spec: pytree.TreeSpec | None = None
        self._are_tensors: list[bool] = []

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """What the op does."""
        raise NotImplementedError

    def opened(self, result: Any) -> list[Any]:
        """The leaves of what the code returned; `closed` knows their structure afterwards."""
        leaves, self._result_spec = pytree.tree_flatten(result)
        self._are_tensors = [isinstance(leaf, Tensor) for leaf in leaves]
        return leaves

    def closed(self, tensors: list[Tensor]) -> Any:
        """What the code returns, given the op's results: in the structure of its last run, None where it held none."""
        assert self._result_spec is not None
        rest = iter(tensors)
        leaves = [next(rest) if is_tensor else None for is_tensor in self._are_tensors]
        return pytree.tree_unflatten(leaves, self._result_spec)


_CALLS: dict[tuple[str, str], _OpaqueCall] = {}  # namespace and name of an op -> what it runs


def _define(call: _OpaqueCall, **known: Any) -> OpOverload:
    """An op for the call, under the first name that no living call has. known: fields of its CustomOp."""
    digest = hashlib.sha256(call.text.encode()).hexdigest()[:8]
    stem = f"{re.sub('[^A-Za-z0-9]+', '_', call.qualname)}_{digest}"
    key, number = (call.namespace, stem), 1
    while key in _CALLS and _CALLS[key].is_alive:  # other code of the same name and text
        number += 1
        key = (call.namespace, f"{stem}_{number}")
    if key not in _CALLS:
        _LIBRARIES[call.namespace].define(f"{key[1]}(Tensor[] tensors) -> Tensor[]")
        _LIBRARIES[call.namespace].impl(key[1], lambda tensors: _CALLS[key].run(tensors), "CompositeImplicitAutograd")
    _CALLS[key] = call
    op = getattr(getattr(torch.ops, call.namespace), key[1]).default
    register_custom_op(op, CustomOp(f"{call.namespace}.{stem}.default", **known))
    return op


# Functions


class _FunctionCall(_OpaqueCall):
    """A call of `function.apply`."""

    namespace = FUNCTIONS

    def __init__(self, function: type, given: _Given) -> None:
        super().__init__(given)
        self.function, self.qualname = function, function.__qualname__
        self.text = stable_text((function, *given.texts))

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        with self.given.region():
            leaves = self.opened(_APPLY(self.function, *self.given.filled(tensors)))
        if not all(isinstance(leaf, Tensor) or leaf is None for leaf in leaves):
            raise CaptureError(
                f"the autograd.Function {self.function.__name__} returns something that is no tensor",
                "return tensors only",
            )
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


_FUNCTION_OPS: dict[tuple[type, _Given], tuple[_FunctionCall, OpOverload]] = {}


def apply_as_op(function: Any, *args: Any) -> Any:
    """What `function.apply(*args)` returns, as one op of the step that is being traced.

    Raises:
        CaptureError: the Function changes a tensor in place.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    # Outside tracing; inside another Function; PyTorch's own wrapper of a custom op's backward.
    if get_proxy_mode() is None or not tensors or function.__module__.startswith("torch._library"):
        return _APPLY(function, *args)
    key = function, _Given.of(args, tensors[0].device.type)
    if key not in _FUNCTION_OPS:
        made = _FunctionCall(*key)
        _FUNCTION_OPS[key] = made, _define(made, python_code=(function.forward, function.backward))
    call, op = _FUNCTION_OPS[key]
    versions = [tensor._version for tensor in tensors]
    results = op(tensors)
    if [tensor._version for tensor in tensors] != versions:
        raise CaptureError(
            f"the autograd.Function {function.__name__} changes a tensor in place ({user_frame()})",
            "return a new tensor (and leave out ctx.mark_dirty)",
        )
    return call.closed(results)


# Modules


class DataShapeError(CaptureError):
    """A tensor's shape depends on its data.

    Attributes:
        modules: paths of the submodules whose forward was running, the innermost first.
    """

    modules: tuple[str, ...] = ()


class NotAloneError(Exception):
    """The submodule at `path` cannot be an op of its own."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


@dataclass(frozen=True)
class _Result:
    """One tensor that a module returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class _ModuleCall(_OpaqueCall):
    """A call of a module's forward; its operands are the tensors among the arguments, then parameters and buffers.

    Args:
        names: those of the parameters and buffers.
    """

    namespace = MODULES

    def __init__(
        self,
        module: nn.Module,
        path: str,
        forward: Callable[..., Any],
        names: tuple[str, ...],
        given: _Given,
        operands: list[Tensor],
    ) -> None:
        super().__init__(given)
        self._module = weakref.ref(module)  # a captured graph keeps no module alive
        self.path, self.forward, self.names, self.qualname = path, forward, names, type(module).__qualname__
        self.operand_shapes = _shapes(operands)
        self.results: tuple[_Result, ...] = ()

    @property
    def text(self) -> str:  # type: ignore[override]
        spec, constants, autocast = self.given.texts
        given = (self.path, self.names, spec, constants, self.operand_shapes, autocast)
        return stable_text((self.forward, (*given, str(self._result_spec), self.results)))

    @property
    def is_alive(self) -> bool:  # type: ignore[override]
        return self._module() is not None

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        if any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
            return self._fake(tensors)
        found = [t for t in pytree.tree_leaves(self._forward(tensors)) if isinstance(t, Tensor)]
        expected = tuple(r.shape for r in self.results)
        if _shapes(tensors) == self.operand_shapes and _shapes(found) != expected:
            raise RuntimeMismatchError(
                f"{self.path} returned shapes {list(_shapes(found))} where {list(expected)} were captured: they "
                "depend on data",
                "return tensors of fixed shapes from this module",
            )
        return [t.clone() if any(t is o for o in tensors) else t for t in found]

    def _forward(self, operands: list[Tensor]) -> Any:
        """What the module's forward returns on real tensors."""
        module = self._module()
        if module is None:
            raise RuntimeMismatchError(f"{self.path} was captured from a module that is gone", "plan again")
        num_given = len(operands) - len(self.names)
        args, kwargs = self.given.filled(operands[:num_given])
        state = dict(zip(self.names, operands[num_given:], strict=True))
        with self.given.region(), _reparametrize_module(module, state, tie_weights=True):
            return self.forward(module, *args, **kwargs)

    def _fake(self, operands: list[Tensor]) -> list[Tensor]:
        if _shapes(operands) != self.operand_shapes:
            raise RuntimeMismatchError(f"{self.path} was captured for other shapes", "plan again")
        device = operands[0].device
        grads = [t for t in operands if t.requires_grad]
        # A sum of nothing: it makes the results depend on the operands, which is all that autograd needs to know.
        anchor = sum((t.flatten()[:0].sum() for t in grads), start=torch.zeros((), device=device))
        made = (torch.empty(r.shape, dtype=r.dtype, device=device) for r in self.results)
        return [
            t + anchor.to(t.dtype) if r.requires_grad and grads else t for t, r in zip(made, self.results, strict=True)
        ]

    def try_out(self, operands: list[Tensor]) -> bool:
        """Run on made-up data of the operands' shapes to learn those of the results; whether it draws numbers.

        Raises:
            NotAloneError: the module does not run so, changes its attributes or buffers, or returns something else than
                tensors of fixed shapes.
        """
        module = self._module()
        assert module is not None
        if sum(t.numel() for t in operands) > MAX_ELEMENTS:
            raise NotAloneError(self.path)
        before = _attributes(module)
        outcomes: list[tuple[_Result, ...]] = []
        is_random = False
        for kind in _KINDS:
            data = [_made_up(t, kind) for t in operands]
            versions, state = [t._version for t in data], torch.get_rng_state()
            try:
                with torch.enable_grad():
                    leaves = self.opened(self._forward(data))
            except Exception as error:  # the user's code, given what it never was meant for
                if not outcomes:
                    raise NotAloneError(self.path) from error
                continue
            is_random |= not torch.equal(torch.get_rng_state(), state)
            if [t._version for t in data] != versions or not all(self._are_tensors):
                raise NotAloneError(self.path)
            outcomes.append(tuple(_Result(tuple(t.shape), t.dtype, t.requires_grad) for t in leaves))
        shapes = {tuple((r.shape, r.dtype) for r in outcome) for outcome in outcomes}
        after = _attributes(module)
        changed = len(after) != len(before) or any(x is not y for x, y in zip(before, after, strict=True))
        if changed or len(shapes) > 1 or not outcomes[0]:
            raise NotAloneError(self.path)
        self.results = outcomes[0]
        return is_random


_KINDS: dict[str, Callable[[torch.Size], Tensor]] = {
    "mixed": torch.randn,
    "positive": torch.rand,
    "negative": lambda shape: -torch.rand(shape),
}


def _made_up(like: Tensor, kind: str) -> Tensor:
    """Data that fits everywhere: random numbers, small indices, of the first kind 0 alone, True (or False)."""
    if like.dtype.is_floating_point or like.dtype.is_complex:
        data = _KINDS[kind](like.shape).to(like.dtype)
        return data.requires_grad_(like.requires_grad)
    if like.dtype == torch.bool:
        return torch.rand(like.shape) < {"mixed": 0.5, "positive": 1.0, "negative": 0.0}[kind]
    return torch.randint(1 if kind == "mixed" else 2, like.shape, dtype=like.dtype)


def _shapes(tensors: Iterable[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.shape) for t in tensors)


def _attributes(module: nn.Module) -> list[Any]:
    """Every attribute of the tree."""
    return [value for m in module.modules() for value in vars(m).values()]


_MODULE_OPS: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[_ModuleCall, OpOverload]]] = (
    weakref.WeakKeyDictionary()
)


@contextmanager
def opaque_modules(root: nn.Module, paths: tuple[str, ...], pause: Pause) -> Iterator[None]:
    """In the block, calls of these submodules of `root` are one op each.

    Args:
        pause: gives a context in which what runs is not captured.
    """
    chosen = {id(root.get_submodule(path)): path for path in paths}
    forwards = {type(module): type(module).forward for module in map(root.get_submodule, paths)}

    def standing_in(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = chosen.pop(id(self), None)  # its own code calls the forward of a parent class
            if path is None:
                return forward(self, *args, **kwargs)
            try:
                return _forward_as_op(self, path, forward, (args, kwargs), pause)
            finally:
                chosen[id(self)] = path

        return run

    with patched((cls, "forward", standing_in(forward)) for cls, forward in forwards.items()):
        yield


def _forward_as_op(module: nn.Module, path: str, forward: Callable[..., Any], arguments: Any, pause: Pause) -> Any:
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    operands = [*(x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)), *state.values()]
    if not operands:
        raise NotAloneError(path)
    given = _Given.of(arguments, operands[0].device.type)
    call = _ModuleCall(module, path, forward, tuple(state), given, operands)
    with pause(), _disable_current_modes(), torch.random.fork_rng(devices=[]):
        is_random = call.try_out(operands)
    known = _MODULE_OPS.setdefault(module, {})  # the same call of the same module is the same op in every capture
    if call.text not in known:
        known[call.text] = call, _define(call, is_opaque=True, is_random=is_random)
    call, op = known[call.text]
    return call.closed(op(operands))
