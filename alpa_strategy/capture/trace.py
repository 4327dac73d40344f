"""Run the step once on fake tensors and keep the ATen ops that it asked for, before autograd and autocast act on them.

`make_fx(pre_dispatch=True)` gives the graph that torch.export gives (linear, layer_norm, ... whole), about five times
faster. What comes out is an fx graph with in-place ops, grad-mode and autocast markers; `convert` makes the StepGraph.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from alpa_strategy.capture import grouped_mm
from alpa_strategy.capture.attributes import attribute_guards, attribute_reads, buffer_guards
from alpa_strategy.capture.blame import user_frame, user_line, user_position
from alpa_strategy.capture.checks import passing_answer
from alpa_strategy.capture.guards import StepCounter
from alpa_strategy.capture.known import UNKNOWN, KnownValues
from alpa_strategy.capture.leaves import (
    UnreadLeaf,
    index_of,
    is_tensor,
    may_be_unread,
    traced_with_leaves,
    value_text,
)
from alpa_strategy.capture.outside import outside_guards, trainer_guards
from alpa_strategy.capture.recorder import Recording, recording
from alpa_strategy.capture.step_graph import LeafRef
from alpa_strategy.errors import CaptureError

TRAINING = "training_step"  # every other step is an evaluation


@dataclass(frozen=True)
class TracedInput:
    """One tensor input of the traced graph. names: those of a parameter or buffer; leaf: index in the batch."""

    kind: str  # "parameter", "buffer" or "batch"
    names: tuple[str, ...]
    leaf: int
    requires_grad: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None = None


@dataclass(frozen=True)
class Trace:
    """The raw trace. `results` are, in graph output order, the tensor leaves of the pytree `results_spec`, which holds
    {"output", "logs", "metrics", "buffers", "checks"}; other leaves stand in `leaves` as they are. `read_leaves`:
    leaves of the batch that the step's Python looked at, with their values as text.
    """

    graph: fx.Graph
    module: fx.GraphModule
    inputs: tuple[TracedInput, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    recording: Recording
    origins: Mapping[fx.Node, tuple[str, str]]
    device: torch.device
    batch_size: int
    read_leaves: tuple[tuple[int, str], ...] = ()


class TensorLeaf:
    """Marks in `Trace.leaves` the place of the next graph output."""


def trace_step(
    module: LightningModule,
    batch: Any,
    *,
    rows_factor: int,
    step: str,
    batch_idx: int,
    dataloader_idx: int | None,
    context: Callable[[], AbstractContextManager[Any]] | None,
) -> Trace:
    """Trace `module.<step>(batch, batch_idx)` with batched leaves `rows_factor` times as long."""

    def trace(read: frozenset[int], seen: set[int]) -> Trace:
        return _trace_once(
            module,
            batch,
            rows_factor=rows_factor,
            step=step,
            batch_idx=batch_idx,
            dataloader_idx=dataloader_idx,
            context=context,
            read=read,
            seen=seen,
        )

    return traced_with_leaves(batch, trace)


def _trace_once(
    module: LightningModule,
    batch: Any,
    *,
    rows_factor: int,
    step: str,
    batch_idx: int,
    dataloader_idx: int | None,
    context: Callable[[], AbstractContextManager[Any]] | None,
    read: frozenset[int],
    seen: set[int],
) -> Trace:
    """One trace. read: leaves that enter with their values; `seen` gets those that the step looks at besides."""
    device = _capture_device(module, context)
    leaves, batch_spec = pytree.tree_flatten(batch)
    batch_size = _batch_size(leaves)
    names = _names_by_tensor(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    inputs: list[TracedInput] = []
    fakes: list[Tensor] = []
    with mode:
        for tensor, tensor_names in names:
            is_parameter = isinstance(tensor, nn.Parameter)
            fake = torch.empty_strided(tensor.shape, _strides(tensor), dtype=tensor.dtype, device=device)
            requires_grad = bool(tensor.requires_grad) and step == TRAINING
            fakes.append(nn.Parameter(fake, requires_grad) if is_parameter else fake)
            kind = "parameter" if is_parameter else "buffer"
            inputs.append(TracedInput(kind, tensor_names, -1, requires_grad, tuple(tensor.shape), tensor.dtype))
        num_state = len(fakes)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                batched = leaf.ndim >= 1 and leaf.size(0) == batch_size
                shape = (leaf.size(0) * rows_factor, *leaf.shape[1:]) if batched else tuple(leaf.shape)
                fakes.append(torch.empty(shape, dtype=leaf.dtype, device=device))
                inputs.append(TracedInput("batch", (), index, False, shape, leaf.dtype, 0 if batched else None))

    origins: dict[fx.Node, tuple[str, str]] = {}
    known = KnownValues({i: (e.names[0], names[i][0]) for i, e in enumerate(inputs) if e.kind == "buffer"})
    made: dict[str, Any] = {}

    def given(index: int, leaf: Any) -> Any:
        return UnreadLeaf(index, seen) if may_be_unread(leaf) and index not in read else leaf

    def run(*tensors: Tensor) -> list[Tensor]:
        state = {n: t for entry, t in zip(inputs, tensors, strict=False) for n in _one_name_per_owner(module, entry)}
        rest = iter(tensors[num_state:])
        rows = pytree.tree_unflatten(
            [next(rest) if isinstance(x, Tensor) else given(i, x) for i, x in enumerate(leaves)], batch_spec
        )
        with (
            torch.nn.utils.stateless._reparametrize_module(module, state),
            context() if context is not None else nullcontext(),
            _Origins(module, origins, device, known, record),
        ):
            arguments = _step_arguments(module, step, rows, batch_idx, dataloader_idx, record)
            with attribute_reads() as reads:
                output = getattr(module, step)(*arguments)
            made["reads"] = reads
            buffers = _reassigned_buffers(module, inputs, tensors)
        result = {"output": output, "logs": record.logs, "metrics": record.metrics, "buffers": buffers}
        result["checks"] = record.checks
        result_leaves, made["spec"] = pytree.tree_flatten(result)
        made["leaves"] = tuple(_placeholder(x) for x in result_leaves)
        return [x for x in result_leaves if is_tensor(x)]

    grad_mode = torch.enable_grad() if step == TRAINING else torch.no_grad()
    with (
        recording(module, device) as record,
        _rng_kept(step),
        _clear_errors(step),
        _compiled_as_written(),
        mode,
        grad_mode,
    ):
        module_graph = make_fx(run, tracing_mode="real", pre_dispatch=True)(*fakes)
    record.attributes = (
        *attribute_guards(module, made["reads"]),
        *buffer_guards(module, known.asked_buffers),
        *outside_guards(module, made["reads"]),
        *trainer_guards(module._trainer, record.trainer_reads),
    )
    return Trace(
        module_graph.graph,
        module_graph,
        tuple(inputs),
        made["leaves"],
        made["spec"],
        record,
        origins,
        device,
        batch_size * rows_factor,
        tuple((index, value_text(leaves[index])) for index in sorted(read) if may_be_unread(leaves[index])),
    )


def _placeholder(leaf: Any) -> Any:
    """What stands in the structure of results for one of its leaves."""
    index = index_of(leaf)
    if index is not None:
        return LeafRef(index)
    return TensorLeaf() if isinstance(leaf, Tensor) else leaf


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides; contiguous ones for a parameter that has only its shape (one element, expanded)."""
    if 0 in tensor.stride() and tensor.numel() > 1:
        return torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride()


