"""Where traced ops come from, the submodule and the user's line, and what must not be traced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from alpa_strategy.capture.data_branches import UNKNOWN, KnownValues, passing_answer
from alpa_strategy.capture.intercept import Recording
from alpa_strategy.capture.ops import ctc_replacement, grouped_mm, grouped_mm_replacement
from alpa_strategy.capture.symbolic_scalars import StepCounter, alike, with_tensors
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.counters import late
from alpa_strategy.ir.user_code import user_frame, user_position

_TRUTH = Tensor.__bool__
_CREATIONS = {  # what makes tensors of one number -> its position
    torch.full: 1,
    torch.full_like: 1,
    Tensor.new_full: 2,
    Tensor.new_tensor: 1,
    torch.tensor: 0,
    torch.as_tensor: 0,
    torch.asarray: 0,
    torch.scalar_tensor: 0,
}
_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # what they give is no tensor of the trace


class Origins(TorchFunctionMode):
    """Notes for every traced node which submodule and which user line asked for it; refuses what must not be traced."""

    def __init__(
        self,
        module: nn.Module,
        origins: dict[fx.Node, tuple[str, str]],
        device: torch.device,
        known: KnownValues,
        record: Recording,
    ) -> None:
        super().__init__()
        self.record = record
        self.device, self.known = device, known
        self.origins = origins
        self.paths = {id(child): name for name, child in reversed(list(module.named_modules()))}
        self.stack = [""]
        self.last: fx.Node | None = None
        self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs in the block is none of the step's: real tensors, as without capture."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def _truth(self, tensor: Tensor) -> bool:
        """`bool(tensor)`, also inside functions of torch, which the mode does not see into."""
        if self.is_paused:
            return _TRUTH(tensor)
        answer = self.known.answer(_TRUTH, (tensor,), {})
        if answer is not UNKNOWN:
            return answer
        answer = passing_answer(sys._getframe(2))
        if answer is None:
            return _TRUTH(tensor)
        self.record.checks.append((tensor.clone(), answer, user_frame()))
        return answer

    def __enter__(self) -> Origins:
        Tensor.__bool__ = lambda tensor: self._truth(tensor)
        self.hooks = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        )
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        del Tensor.__bool__  # torch's own is the base class's
        super().__exit__(*exc)

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        norm = isinstance(module, nn.modules.batchnorm._NormBase)
        if norm and module.momentum is None and module.training and module.track_running_stats:
            raise CaptureError(
                f"{type(module).__name__} {self.paths.get(id(module), '')} has momentum=None: a cumulative average "
                "reads the number of batches so far as a Python number, which the captured step would freeze",
                "give it a momentum, for example the default 0.1",
            )
        self.stack.append(self.paths.get(id(module), self.stack[-1]))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(arg, torch.Generator) for arg in leaves):
            raise CaptureError(
                f"the step draws from a generator of its own ({user_frame()})",
                "leave `generator` out: seed_everything makes the run reproducible",
            )
        if any(type(arg) is StepCounter for arg in leaves):
            return self._with_numbers(func, types, args, kwargs or {})
        _refuse_functions_of_functions(func, args, kwargs or {})
        self._check_device(func, args, kwargs or {})
        answer = self.known.answer(func, args, kwargs or {})
        if answer is not UNKNOWN:
            return answer
        result = self._run(func, args, kwargs or {})
        proxy_mode = get_proxy_mode()
        if proxy_mode is not None:
            nodes = proxy_mode.tracer.graph._root
            node = nodes.prev
            if node is not self.last:
                position = user_position(sys._getframe(1))
                origin = (self.stack[-1], f"{position[0]}:{position[1]}" if position else "")
                newest = node
                while node is not self.last and node is not nodes and node not in self.origins:
                    self.origins[node] = origin
                    node = node.prev
                self.last = newest
        return result

    def _with_numbers(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The call with tensors in place of StepCounters; with their values where it takes no tensors there."""

        def as_tensors(tree: Any) -> Any:
            return with_tensors(tree, self.record.numbers.made, self.device, exact=False)

        def as_number(arg: Any) -> Any:
            return arg.as_number() if type(arg) is StepCounter else arg

        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], pytree.tree_map(as_number, args[1]), *args[2:])
        checks = len(self.record.checks)
        position = _CREATIONS.get(func, len(args))
        try:
            if position < len(args):
                before, content, after = args[:position], args[position], args[position + 1 :]
                if isinstance(content, list | tuple):
                    parts = [self.__torch_function__(func, types, (*before, x, *after), kwargs) for x in alike(content)]
                    return self.__torch_function__(torch.stack, types, (parts,))
                empty = type(content.value)(0)
                made = self.__torch_function__(func, types, (*before, empty, *after), kwargs)
                return self.__torch_function__(Tensor.fill_, types, as_tensors((made, content)))
            return self.__torch_function__(func, types, *as_tensors((args, kwargs)))
        except (TypeError, DataDependentOutputException):
            del self.record.checks[checks:]
            found, result = self._with_literal(func, types, args, kwargs)
            if found:
                return result
            return self.__torch_function__(func, types, *pytree.tree_map(as_number, (args, kwargs)))

    def _with_literal(self, func: Any, types: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Whether the call is an op of which a StepCounter becomes an argument, and if so, what it gives."""
        counters = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) is StepCounter]
        proxy_mode = get_proxy_mode()
        if len(counters) != 1 or counters[0].seldom_changes or proxy_mode is None:
            return False, None
        number = late(counters[0].made, counters[0].value)
        root = proxy_mode.tracer.graph._root
        last = root.prev
        given = pytree.tree_map(lambda x: number.example if type(x) is StepCounter else x, (args, kwargs))
        try:
            result = self.__torch_function__(func, types, *given)
        except (TypeError, DataDependentOutputException):
            return False, None
        nodes, node = [], root.prev
        while node is not last:
            nodes.append(node)
            node = node.prev
        return (True, result) if self.record.numbers.add_literal(nodes, number) else (False, None)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, or what capture puts in its place."""
        loss = ctc_replacement(func, args, kwargs)
        if loss is not None:
            return loss
        experts = grouped_mm_replacement(func, args, kwargs)
        if experts is not None:
            return grouped_mm(*experts)
        if func == _DATA:
            return args[0].detach()
        if func == _SET_DATA:
            raise CaptureError(
                f"the step assigns the `.data` of a tensor ({user_frame()})", "write into the tensor: x.copy_(y)"
            )
        try:
            return func(*args, **kwargs)
        except DynamicOutputShapeException as error:
            error.modules = tuple(dict.fromkeys(path for path in reversed(self.stack) if path))
            raise

    def _check_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Fake tensors of a device that this build does not have would end the process when autograd sees them."""
        named = [kwargs.get("device"), *(args[1:] if func is Tensor.to else ())]
        devices = [torch.device(d) for d in named if isinstance(d, str | torch.device)]
        if func is Tensor.cuda:
            devices.append(torch.device("cuda"))
        for device in devices:
            if device.type != self.device.type:
                raise CaptureError(
                    f"the step asks for device {str(device)!r} ({user_frame()}) while the module is on {self.device}",
                    "use the module's device: device=self.device, or the device of another tensor",
                )


def _refuse_functions_of_functions(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """torch.cond, scan, while_loop and their like: what they do inside is a graph of its own, where no layout goes."""
    given = (*args, *kwargs.values())
    if isinstance(func, torch._ops.HigherOrderOperator) and any(callable(a) and not isinstance(a, type) for a in given):
        raise CaptureError(
            f"{func.name()} ({user_frame()}) runs functions as graphs of their own, which cannot be cut",
            "write loops in Python (they are unrolled), and torch.where for a choice that depends on data",
        )
