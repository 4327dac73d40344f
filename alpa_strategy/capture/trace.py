"""Run the step once on fake tensors and keep the ATen ops that it asked for, before autograd and
autocast act on them.

`make_fx(pre_dispatch=True)` gives the graph that torch.export gives (linear, layer_norm, ...
whole), about five times faster. What comes out is an fx graph with in-place ops, grad-mode and
autocast markers; `convert` makes the StepGraph.
"""

import logging
import operator
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
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
from torch.utils import _pytree as pytree

from alpa_strategy.capture import python_reads
from alpa_strategy.capture.data_branches import ConstantValues
from alpa_strategy.capture.intercept import Recording, check_no_collectives, recording
from alpa_strategy.capture.kept_state import KeptState, restored, state_of
from alpa_strategy.capture.non_tensor_inputs import (
    UnreadLeaf,
    index_of,
    may_be_unread,
    traced_with_leaves,
    value_text,
)
from alpa_strategy.capture.python_state import patched, snapshot, standing_in
from alpa_strategy.capture.symbolic_scalars import FunctionsRequested, StepCounter
from alpa_strategy.capture.tracer_mode import TracerMode
from alpa_strategy.errors import AlpaError, CaptureError
from alpa_strategy.ir.graph import BatchInput, BufferInput, LeafRef, ParameterInput, Place, ValueRef
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.user_code import reached_functions, user_line

TracedInput = (
    ParameterInput | BufferInput | BatchInput
)  # `value`: its place among the traced function's arguments


@dataclass(frozen=True)
class Trace:
    """The raw trace."""

    module: fx.GraphModule
    inputs: tuple[TracedInput, ...]
    # {"output", "logs", "metrics", "buffers", "checks", "appended"}, in which ValueRefs number the
    # graph's outputs
    results: dict[str, Any]
    recording: Recording
    origins: Mapping[fx.Node, tuple[str, str]]
    device: torch.device
    batch_size: int
    read_leaves: tuple[
        tuple[int, str], ...
    ] = ()  # of the batch, that the step's Python looked at; values as text
    own: tuple[Tensor, ...] = ()  # of the module, in the order of the first inputs


@dataclass(frozen=True)
class StepCall:
    """Which call is captured: `module.training_step(batch, batch_idx)`, and under what."""

    module: LightningModule
    batch: Any
    rows_factor: int  # batched leaves are so many times as long in the graph
    batch_idx: int
    # context, rows: see `capture_step`
    context: Callable[[], AbstractContextManager[Any]]
    rows: tuple[bool, ...] | None = None
    appended: tuple[Place, ...] = ()  # lists of which it is known that the step appends to them
    namespaces: tuple[
        dict[str, Any], ...
    ] = ()  # of code that computes with counters, see `functions_of_counters`
    numbers: tuple[Place, ...] = ()  # those that change between steps
    step: Callable[[Any], Any] | None = None  # what is called instead


def trace_step(call: StepCall) -> Trace:
    """Trace the call; leaves of the batch that are no tensors enter with their values only where
    the step looks.
    """
    while True:
        try:
            return traced_with_leaves(call.batch, partial(_trace_once, call))
        except FunctionsRequested as asked:
            call = replace(call, namespaces=(*call.namespaces, asked.namespace))


def names_by_tensor(module: nn.Module) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Every parameter and buffer once, parameters first, with all names that it has in the tree."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for group in (
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in group:
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [(tensor, tuple(names)) for tensor, names in found.values()]