def _step_arguments(
    module: LightningModule, step: str, rows: Any, batch_idx: int, dataloader_idx: int | None, record: Recording
) -> tuple[Any, ...]:
    """What the Trainer would pass, by position as it does: users name these arguments as they like."""
    function = getattr(module, step)
    parameters = list(inspect.signature(function).parameters)
    if "dataloader_iter" in parameters:
        raise CaptureError(
            f"{step} takes dataloader_iter: it pulls its own batches", f"write {step}(self, batch, batch_idx)"
        )
    more = () if dataloader_idx is None else (dataloader_idx,)
    if is_param_in_hook_signature(function, "batch_idx", min_args=2):
        return rows, record.counter(batch_idx, "batch_idx"), *more
    return rows, *more


def _one_name_per_owner(module: nn.Module, entry: TracedInput) -> list[str]:
    """Names of a parameter or buffer, one for each submodule that holds it: a shared submodule has several paths, and
    swapping its tensor twice would leave the swapped one behind."""
    owners: dict[tuple[int, str], str] = {}
    for name in entry.names:
        owner, _, leaf = name.rpartition(".")
        owners.setdefault((id(module.get_submodule(owner)), leaf), name)
    return list(owners.values())


def _reassigned_buffers(module: nn.Module, inputs: list[TracedInput], tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Buffers that the step replaced by another tensor (`self.buffer = ...`)."""
    found: dict[str, Tensor] = {}
    for entry, tensor in zip(inputs, tensors, strict=True):
        if entry.kind == "buffer":
            owner, _, name = entry.names[0].rpartition(".")
            now = getattr(module.get_submodule(owner), name)
            if now is not tensor:
                found[entry.names[0]] = now
    return found


def _capture_device(module: nn.Module, context: Callable[[], AbstractContextManager[Any]] | None) -> torch.device:
    """Device of the parameters if it is an accelerator; a GPU for parameters elsewhere if `context` casts for GPUs.

    Else CPU. Tracing allocates nothing on it.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type not in ("meta", "cpu"):
        return device
    with context() if context is not None else nullcontext():
        for_gpu = torch.is_autocast_enabled("cuda")
    return (
        torch.device("cuda", torch.cuda.current_device())
        if for_gpu and torch.cuda.is_available()
        else torch.device("cpu")
    )


def _names_by_tensor(module: nn.Module) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Every parameter and buffer once, with all names that it has in the tree."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for group in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in group:
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [(tensor, tuple(names)) for tensor, names in found.values()]


def _batch_size(leaves: list[Any]) -> int:
    """The size(0) that most tensor leaves share; the first leaf's among equals."""
    sizes = [leaf.size(0) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim >= 1]
    if not sizes:
        raise CaptureError(
            "the batch holds no tensor with a batch dim", "let the loader yield tensors with one row per sample"
        )
    return max(sizes, key=sizes.count)


@contextmanager
def _rng_kept(step: str) -> Iterator[None]:
    """Restore all generators; refuse a step that draws from Python's or NumPy's, whose numbers capture would freeze."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    drawn: list[str] = []
    try:
        yield
        if random.getstate() != python_state:
            drawn.append("random")
        if numpy_random is not None and not _same_numpy_state(numpy_random.get_state(), numpy_state):
            drawn.append("numpy.random")
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
    if drawn:
        raise CaptureError(
            f"{step} draws numbers from {' and '.join(drawn)}: the captured step would repeat the first ones forever",
            "draw with torch (torch.rand, torch.randint) and choose with torch.where, or draw in the dataset",
        )


def _same_numpy_state(a: Any, b: Any) -> bool:
    return a[0] == b[0] and a[1].tobytes() == b[1].tobytes() and a[2:] == b[2:]


@contextmanager
def _compiled_as_written() -> Iterator[None]:
    """What the user compiled (`torch.compile`) runs as it is written: the graph that is captured replaces it."""
    if "torch._dynamo" not in sys.modules:  # so nothing was compiled, and importing it takes seconds
        yield
        return
    import torch._dynamo

    with torch.compiler.set_stance("force_eager"), torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        yield


_PYTHON_VALUE = (
    "torch.where chooses between values, register_buffer keeps state, callbacks and hooks may look at numbers"
)


@contextmanager
def _clear_errors(step: str) -> Iterator[None]:
    """Turn what tracing cannot follow into a CaptureError with the user's line; other errors stay the user's own."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        line = user_line(error.__traceback__)
        shape = isinstance(error, DynamicOutputShapeException)
        what = (
            f"the shape of a tensor depends on its data ({error.func})"
            if shape
            else "a tensor's value is needed by Python (a branch on it, .item(), .tolist(), int() or float())"
        )
        fix = (
            "keep shapes fixed: multiply by a mask or use torch.where instead of selecting rows, pad instead of packing"
            if shape
            else _PYTHON_VALUE
        )
        raise CaptureError(f"{step} cannot be captured: {what}\n  at {line}", fix) from error
    except RuntimeError as error:
        if ".numpy() is not supported" not in str(error):
            raise
        line = user_line(error.__traceback__)
        raise CaptureError(
            f"{step} cannot be captured: a tensor is turned into a numpy array\n  at {line}",
            "use torch functions in the step, or do it in a callback or hook",
        ) from error


_TRUTH = Tensor.__bool__


class _Origins(TorchFunctionMode):
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

    def _truth(self, tensor: Tensor) -> bool:
        """`bool(tensor)`, also inside functions of torch, which the mode does not see into."""
        answer = self.known.answer(_TRUTH, (tensor,), {})
        if answer is not UNKNOWN:
            return answer
        answer = passing_answer(sys._getframe(2))
        if answer is None:
            return _TRUTH(tensor)
        self.record.checks.append((tensor.clone(), answer, user_frame()))
        return answer

    def __enter__(self) -> _Origins:
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
        for arg in pytree.tree_leaves((args, kwargs)):
            if isinstance(arg, StepCounter):
                arg.refuse()
        self._check_device(func, args, kwargs or {})
        answer = self.known.answer(func, args, kwargs or {})
        if answer is not UNKNOWN:
            return answer
        experts = grouped_mm.replacement(func, args, kwargs or {})
        result = func(*args, **(kwargs or {})) if experts is None else grouped_mm.grouped_mm(*experts)
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
