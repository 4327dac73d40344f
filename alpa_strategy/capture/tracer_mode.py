"""Where traced ops come from, the submodule and the user's line, and what must not be traced."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from alpa_strategy.capture.data_branches import (
    UNKNOWN,
    ConstantValues,
    passing_answer,
    raised_where_not,
)
from alpa_strategy.capture.graph_builder import storages_of
from alpa_strategy.capture.intercept import Recording
from alpa_strategy.capture.ops import ctc_replacement, grouped_mm_replacement
from alpa_strategy.capture.outside_tensors import OutsideTensors
from alpa_strategy.capture.symbolic_scalars import StepCounter, alike
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.user_code import user_frame, user_position

_TRUTH = Tensor.__bool__
# What makes tensors of one number -> its position.
_CREATIONS: dict[Any, int] = dict.fromkeys(
    (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor), 0
)
_CREATIONS |= {torch.full: 1, torch.full_like: 1, Tensor.new_full: 2, Tensor.new_tensor: 1}
_OF_DATA: Any = Tensor.data
_FLAG: Any = Tensor.requires_grad
_DATA, _SET_DATA = _OF_DATA.__get__, _OF_DATA.__set__  # what they give is no tensor of the trace


class TracerMode(TorchFunctionMode):
    """Records for every traced node which submodule and which line of the user's it comes from;
    refuses what must not be traced.

    Args:
        module: whose step is traced.
        origins: gets node -> (path of the submodule, the user's line).
        device: on which the step is traced.
        known: values of tensors that are the same at every step.
        record: of the step's effects.
    """

    def __init__(
        self,
        module: nn.Module,
        origins: dict[fx.Node, tuple[str, str]],
        device: torch.device,
        known: ConstantValues,
        record: Recording,
    ) -> None:
        super().__init__()
        self.module = module
        self.record = record
        self.device, self.known = device, known
        self.origins = origins
        # The first name of a shared submodule wins.
        self.paths = {id(child): name for name, child in reversed(list(module.named_modules()))}
        self.stack = [""]
        self.outside = OutsideTensors()

    def _truth(self, tensor: Tensor) -> bool:
        """Return `bool(tensor)` in the step, also inside functions of torch, which the mode does
        not see into.

        A value that is the same at every step is returned. Of an `assert` or `if ...: raise` the
        answer that passes is returned, and a check is recorded. Others are asked of the tensor,
        which raises in a trace.
        """
        answer = self.known.answer(_TRUTH, (tensor,), {})
        if answer is not UNKNOWN:
            return answer
        # 0: here, 1: the lambda, 2: the caller.
        asking = sys._getframe(2)
        answer = passing_answer(asking)
        if answer is None:
            return _TRUTH(tensor)
        raised = raised_where_not(asking, answer)
        self.record.checks.append((tensor.clone(), answer, user_frame(), *raised))
        return answer

    def __enter__(self) -> "TracerMode":
        # `if mask.any()` inside torch's own Python code asks here too; the mode sees the user's
        # calls only.
        Tensor.__bool__ = lambda tensor: self._truth(tensor)  # type: ignore
        Tensor.requires_grad = property(_FLAG.__get__, _set_flag)  # type: ignore
        self.hooks = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        )
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        del Tensor.__bool__, Tensor.requires_grad  # torch's own are the base class's
        self.outside.restore()
        super().__exit__(*exc)

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        """Push the path of `module`, which begins its forward; that of its caller if it was made in
        the step.

        Raises:
            CaptureError: it is an InstanceNorm with a cumulative average.
        """
        is_norm = isinstance(module, _NormBase) and not isinstance(module, _BatchNorm)
        if is_norm and module.momentum is None and module.training and module.track_running_stats:
            raise CaptureError(
                f"{type(module).__name__} {self.paths.get(id(module), '')} has momentum=None: a"
                " cumulative average "
                "reads the number of batches so far as a Python number, which the captured step"
                " would freeze",
                "give it a momentum, for example the default 0.1",
            )
        self.stack.append(
            self.paths.get(id(module), self.stack[-1])
        )  # made in the step: part of its caller

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """Pop the path of `module`, whose forward has ended."""
        self.stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(arg, torch.Generator) for arg in leaves):
            raise CaptureError(
                f"the step draws from a generator of its own ({user_frame()})",
                "leave `generator` out: seed_everything makes the run reproducible",
            )
        if any(type(arg) is StepCounter for arg in leaves):
            return self._with_counters(func, types, args, kwargs or {})
        _refuse_functions_of_functions(func, args, kwargs or {})
        self.outside.keep(func, leaves, kwargs or {})
        self._check_device(func, args, kwargs or {})
        answer = self.known.answer(func, args, kwargs or {})
        if answer is not UNKNOWN:
            return answer
        result = self._run(func, args, kwargs or {})
        proxy_mode = get_proxy_mode()
        if proxy_mode is not None:
            root = proxy_mode.tracer.graph._root
            node = root.prev
            if (
                node not in self.origins
            ):  # the call traced nodes: all since the last call's are its own
                position = user_position(sys._getframe(1))
                origin = (self.stack[-1], f"{position[0]}:{position[1]}" if position else "")
                while node is not root and node not in self.origins:
                    self.origins[node] = origin
                    node = node.prev
        return result

    def _with_counters(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call a function with examples in place of StepCounters.

        It is called with their values if an op cannot have such a number as an argument.
        """

        def call(func: Any, *args: Any, **kwargs: Any) -> Any:
            return self.__torch_function__(func, types, args, kwargs)

        def tensors_of(values: Iterable[Any], **like: Any) -> list[Any]:
            """Return the values with a 0-d tensor in place of each StepCounter."""
            tensors = []
            for value in values:
                is_counter = type(value) is StepCounter
                tensors.append(call(torch.full, (), value, **like) if is_counter else value)
            return tensors

        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = pytree.tree_map_only(StepCounter, StepCounter.as_number, args[1])
            # Torch would make a constant of a plain number that is written into a tensor.
            value = tensors_of(args[2:], dtype=args[0].dtype, device=args[0].device)
            return call(func, args[0], index, *value)

        # torch.distributions takes a StepCounter for a tensor.
        if func is torch.functional.broadcast_tensors:
            other = next((arg for arg in args if type(arg) is not StepCounter), None)
            if other is None:
                return call(func, *tensors_of(args, device=self.device))
            return call(func, *tensors_of(args, dtype=other.dtype, device=other.device))

        position = _CREATIONS.get(func, len(args))
        if position < len(args):
            return self._created(call, func, args, kwargs, position)

        is_traced, result = self.record.numbers.trace_call(
            lambda args, kwargs: call(func, *args, **kwargs), args, kwargs
        )
        if is_traced:
            _forget_constants(result)
            return result
        values = pytree.tree_map_only(StepCounter, lambda counter: counter.value, (args, kwargs))
        # Errors of the user's call are raised here.
        result = call(func, *values[0], **values[1])
        pytree.tree_map_only(StepCounter, StepCounter.as_number, (args, kwargs))
        return result

    def _created(
        self, call: Callable[..., Any], func: Any, args: Any, kwargs: Any, position: int
    ) -> Any:
        """Call a function that creates a tensor from StepCounters, such as torch.tensor, and return
        the tensor.

        It is created with zeros, then filled by an op that has the counter as an argument. A list
        of numbers becomes a stack of such tensors.

        Args:
            call: calls a function of torch.
            func: that creates tensors.
            position: of the argument with the counter, or a list with counters, in `args`.
        """
        before = args[:position]
        content = args[position]
        after = args[position + 1 :]
        if isinstance(content, list | tuple):
            items = [call(func, *before, item, *after, **kwargs) for item in alike(content)]
            return call(torch.stack, items)
        zero = type(content.value)(0)
        created = call(func, *before, zero, *after, **kwargs)
        return call(Tensor.fill_, created, content)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, or its replacement in captured steps."""
        for replacement in (ctc_replacement, grouped_mm_replacement):
            if (result := replacement(func, args, kwargs)) is not None:
                return result
        if func == Tensor.requires_grad_:
            _set_flag(args[0], (*args, *kwargs.values(), True)[1])
            return args[0]
        if func == _DATA:
            return args[0].detach()
        if func == _SET_DATA:
            return self._set_data(*args)
        return func(*args, **kwargs)

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """Write `value` into a parameter: `parameter.data = value`.

        Raises:
            CaptureError: `tensor` is no parameter, or would share memory with another one, or has
                another shape or dtype.
        """
        is_like = value.shape == tensor.shape and value.dtype == tensor.dtype
        shared = storages_of(value) & storages_of([*self.module.parameters()])
        if not isinstance(tensor, nn.Parameter) or not is_like or shared:
            raise CaptureError(
                f"the step assigns the `.data` of a tensor ({user_frame()})",
                "write into the tensor: x.copy_(y)",
            )
        with torch.no_grad():
            self.__torch_function__(Tensor.copy_, (), (tensor, value))

    def _check_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that a call makes no tensor on a device of another type than the step's.

        Fake tensors of a device that this build does not have would end the process when autograd
        sees them.

        Raises:
            CaptureError: it does.
        """
        candidates = (
            kwargs.get("device"),
            *(a for a in args if func is Tensor.to or isinstance(a, torch.device)),
        )
        devices = [torch.device(d) for d in candidates if isinstance(d, str | torch.device)]
        if func is Tensor.cuda:
            devices.append(torch.device("cuda"))
        for device in devices:
            if device.type != self.device.type:
                raise CaptureError(
                    f"the step asks for device {str(device)!r} ({user_frame()}) while the module is"
                    f" on {self.device}",
                    "use the module's device: device=self.device, or the device of another tensor",
                )


def _forget_constants(result: Any) -> None:
    """Let make_fx forget the constants of which tensors in `result` are made: they are examples of
    counters, which `torch.tensor(step / 10).item()` would return. Does nothing while nothing is
    traced.
    """
    proxy_mode = get_proxy_mode()
    if proxy_mode is None:
        return
    for tensor in pytree.tree_leaves(result):
        if not isinstance(tensor, FakeTensor):
            continue
        slot = get_proxy_slot(tensor, proxy_mode.tracer, None)
        if slot is not None:
            tensor.constant = slot.constant = None


def _set_flag(tensor: Tensor, value: bool) -> None:
    """Set `tensor.requires_grad`, as in an eager step.

    Raises:
        CaptureError: it would freeze or unfreeze a parameter.
    """
    if isinstance(tensor, nn.Parameter) and value != _FLAG.__get__(tensor):
        raise CaptureError(
            f"the step freezes or unfreezes a parameter ({user_frame()}): a captured step has all"
            " as they were",
            "do it in a hook such as on_train_batch_start",
        )
    # torch's own `requires_grad_(True)` does nothing to others.
    if tensor.is_leaf or value != _FLAG.__get__(tensor):
        _FLAG.__set__(tensor, value)


def _refuse_functions_of_functions(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse torch.cond, scan, while_loop and their like: they run functions as graphs of their
    own, which cannot be sharded.

    Raises:
        CaptureError: `func` is one of them.
    """
    arguments = (*args, *kwargs.values())
    if isinstance(func, torch._ops.HigherOrderOperator) and any(
        callable(a) and not isinstance(a, type) for a in arguments
    ):
        raise CaptureError(
            f"{func.name()} ({user_frame()}) runs functions as graphs of their own, which cannot be"
            " cut",
            "write loops in Python (they are unrolled), and torch.where for a choice that depends"
            " on data",
        )