def _trace_once(call: StepCall, read: frozenset[int], seen: set[int]) -> Trace:
    """One trace. read: leaves that enter with their values; `seen` gets those that the step looks
    at besides.
    """
    module = call.module
    device = _capture_device(module, call.context)
    leaves, batch_spec = pytree.tree_flatten(call.batch)
    rows_flags = likely_rows(leaves) if call.rows is None else call.rows
    batch_size = _batch_size(leaves, rows_flags)
    names = names_by_tensor(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # constants of the step are real tensors
    with mode:
        inputs, fakes = _fake_inputs(call, names, leaves, rows_flags, device)

    origins: dict[fx.Node, tuple[str, str]] = {}
    made: dict[str, Any] = {}
    changing = {place.leaf: str(place) for place in call.numbers}

    def given(index: int, leaf: Any) -> Any:
        if index in changing:
            return record.counter(leaf, changing[index])
        return UnreadLeaf(index, seen) if may_be_unread(leaf) and index not in read else leaf

    def run(*tensors: Tensor) -> list[Tensor]:
        of_module = {own: tensor for (own, _), tensor in zip(names, tensors, strict=False)}
        rest = iter(tensors[len(names) :])
        rows = pytree.tree_unflatten(
            [next(rest) if isinstance(x, Tensor) else given(i, x) for i, x in enumerate(leaves)],
            batch_spec,
        )
        with (
            standing_in(module, of_module),
            call.context(),
            TracerMode(module, origins, device, known, record),
            known.told_to_libraries(),
        ):
            # By position, as the Trainer passes them: users name these arguments as they like.
            takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
            arguments = (
                (rows, record.counter(call.batch_idx, "batch_idx")) if takes_index else (rows,)
            )
            held = _held(module, inputs)
            with python_reads.attribute_reads(module) as reads:
                output = module.training_step(*arguments) if call.step is None else call.step(rows)
            record.traced_by(get_proxy_mode(), buffers)
            _check_added(module, call.batch, rows)
            made["reads"] = reads
            reassigned = _reassigned_buffers(held, _held(module, inputs), inputs)
        appended = [each._items for each in record.appended.values()]
        result: dict[str, Any] = {
            "output": output,
            "logs": record.logs,
            "metrics": record.metrics,
            "buffers": reassigned,
        }
        result |= {"checks": record.checks, "appended": appended}
        outputs: list[Tensor] = []
        made["results"] = pytree.tree_map(partial(_placeholder, outputs), result)
        return outputs

    with (
        recording(module, device, call.appended, call.namespaces) as record,
        python_reads.counters_for(module, call.numbers, record.counter),
        patched(
            [(vars(logging.getLogger("torch._subclasses.fake_tensor")), "disabled", True)]
        ),  # tracebacks of trials
        generators_kept(),
        clear_errors(),
        uncompiled(),
        mode,
        torch.enable_grad(),
    ):
        buffers = {
            e.value: (e.name, names[e.value][0]) for e in inputs if isinstance(e, BufferInput)
        }
        known = ConstantValues(buffers, record.numbers.is_symbolic)
        # "real": the inputs are fake already. Pre-dispatch: above autograd and autocast, so linear
        # stays one op.
        module_graph = make_fx(run, tracing_mode="real", pre_dispatch=True)(*fakes)
        check_no_collectives(module_graph.graph, origins)
        # After the trace: while it runs, ops must see plain numbers.
        record.numbers.put()
    # They hold until a buffer is replaced or changed in place.
    asked = {name: snapshot(module.get_buffer(name)) for name in sorted(known.asked_buffers)}
    record.attributes = (
        *python_reads.freed(
            python_reads.attribute_guards(module, made["reads"], record.appended), call.numbers
        ),
        *python_reads.guards_at(module, asked),
        *python_reads.global_guards(module, made["reads"]),
        *python_reads.guards_at(module._trainer, record.trainer_reads, "trainer."),
    )
    read_leaves = tuple(
        (i, value_text(leaves[i]))
        for i in sorted(read - changing.keys())
        if may_be_unread(leaves[i])
    )
    num_rows = batch_size * call.rows_factor
    own = tuple(tensor for tensor, _ in names)
    return Trace(
        module_graph,
        tuple(inputs),
        made["results"],
        record,
        origins,
        device,
        num_rows,
        read_leaves,
        own,
    )


def _check_added(module: LightningModule, batch: Any, after: Any) -> None:
    """CaptureError where the step puts into its batch what a hook asks for: hooks get the batch as
    it was loaded.
    """
    added = after.keys() - batch.keys() if isinstance(batch, dict) else set()
    users = (module, *getattr(module._trainer, "callbacks", ()))
    for user in users if added else ():
        reached = reached_functions([user.on_train_batch_end])
        if named := added & {constant for each in reached for constant in each.__code__.co_consts}:
            raise CaptureError(
                f"training_step puts {named} into its batch, for"
                f" {type(user).__name__}.on_train_batch_end",
                "return it from training_step: what that returns arrives in on_train_batch_end as"
                " outputs",
            )


def _fake_inputs(
    call: StepCall,
    names: list[tuple[Tensor, tuple[str, ...]]],
    leaves: list[Any],
    rows_flags: tuple[bool, ...],
    device: torch.device,
) -> tuple[list[TracedInput], list[Tensor]]:
    """What the traced function takes: parameters and buffers as `names` has them, then the batch's
    tensors.
    """
    inputs: list[TracedInput] = []
    fakes: list[Tensor] = []
    for tensor, tensor_names in names:
        fake = torch.empty_strided(
            tensor.shape, _strides(tensor), dtype=tensor.dtype, device=device
        )
        meta = TensorMeta(tuple(tensor.shape), tensor.dtype, bool(tensor.requires_grad))
        if isinstance(tensor, nn.Parameter):
            fakes.append(nn.Parameter(fake, meta.requires_grad))
            inputs.append(ParameterInput(len(inputs), tensor_names, meta))
        else:
            fakes.append(fake)
            inputs.append(BufferInput(len(inputs), tensor_names[0], meta))
    flags = iter(rows_flags)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided:
                raise CaptureError(
                    f"the batch holds a tensor of layout {leaf.layout}", "let it hold dense ones"
                )
            batched = next(flags)  # [rows, ...]: one row per sample
            shape = (
                (leaf.size(0) * call.rows_factor, *leaf.shape[1:]) if batched else tuple(leaf.shape)
            )
            fakes.append(
                torch.empty(
                    shape, dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad
                )
            )
            meta = TensorMeta(shape, leaf.dtype, leaf.requires_grad)
            inputs.append(BatchInput(len(inputs), index, meta, 0 if batched else None))
    return inputs, fakes


def _placeholder(outputs: list[Tensor], leaf: Any) -> Any:
    """What stands in the structure of results for one of its leaves; a tensor becomes the next of
    the outputs.
    """
    if (index := index_of(leaf)) is not None:
        return LeafRef(index)
    if type(leaf) is StepCounter:
        return leaf.made
    if not isinstance(leaf, Tensor):
        return leaf
    outputs.append(leaf)
    return ValueRef(len(outputs) - 1)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides; contiguous ones for a parameter that has only its shape (one element,
    expanded).
    """
    if 0 in tensor.stride() and tensor.numel() > 1:
        return torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride()


def _held(module: nn.Module, inputs: list[TracedInput]) -> dict[str, Any]:
    """By name, what the module has for each of the inputs that are its own."""
    names = [entry.name for entry in inputs if not isinstance(entry, BatchInput)]
    return {name: operator.attrgetter(name)(module) for name in names}


def _reassigned_buffers(
    before: dict[str, Any], after: dict[str, Any], inputs: list[TracedInput]
) -> dict[str, Tensor]:
    """Buffers that the step replaced by another tensor (`self.buffer = ...`), of what the module
    had `before` it.
    CaptureError for parameters, and for what the buffer's memory cannot take."""
    buffers = {entry.name for entry in inputs if isinstance(entry, BufferInput)}
    replaced = {name: tensor for name, tensor in after.items() if tensor is not before[name]}
    for name, now in replaced.items():
        both = [now, before[name]] if name in buffers and isinstance(now, Tensor) else []
        kinds = {
            (t.dtype.is_floating_point, t.dtype.is_complex, t.dtype == torch.bool, t.shape)
            for t in both
        }
        if len(kinds) != 1:
            raise CaptureError(
                f"the step puts another parameter, shape or dtype in the place of {name}",
                "keep shape and dtype of buffers, and leave parameters to the optimizer and to"
                " hooks",
            )
    return replaced


def _capture_device(
    module: nn.Module, context: Callable[[], AbstractContextManager[Any]]
) -> torch.device:
    """Device of the parameters if it is an accelerator; a GPU for parameters elsewhere if `context`
    casts for GPUs.

    Else CPU. Tracing allocates nothing on it.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type not in ("meta", "cpu"):
        return device
    with context():
        for_gpu = torch.is_autocast_enabled("cuda")
    is_cuda = for_gpu and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def likely_rows(leaves: Sequence[Any]) -> tuple[bool, ...]:
    """Where nobody knows: the leaves that have the size(0) that most of them share, the first
    leaf's among equals.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = [leaf.size(0) for leaf in tensors if leaf.ndim >= 1]
    most = max(
        sizes, key=sizes.count, default=0
    )  # weights of classes, a shared mask, ... are outvoted
    return tuple(leaf.ndim >= 1 and leaf.size(0) == most for leaf in tensors)


def _batch_size(leaves: list[Any], rows_flags: tuple[bool, ...]) -> int:
    """The rows of the first leaf that has some."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = [leaf.size(0) for leaf, is_rows in zip(tensors, rows_flags, strict=True) if is_rows]
    if not sizes:
        raise CaptureError(
            "the batch holds no tensor with a batch dim",
            "let the loader yield tensors with one row per sample",
        )
    return sizes[0]


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore all generators; refuse a step that draws from Python's or NumPy's, whose numbers
    capture would freeze.
    """
    refused = {"random": random.random.__self__, "numpy.random": np.random.rand.__self__}  # type: ignore[attr-defined]
    kept = [KeptState(name, each, state_of(each)) for name, each in refused.items()]
    of_torch = torch.default_generator
    kept.append(KeptState("torch", of_torch, state_of(of_torch), is_noticed=False))
    with restored(kept) as drawn:
        yield
    if drawn:
        raise CaptureError(
            f"training_step draws numbers from {' and '.join(drawn)}: the captured step would"
            " repeat the first ones "
            "forever",
            "draw with torch (torch.rand, torch.randint) and choose with torch.where, or draw in"
            " the dataset",
        )


@contextmanager
def uncompiled() -> Iterator[None]:
    """What the user compiled (`torch.compile`) runs as it is written: the graph that is captured
    replaces it.
    """
    if (
        "torch._dynamo" not in sys.modules
    ):  # so nothing was compiled, and importing it takes seconds
        yield
        return
    import torch._dynamo

    with (
        torch.compiler.set_stance("force_eager"),
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),
    ):
        yield


