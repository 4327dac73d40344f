"""Activation checkpointing of modules in eager steps: autograd saves the inputs of a module alone,
and the backward recomputes its forward (PyTorch's `checkpoint`).

The recomputation starts from the state in which the first forward started: random numbers, buffers,
attributes, and the containers in them. Its changes to these are undone, so that statistics are
updated once. What cannot be restored (a weight that was changed in between) is an error.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from alpa_strategy.capture.kept_state import snapshots_in
from alpa_strategy.capture.python_state import framework_attributes, patched, version_of
from alpa_strategy.capture.snapshots import Kind, take
from alpa_strategy.errors import OptionError, RuntimeMismatchError
from alpa_strategy.runtime.module_copies import forward_of_copy
from alpa_strategy.units import format_bytes

_MODULE_LISTS = (nn.ModuleList, nn.ModuleDict)

# Arguments that a forward cannot change, but for the data of a tensor.
_PLAIN = (Tensor, float, int, str, type(None))


def modules_to_checkpoint(
    root: nn.Module, remat: bool | tuple[str, ...] | None
) -> dict[str, nn.Module]:
    """Return, by name, the outermost modules that `PlanOptions.remat` selects in an eager step.

    Args:
        root: the module that is trained; names are relative to it.
        remat: patterns of module names. True and None select the items of lists of modules, and the
            items of inner lists instead of those that contain them; None may select nothing.

    Raises:
        OptionError: a pattern matches no module, or True finds no list with items to recompute.
    """
    callable_modules = {
        name: module
        for name, module in root.named_modules()
        if name and not isinstance(module, _MODULE_LISTS)
    }

    names: list[str] = []
    unmatched: list[str] = []
    if isinstance(remat, tuple):
        for pattern in remat:
            matching = [name for name in callable_modules if fnmatchcase(name, pattern)]
            names += matching
            if not matching:
                unmatched.append(repr(pattern))
    else:
        names = _names_of_list_items(root, callable_modules)
        if remat and not names:
            unmatched.append("True")

    if unmatched:
        raise OptionError(
            f"remat={unmatched[0]} names no module, and a step that runs eagerly has nothing else"
            " to recompute",
            'name modules that are called, such as "blocks.*" (True names the items of ModuleLists'
            " and Sequentials)",
        )

    outermost: dict[str, nn.Module] = {}
    for name in names:
        is_inside_another = any(name.startswith(f"{other}.") for other in names)
        if not is_inside_another:
            outermost[name] = callable_modules[name]
    return outermost


def _names_of_list_items(root: nn.Module, callable_modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the innermost items of lists of modules that have submodules.

    A layer without submodules is left out: autograd saves no more in it than its inputs.

    Args:
        root: whose lists are searched.
        callable_modules: its modules whose forward is called, by name.
    """
    items: set[nn.Module] = set()
    for container in root.modules():
        if not isinstance(container, (*_MODULE_LISTS, nn.Sequential)):
            continue
        for item in container.children():
            has_submodules = next(item.children(), None) is not None
            if has_submodules:
                items.add(item)

    return [
        name
        for name, module in callable_modules.items()
        if module in items and items.isdisjoint(module.children())
    ]


class Recomputation:
    """The recomputation of modules in the backwards of an eager run.

    Args:
        root: the module that is trained.
        remat: as of `modules_to_checkpoint`.
        headroom: bytes for all that autograd saves, if as few modules as possible are recomputed;
            None: all are.

    Raises:
        OptionError: as of `modules_to_checkpoint`.
    """

    def __init__(
        self, root: nn.Module, remat: bool | tuple[str, ...] | None, headroom: float | None
    ) -> None:
        self._modules = modules_to_checkpoint(root, remat)
        self._budget: ActivationBudget | None = None
        if headroom is not None:
            self._budget = ActivationBudget(root, self._modules, headroom)
        self._checkpoint = ModuleCheckpoint(root, self._budget)

    def installed(self) -> AbstractContextManager[None]:
        """Return the context of the run."""
        return self._checkpoint.installed(self._modules)

    def after_forward(self, loss: Tensor) -> str | None:
        """Measure the bytes that the forward of `loss` has saved for the backward.

        Returns:
            A line for the log; None if there is nothing new.
        """
        return None if self._budget is None else self._budget.ends_in(loss)


