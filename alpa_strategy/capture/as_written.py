"""Submodules in which shapes of tensors depend on data (tokens picked for an expert): one op each, run as written.

What such a module computes inside has no fixed shapes, so no layout; what goes in and comes out has. Every device runs
the op whole: right whatever the code does. Everything around it is planned as usual.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from alpa_strategy.errors import CaptureError, RuntimeMismatchError
from alpa_strategy.ir.graph import stable_text

NAMESPACE = "alpa_as_written"
MAX_ELEMENTS = 2**28  # of what one trial run, which finds the shapes of the results, may allocate
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

Pause = Callable[[], AbstractContextManager[Any]]


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
    """One tensor that the module returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(eq=False)
class _Call:
    """A call of a module's forward; its operands are the tensors among the arguments, then parameters and buffers."""

    module: weakref.ref[nn.Module]
    path: str
    forward: Callable[..., Any]
    names: tuple[str, ...]  # of the parameters and buffers
    spec: pytree.TreeSpec
    constants: tuple[Any, ...]  # leaves of the arguments; a Tensor's place is held by `Tensor` itself
    operand_shapes: tuple[tuple[int, ...], ...]
    autocast: tuple[str, torch.dtype] | None
    results: tuple[_Result, ...] = ()
    result_spec: pytree.TreeSpec | None = None

    @property
    def text(self) -> str:
        """The same in every process."""
        given = (self.path, self.names, str(self.spec), self.constants, self.operand_shapes, self.autocast)
        given += (str(self.result_spec), self.results)
        return stable_text((self.forward, given))

    def run(self, operands: list[Tensor]) -> list[Tensor]:
        """The op: tensors that the module returns."""
        if any(isinstance(t, FakeTensor) or t.is_meta for t in operands):
            return self._fake(operands)
        found, _ = pytree.tree_flatten(self.call(operands))
        shapes = [tuple(t.shape) for t in found if isinstance(t, Tensor)]
        same_operands = tuple(tuple(t.shape) for t in operands) == self.operand_shapes
        if same_operands and self.results and shapes != [r.shape for r in self.results]:
            raise RuntimeMismatchError(
                f"{self.path} returned shapes {shapes} where {[r.shape for r in self.results]} were captured: they "
                "depend on data",
                "return tensors of fixed shapes from this module",
            )
        return [t.clone() if any(t is o for o in operands) else t for t in found]

    def call(self, operands: list[Tensor]) -> Any:
        """What the module's forward returns on real tensors."""
        module = self.module()
        if module is None:
            raise RuntimeMismatchError(f"{self.path} was captured from a module that is gone", "plan again")
        num_given = len(operands) - len(self.names)
        rest = iter(operands[:num_given])
        leaves = [next(rest) if constant is Tensor else constant for constant in self.constants]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        state = dict(zip(self.names, operands[num_given:], strict=True))
        region = nullcontext() if self.autocast is None else torch.autocast(self.autocast[0], dtype=self.autocast[1])
        with region, _reparametrize_module(module, state, tie_weights=True):
            return self.forward(module, *args, **kwargs)

    def _fake(self, operands: list[Tensor]) -> list[Tensor]:
        if tuple(tuple(t.shape) for t in operands) != self.operand_shapes:
            raise RuntimeMismatchError(f"{self.path} was captured for other shapes", "plan again")
        device = operands[0].device
        grads = [t for t in operands if t.requires_grad]
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
        module = self.module()
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
                    leaves, self.result_spec = pytree.tree_flatten(self.call(data))
            except Exception as error:  # the user's code, given what it never was meant for
                if not outcomes:
                    raise NotAloneError(self.path) from error
                continue
            is_random |= not torch.equal(torch.get_rng_state(), state)
            if [t._version for t in data] != versions or not all(isinstance(t, Tensor) for t in leaves):
                raise NotAloneError(self.path)
            outcomes.append(tuple(_Result(tuple(t.shape), t.dtype, t.requires_grad) for t in leaves))
        shapes = {tuple((r.shape, r.dtype) for r in outcome) for outcome in outcomes}
        after = _attributes(module)
        changed = len(after) != len(before) or any(x is not y for x, y in zip(before, after, strict=True))
        if changed or len(shapes) > 1 or not outcomes[0]:
            raise NotAloneError(self.path)
        self.results = outcomes[0]
        return is_random


