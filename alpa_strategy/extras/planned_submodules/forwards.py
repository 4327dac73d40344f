"""The forwards of submodules in a `SubmoduleRun`: eager, recorded, or computed by a program."""

import pickle
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.capture.non_tensor_inputs import leaves_hold
from alpa_strategy.capture.python_state import patched
from alpa_strategy.extras.planned_submodules.call_order import CallOrder
from alpa_strategy.extras.planned_submodules.calls import Call, hooks_in
from alpa_strategy.ir.guards import changed_value
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lightning.job import Job
from alpa_strategy.lightning.shape_key import shape_key
from alpa_strategy.lightning.step_effects import materialize_output
from alpa_strategy.pipeline.step_programs import PlanRuntime
from alpa_strategy.runtime.module_copies import forward_of_copy


class Program:
    """Runs the calls of a submodule that have the same signature as the recorded one.

    Args:
        call: the recorded call.
        runtime: the runtime of the plan.
        plan: the plan.
        order: of the calls that the ranks of the plan make together.
    """

    def __init__(self, call: Call, runtime: PlanRuntime, plan: Plan, order: CallOrder) -> None:
        assert call.step is not None
        self.path = call.path
        self._step = call.step
        self._output = call.output
        self._program = runtime.training_program(call.step, plan)
        self._device = runtime.store.device.type
        self._key = shape_key(call.inputs)
        self._trained = _trained(call.inputs)
        self._hooks = hooks_in(runtime.module.get_submodule(call.path))
        # Stand for the inputs of earlier calls in the graph.
        self._before = [None] * call.first
        self._order = order

    def serves(self, inputs: Any) -> bool:
        """Whether it can compute the forward for inputs (args, kwargs), with the submodule's state
        now.
        """
        if shape_key(inputs) != self._key or any(self._hooks):
            return False
        if not _trained(inputs) <= self._trained:
            return False

        is_same = changed_value(self._step.attributes) is None
        return is_same and leaves_hold(self._step.leaves, [self._before, inputs])

    def __call__(self, inputs: Any) -> Any:
        """Return the submodule's output for the inputs (args, kwargs). Collective."""
        with torch._C.DisableTorchFunction(), torch.autocast(self._device, enabled=False):
            batch = pytree.tree_map_only(Tensor, Tensor.contiguous, [self._before, inputs])
            leaves = pytree.tree_leaves(batch)
            values = self._program.run(leaves, {})
            differentiable = [value for value in values if values[value].requires_grad]
            if differentiable:
                tensors = [values[value] for value in differentiable]
                tensors_in_order = self._order.in_backward(self.path, tensors)
                values |= zip(differentiable, tensors_in_order, strict=True)
            return materialize_output(self._output, values)


def _trained(inputs: Any) -> set[int]:
    """Return the indices of the leaves that require gradients."""
    indices = set()
    for index, leaf in enumerate(pytree.tree_leaves(inputs)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            indices.add(index)
    return indices


class Forwards:
    """Forwards of submodules: eager, eager and recorded, or computed by a program.

    Copies and pickles are inactive.

    Args:
        programs: the programs.
        job: the job; None: inactive.
        records: whether calls are recorded.
        order: of the calls that the ranks of the programs make together.
    """

    def __init__(
        self,
        programs: Sequence[Program] = (),
        job: Job | None = None,
        records: bool = False,
        order: CallOrder | None = None,
    ) -> None:
        self._programs = programs
        self._order = order
        # Recorded calls, callers before callees; None: calls are not recorded.
        self.recorded = list[Call]() if records else None
        # Path and signature of a recorded call -> its index.
        self._indices: dict[Any, int] = {}
        # Indices of the calls that are running, outermost first.
        self._callers: list[int] = []
        # True in a step and in its backward, which may recompute forwards.
        self.is_active = False
        self._device = "cpu" if job is None else job.device.type
        with nullcontext() if job is None else job.context():
            self._casts = _casts(self._device)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def installed(self, root: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which forwards of submodules of `root` are replaced: those that have
        a program, and all with parameters if calls are recorded. Scripted ones stay as they are.
        """
        paths = {program.path for program in self._programs}
        patches = []
        for path, module in root.named_modules():
            if not path or isinstance(module, torch.jit.ScriptModule):
                continue
            has_parameters = next(module.parameters(), None) is not None
            is_recorded = self.recorded is not None and has_parameters
            if path in paths or is_recorded:
                forward = partial(self._forward, path, module, module.forward)
                patches.append((module, "forward", forward))
        return patched(patches)

    @torch.compiler.disable
    def _forward(
        self,
        path: str,
        module: nn.Module,
        forward: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a planned module: by its program if one serves these inputs, else by its own forward.

        While a capture records, the call is recorded.
        """
        copied_forward = forward_of_copy(module)
        if copied_forward is not None:
            return copied_forward(*args, **kwargs)
        # Programs cannot compute with the tensors of torch.func's transforms.
        if not self.is_active or torch._C._functorch.peek_interpreter_stack() is not None:
            return forward(*args, **kwargs)

        inputs = (args, kwargs) if _casts(self._device) == self._casts else None
        if self.recorded is None:
            program = self._common_program(path, inputs)
            return forward(*args, **kwargs) if program is None else program(inputs)

        self._callers.append(self._record(self.recorded, path, inputs))
        try:
            return forward(*args, **kwargs)
        finally:
            self._callers.pop()

    def _common_program(self, path: str, inputs: Any) -> Program | None:
        """Return the program that serves the call on all ranks, None if there is none. Collective.

        Args:
            path: path of the submodule.
            inputs: (args, kwargs); None: they cannot be planned.

        Raises:
            UnlikeStepsError: ranks call other submodules, or none any more.
        """
        assert self._order is not None
        serving = None
        choice: Hashable = None
        for index, program in enumerate(self._programs if inputs else ()):
            if program.path == path and program.serves(inputs):
                serving = program
                # The backwards must be the same, too.
                choice = (index, torch.is_grad_enabled(), tuple(sorted(_trained(inputs))))
                break
        is_same = self._order.meet(f"the forward of {path}", choice)
        return serving if is_same else None

    def _record(self, recorded: list[Call], path: str, inputs: Any) -> int:
        """Return the index of the recorded call with the same signature; record it if new.

        Args:
            recorded: the recorded calls.
            path: path of the submodule.
            inputs: (args, kwargs); None: they cannot be planned.
        """
        key: tuple[str, Any] = path, None
        planned_inputs = None
        # Inputs that cannot be compared, or sent to other ranks, raise errors of many types. Such a
        # call is recorded without inputs.
        with suppress(Exception):
            to_meta = partial(torch.empty_like, device="meta")
            on_meta = pytree.tree_map_only(
                Tensor, lambda x: to_meta(x, requires_grad=x.requires_grad), inputs
            )
            pickle.dumps(on_meta)
            signature = shape_key(inputs)
            if hash(signature) and inputs:
                key = path, signature
                planned_inputs = on_meta

        index = self._indices.setdefault(key, len(recorded))
        if index == len(recorded):
            caller = self._callers[-1] if self._callers else None
            recorded.append(Call(path, planned_inputs, caller))
        if planned_inputs is not None:
            # An input requires a gradient if it does in any call.
            for leaf in _trained(inputs):
                pytree.tree_leaves(recorded[index].inputs)[leaf].requires_grad_(True)
        return index


def _casts(device: str) -> tuple[bool, torch.dtype, torch.dtype]:
    """Return whether autocast is on, its dtype, and the default dtype."""
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.get_default_dtype(),
    )