class ModuleCheckpoint:
    """Recomputes the forwards of modules in the backward.

    Modules run unchanged in evaluation, under `no_grad` and inside functions of torch.func.

    Args:
        root: the module that is trained; None: nothing is trained, and nothing recomputed.
        budget: decides which modules are recomputed; None: all.
    """

    def __init__(
        self, root: nn.Module | None = None, budget: "ActivationBudget | None" = None
    ) -> None:
        self._root = root
        self._budget = budget

    def installed(self, modules: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
        """Context in which the forwards of `modules`, by name, are checkpointed."""
        return patched(
            (module, "forward", partial(self._forward, name, module, module.forward))
            for name, module in modules.items()
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module (deepcopy, pickle) is not trained by this run: it recomputes nothing.
        return type(self), ()

    @torch.compiler.disable
    def _forward(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the module's forward under `torch.utils.checkpoint`, unless autograd records no
        training step, or the memory budget allows to save its activations.
        """
        copy_forward = forward_of_copy(module)
        if copy_forward is not None:
            return copy_forward(*args, **kwargs)

        if not self._is_in_training_step():
            return forward(*args, **kwargs)

        arguments = (*args, *kwargs.values())
        if self._budget is not None and not self._budget.is_short_for(name, arguments):
            return self._budget.learn(name, forward(*args, **kwargs), arguments)

        # Each distinct object is passed to `checkpoint` once: modules may test `query is key`.
        snapshot = ForwardSnapshot(name, module, arguments)
        unique: list[Any] = []
        index_of_id: dict[int, int] = {}
        for value in arguments:
            if id(value) not in index_of_id:
                index_of_id[id(value)] = len(unique)
                unique.append(value)
        indices = [index_of_id[id(value)] for value in arguments]

        def run(*unique: Any) -> Any:
            values = [unique[index] for index in indices]
            positional = values[: len(args)]
            named = dict(zip(kwargs, values[len(args) :], strict=True))
            with snapshot.entered():
                return forward(*positional, **named)

        return checkpoint(run, *unique, use_reentrant=False)

    def _is_in_training_step(self) -> bool:
        """Whether autograd records this forward for the backward of a training step."""
        if self._root is None or not self._root.training or not torch.is_grad_enabled():
            return False
        # Tensors inside a function of torch.func cannot be saved for a later recomputation.
        return torch._C._functorch.peek_interpreter_stack() is None


class ActivationBudget:
    """Decides which modules are recomputed so that one pass (a forward and its backward) fits in
    memory: the first ones in the order of their calls, as few as suffice.

    Bytes saved in a module are taken as proportional to the bytes of its inputs. The factor is
    measured at the first call of each kind of module, which is not recomputed. Bytes saved outside
    of the modules are measured in the first backward; until then half of the budget is reserved for
    them.

    Args:
        root: the module that is trained; its parameters and buffers are not counted.
        modules: those that may be recomputed, by name.
        num_bytes: the budget for all that autograd saves for the backward.
    """

    def __init__(self, root: nn.Module, modules: Mapping[str, nn.Module], num_bytes: float) -> None:
        self._num_bytes = num_bytes
        self._has_reported = False
        self._tensors = [*root.parameters(), *root.buffers()]

        # Modules of one class with parameters of the same shapes are of one kind.
        self._kinds: dict[str, Any] = {}
        for name, module in modules.items():
            shapes = (parameter.shape for parameter in module.parameters())
            self._kinds[name] = (type(module), *shapes)

        # By kind: bytes saved for the backward per byte of input.
        self._saved_per_input_byte: dict[Any, float] = {}

        # By name: bytes of a module's inputs at its last call.
        self._input_bytes: dict[str, int] = {}

        # Bytes saved outside of the modules, of the pass with the largest inputs, and the bytes of
        # all modules' inputs in it.
        self._outside_bytes: float | None = None
        self._outside_input_bytes = 0

        self._start_pass()

    def _start_pass(self) -> None:
        """Reset what is counted in one forward pass."""
        # Names of modules that have not been called in this pass.
        self._pending = set(self._kinds)

        # Modules that are recomputed in this pass, and the bytes that each of them does not save.
        self._recomputed: dict[str, float] = {}

        # Bytes saved in modules that are not recomputed, and bytes of inputs of those that are.
        self._saved_bytes = 0.0
        self._recomputed_input_bytes = 0.0

        # Inputs of the module that runs now, with their versions.
        self._input_versions: list[tuple[Tensor, int]] = []

    def is_short_for(self, name: str, arguments: Iterable[Any]) -> bool:
        """Return whether module `name` has to be recomputed because the budget is too small for it
        and all modules that are still to be called.

        The first call in a pass whose arguments are tensors, numbers, strings, None or containers
        of these decides. Before it, a call with others is not recomputed: the module may change
        them.
        """
        leaves = list(arguments)
        if not all(isinstance(leaf, _PLAIN) for leaf in leaves):
            leaves = tree_leaves(leaves)
        is_plain = all(isinstance(leaf, _PLAIN) for leaf in leaves)
        if name not in self._pending or not is_plain:
            return name in self._recomputed

        self._pending.remove(name)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self._input_bytes[name] = num_bytes

        ratio = self._saved_per_input_byte.get(self._kinds[name])
        if ratio is None:
            self._input_versions = [(tensor, version_of(tensor)) for tensor in tensors]
            return False

        needed = self._saved_bytes + self._recomputed_input_bytes + num_bytes * (1 + ratio)
        needed += self._pending_bytes(num_bytes, ratio)
        if self._outside_bytes is None:
            available = self._num_bytes / 2
        else:
            available = self._num_bytes - self._outside_bytes

        is_short = needed > available
        if is_short:
            self._recomputed[name] = num_bytes * ratio
            self._recomputed_input_bytes += num_bytes
        else:
            self._saved_bytes += num_bytes * (1 + ratio)
        return is_short

    def _pending_bytes(self, default_input_bytes: int, default_ratio: float) -> float:
        """Return the bytes that modules not yet called save if they are not recomputed.

        Args:
            default_input_bytes: bytes of inputs of a module that has not been called yet.
            default_ratio: saved bytes per byte of inputs of a kind that has not been measured.
        """
        total = 0.0
        for name in self._pending:
            num_bytes = self._input_bytes.get(name, default_input_bytes)
            ratio = self._saved_per_input_byte.get(self._kinds[name], default_ratio)
            total += num_bytes * (1 + ratio)
        return total

    def learn(self, name: str, output: Any, arguments: Iterable[Any]) -> Any:
        """Measure the bytes saved in a module that is not recomputed, and return its `output`. Only
        the first module of each kind is measured, and none that changes its inputs in place.

        Args:
            name: of the module.
            output: of its forward.
            arguments: of its forward.
        """
        kind = self._kinds[name]
        num_bytes = self._input_bytes.get(name, 0)
        input_versions = self._input_versions
        self._input_versions = []

        # A module that changes its inputs in place cannot be recomputed: its kind stays unknown.
        leaves_inputs = all(version_of(tensor) == version for tensor, version in input_versions)
        if kind not in self._saved_per_input_byte and num_bytes and leaves_inputs:
            ratio = saved_for_backward_bytes(output, arguments, self._tensors) / num_bytes
            self._saved_per_input_byte[kind] = ratio
            self._saved_bytes += num_bytes * (1 + ratio)
        return output

    def ends_in(self, loss: Tensor) -> str | None:
        """End the pass in the backward of `loss`.

        Returns:
            A line for the log that reports how many modules are recomputed; None when there is
            nothing new to report.
        """
        was_known = self._outside_bytes is not None
        input_bytes = sum(self._input_bytes.values())
        if self._outside_bytes is None or input_bytes > self._outside_input_bytes:
            all_saved = saved_for_backward_bytes(loss, (), self._tensors)
            self._outside_bytes = max(0.0, all_saved - self._saved_bytes)
            self._outside_input_bytes = input_bytes

        recomputed = list(self._recomputed)
        largest = max(self._recomputed.values(), default=0.0)
        needed = self._outside_bytes + self._recomputed_input_bytes
        needed += max(self._saved_bytes, largest)
        self._start_pass()

        if not was_known or not recomputed or self._has_reported:
            return None
        self._has_reported = True
        return (
            f"a step's backward needs {format_bytes(needed)}, parameters leave"
            f" {format_bytes(self._num_bytes)} for it:"
            f" {len(recomputed)} of {len(self._kinds)} modules are recomputed in it, from"
            f" {recomputed[0]} to {recomputed[-1]}"
        )


def saved_for_backward_bytes(results: Any, until: Any, apart: Iterable[Tensor]) -> int:
    """Return the bytes that autograd has saved for the backward of `results`.

    What hooks of saved tensors put in the place of tensors (recomputed activations, sharded
    parameters) is not counted.

    Args:
        results: tensors, or containers of them, at which the backward starts.
        until: tensors, or containers of them, at which it ends. Their memory is not counted.
        apart: tensors whose memory is not counted either.
    """
    ends = [leaf for leaf in tree_leaves(until) if isinstance(leaf, Tensor)]
    visited: set[Any] = {None, *(end.grad_fn for end in ends)}
    starts: set[Any] = {leaf.grad_fn for leaf in tree_leaves(results) if isinstance(leaf, Tensor)}
    waiting = starts - visited

    uncounted = set(apart)
    storage_bytes: dict[int, int] = {}
    while waiting:
        node = waiting.pop()
        visited.add(node)
        waiting |= {previous for previous, _ in node.next_functions} - visited
        storage_bytes |= _saved_storages(node, uncounted)

    known = {
        tensor.untyped_storage()._cdata
        for tensor in (*ends, *uncounted)
        if tensor.layout is torch.strided
    }
    return sum(num_bytes for storage, num_bytes in storage_bytes.items() if storage not in known)


def _saved_storages(node: Any, uncounted: set[Tensor]) -> dict[int, int]:
    """Return the bytes of the memory that one node of autograd's graph has saved for the backward.

    Args:
        node: of the graph.
        uncounted: tensors that are left out.

    Returns:
        Address of the storage -> its bytes, of dense tensors.
    """
    storage_bytes: dict[int, int] = {}
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        # RuntimeError: an earlier backward has freed what the node saved.
        with suppress(RuntimeError):
            saved = [getattr(leaf, "data", None) for leaf in tree_leaves(getattr(node, name))]
            tensors = [value for value in saved if isinstance(value, Tensor)]
            dense = [tensor for tensor in tensors if tensor.layout is torch.strided]

            # A parameter whose data was exchanged since then (ZeRO-2) is known by the tensor alone,
            # not by its memory.
            counted = [tensor for tensor in dense if uncounted.isdisjoint((tensor, tensor._base))]
            storages = [tensor.untyped_storage() for tensor in counted]
            storage_bytes |= {storage._cdata: storage.nbytes() for storage in storages}
    return storage_bytes


def _namespaces(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attributes and the buffers of every module in the tree, as dicts by name."""
    for submodule in module.modules():
        yield from (vars(submodule), submodule._buffers)


def _record_state(module: nn.Module, arguments: Iterable[Any]) -> Callable[[], None]:
    """Record the Python state of a module's tree, of `arguments` and of random number generators.

    Tensors are not recorded.

    Returns:
        A function that restores this state.
    """
    skipped = framework_attributes()
    values: list[Any] = []
    for namespace in _namespaces(module):
        values += [value for name, value in namespace.items() if name not in skipped]
    values += arguments
    values = [v for v in values if not isinstance(v, Tensor | int | float | str | None)]
    values += [random.random.__self__, np.random.rand.__self__]  # type: ignore[attr-defined]

    recorded = [take(Kind.NAMES, "", names) for names in _namespaces(module)]

    # The namespaces above have the modules' own attributes already.
    visited = set(map(id, module.modules()))
    for value in values:
        recorded += snapshots_in(value, "", visited)

    def restore() -> None:
        for item in recorded:
            item.restore()

    return restore


class ForwardSnapshot:
    """The state in which a module's forward started, from which it can be recomputed.

    Args:
        name: of the module, for messages.
        module: whose forward is about to run.
        arguments: of this forward, positional and by keyword.
    """

    def __init__(self, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._name = name
        self._module = module
        self._has_run = False
        self._other_arguments = [value for value in arguments if not isinstance(value, Tensor)]
        self._restore = _record_state(module, self._other_arguments)

        # Values of buffers and of other tensors of the module.
        self._values = {tensor: tensor.detach().clone() for tensor in self._state_tensors()}

        # Versions of tensors that have to be unchanged when the forward is recomputed.
        inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        versions = {tensor: version_of(tensor) for tensor in (*self._values, *inputs)}
        self._versions = WeakIdKeyDictionary(versions)

    def _state_tensors(self) -> list[Tensor]:
        """Return the buffers, and the attributes that are tensors without a graph."""
        tensors: list[Tensor] = []
        for namespace in _namespaces(self._module):
            for value in namespace.values():
                if isinstance(value, Tensor) and not value.requires_grad:
                    tensors.append(value)
        return tensors

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context of one forward: the first, or a recomputation, whose changes are undone.

        Raises:
            RuntimeMismatchError: a tensor that cannot be restored was changed since the first
                forward.
        """
        if not self._has_run:
            self._has_run = True
            yield
            self._drop_superfluous()
            self._check_unchanged()
            return

        self._check_unchanged()
        restore_current = _record_state(self._module, self._other_arguments)
        self._restore()
        copies: dict[int, Tensor] = {}
        for tensor in self._state_tensors():
            copies[id(tensor)] = self._values.get(tensor, tensor).clone()
        for namespace in _namespaces(self._module):
            replaced = {
                n: copies[id(value)] for n, value in namespace.items() if id(value) in copies
            }
            namespace.update(replaced)
        try:
            yield
        finally:
            restore_current()

    def _check_unchanged(self) -> None:
        """Check that the forward's inputs are unchanged when it is recomputed.

        Raises:
            RuntimeMismatchError: one was changed in place.
        """
        if any(version_of(tensor) != version for tensor, version in self._versions.items()):
            raise RuntimeMismatchError(
                f"a tensor that {self._name} computes with is changed in place before its backward,"
                " which recomputes it",
                "change a copy, or change it after the backward, or save all activations"
                " (remat=False)",
            )

    def _drop_superfluous(self) -> None:
        """Store either the value or the version of each tensor after the first forward.

        Values are kept of tensors that this forward changed, and of vectors: norms update their
        statistics without a new version.
        """
        for tensor in list(self._values):
            needs_value = tensor.ndim < 2 or version_of(tensor) != self._versions[tensor]
            if needs_value:
                del self._versions[tensor]
            else:
                del self._values[tensor]

        # `parameters()` could gather sharded parameters: `dict.values` reads them as they are.
        for submodule in self._module.modules():
            for parameter in dict.values(submodule._parameters):
                if parameter is not None:
                    self._versions[parameter] = parameter._version