_KINDS = {"mixed": torch.randn, "positive": torch.rand, "negative": lambda shape: -torch.rand(shape)}


def _made_up(like: Tensor, kind: str) -> Tensor:
    """Data that fits everywhere: random numbers, small indices, of the first kind 0 alone, True (or False)."""
    if like.dtype.is_floating_point or like.dtype.is_complex:
        data = _KINDS[kind](like.shape).to(like.dtype)
        return data.requires_grad_(like.requires_grad)
    if like.dtype == torch.bool:
        return torch.rand(like.shape) < {"mixed": 0.5, "positive": 1.0, "negative": 0.0}[kind]
    return torch.randint(1 if kind == "mixed" else 2, like.shape, dtype=like.dtype)


def _attributes(module: nn.Module) -> list[Any]:
    """Every attribute of the tree."""
    return [value for m in module.modules() for value in vars(m).values()]


_OPS: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[_Call, Any]]] = weakref.WeakKeyDictionary()
_OWNERS: dict[str, _Call] = {}  # op name -> what it runs


def _op_of(call: _Call, operands: list[Tensor], pause: Pause) -> tuple[_Call, Any]:
    """The op of a call, found again for the same call of the same module."""
    module = call.module()
    assert module is not None
    known = _OPS.setdefault(module, {})
    with pause(), _disable_current_modes(), torch.random.fork_rng(devices=[]):
        is_random = call.try_out(operands)
    if call.text not in known:
        digest = hashlib.sha256(call.text.encode()).hexdigest()[:8]
        stem = f"{re.sub('[^A-Za-z0-9]+', '_', type(module).__qualname__)}_{digest}"
        name, number = stem, 1
        while name in _OWNERS and _OWNERS[name].module() is not None:
            number += 1
            name = f"{stem}_{number}"
        if name not in _OWNERS:
            _LIBRARY.define(f"{name}(Tensor[] tensors) -> Tensor[]")
            _LIBRARY.impl(name, lambda tensors: _OWNERS[name].run(tensors), "CompositeImplicitAutograd")
        _OWNERS[name] = call
        op = getattr(getattr(torch.ops, NAMESPACE), name).default
        op.is_whole, op.is_random = True, is_random  # for sharding/discover.py and localize.py
        op.shared_name = f"{NAMESPACE}.{stem}.default"  # how many such modules live differs from process to process
        known[call.text] = call, op
    return known[call.text]


@contextmanager
def running_as_written(root: nn.Module, paths: tuple[str, ...], pause: Pause) -> Iterator[None]:
    """In the block, calls of these submodules of `root` are one op each.

    Args:
        pause: gives a context in which what runs is not captured.
    """
    chosen = {id(root.get_submodule(path)): path for path in paths}
    forwards = {type(module): type(module).forward for module in map(root.get_submodule, paths)}
    own = {cls: "forward" in vars(cls) for cls in forwards}
    for cls, forward in forwards.items():
        cls.forward = _standing_in(forward, chosen, pause)
    try:
        yield
    finally:
        for cls, forward in forwards.items():
            if own[cls]:
                cls.forward = forward
            else:
                del cls.forward


def _standing_in(forward: Callable[..., Any], chosen: dict[int, str], pause: Pause) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = chosen.pop(id(self), None)  # its own code calls the forward of a parent class
        if path is None:
            return forward(self, *args, **kwargs)
        try:
            return _as_op(self, path, forward, (args, kwargs), pause)
        finally:
            chosen[id(self)] = path

    return run


def _as_op(self: nn.Module, path: str, forward: Callable[..., Any], given: Any, pause: Pause) -> Any:
    leaves, spec = pytree.tree_flatten(given)
    state = dict(self.named_parameters()) | dict(self.named_buffers())
    operands = [*(x for x in leaves if isinstance(x, Tensor)), *state.values()]
    if not operands:
        raise NotAloneError(path)
    device = operands[0].device.type
    enabled = torch.is_autocast_enabled(device)
    call = _Call(
        weakref.ref(self),
        path,
        forward,
        tuple(state),
        spec,
        tuple(Tensor if isinstance(x, Tensor) else x for x in leaves),
        tuple(tuple(t.shape) for t in operands),
        (device, torch.get_autocast_dtype(device)) if enabled else None,
    )
    call, op = _op_of(call, operands, pause)
    assert call.result_spec is not None
    return pytree.tree_unflatten(op(operands), call.result_spec)