# What torch says about code that cannot be traced -> what that is, and what to do.
_CLEARER = {
    StepCounter.__name__: (
        "a number made of batch_idx, global_step or current_epoch stands where torch takes numbers"
        " only",
        "use it element by element (`beta * x`), or write int(self.current_epoch); keep others in a"
        " registered "
        "buffer that the step updates",
    ),
    "TorchScript": (
        "TorchScript does not show its ops",
        "leave out torch.jit.script and trace (torch.compile may stay)",
    ),
    ".numpy() is not supported": (
        "a tensor is turned into a numpy array",
        "use torch functions in the step, or do it in a callback or hook",
    ),
}


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn what tracing cannot follow into a CaptureError with the user's line; other errors stay
    the user's own.
    """
    try:
        yield
    except DataDependentOutputException as error:
        raise CaptureError(
            "training_step cannot be captured: a tensor's value is needed by Python (a branch on"
            " it, .item(), "
            f".tolist(), int() or float())\n  at {user_line(error.__traceback__)}",
            "torch.where chooses between values, register_buffer keeps state, callbacks and hooks"
            " may look at numbers",
        ) from error
    except DynamicOutputShapeException as error:
        raise CaptureError(
            "training_step cannot be captured: the shape of a tensor depends on its data"
            f" ({error.func})\n"
            f"  at {user_line(error.__traceback__)}",
            "keep shapes fixed: multiply by a mask or use torch.where instead of selecting rows, do"
            " not pack",
        ) from error
    except AlpaError:
        raise
    except (RuntimeError, TypeError) as error:
        what, fix = next(
            (clearer for text, clearer in _CLEARER.items() if text in str(error)), ("", "")
        )
        if not what:
            raise
        text = f"training_step cannot be captured: {what}\n  at {user_line(error.__traceback__)}"
        raise CaptureError(text, fix) from error
