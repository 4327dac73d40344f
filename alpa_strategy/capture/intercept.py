"""What is intercepted while the step is captured: self.log, metrics, counters, the trainer,
forbidden calls.

`recording(module)` makes the module record instead of act, and puts everything back on exit.
Communication
of the step's own code is refused (`communication.py`).
"""

import builtins
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.utils import _pytree as pytree

from alpa_strategy.capture import batch_norms, optimizer_numbers
from alpa_strategy.capture.communication import collectives_refused, refuse_collective
from alpa_strategy.capture.lightning_adapter import LightningModule, MetricCollection, WrapperMetric
from alpa_strategy.capture.module_state import attributes_kept, changed_attributes
from alpa_strategy.capture.ops import apply_as_op
from alpa_strategy.capture.outside_state import globals_kept
from alpa_strategy.capture.python_reads import refuse_iterator
from alpa_strategy.capture.python_state import is_metric, patched
from alpa_strategy.capture.side_effects import checked, side_effects_refused
from alpa_strategy.capture.snapshots import Snapshot
from alpa_strategy.capture.symbolic_scalars import (
    StepCounter,
    TraceNumbers,
    as_tensor,
    functions_of_counters,
    made_of,
)
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import MetricRef
from alpa_strategy.ir.guards import MISSING, CounterRef, Guard, ValueGuard
from alpa_strategy.ir.places import Place
from alpa_strategy.ir.user_code import user_frame


@dataclass
class Recording:
    """The effects of one run of the step: logs, metric updates, guards and checks. Tensors are
    still the traced ones.
    """

    logs: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)
    metrics: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    guards: dict[Guard, None] = field(default_factory=dict)  # in order, each once
    numbers: TraceNumbers = field(default_factory=TraceNumbers)
    attributes: tuple[ValueGuard, ...] = ()
    trainer_reads: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)  # what the user should know, each once
    # value, what it must be, the user's line, class and text of the exception that is raised else
    checks: list[tuple[Tensor, bool, str, str, str]] = field(default_factory=list)
    # See `ChangesOfStep`.
    stored: dict[str, Any] = field(default_factory=dict)
    grown: list[Place] = field(default_factory=list)
    assigned: dict[Place, Any] = field(default_factory=dict)
    initial: dict[str, Any] = field(default_factory=dict)
    states: list[Place] = field(default_factory=list)
    guarded: set[Place] = field(default_factory=set)
    numbers_read: dict[Place, None] = field(default_factory=dict)  # of optimizers
    snapshots: list[Snapshot] = field(default_factory=list)  # of the modules' attributes
    appended: "dict[Place, AppendedList]" = field(default_factory=dict)
    tracer: Any = None  # what traced the step, once it has run
    constant_inputs: frozenset[fx.Node] = frozenset()  # placeholders of buffers
    refused: list[CaptureError] = field(default_factory=list)

    def refuse(self, error: CaptureError) -> NoReturn:
        """Raise it, and remember it: code of the step may swallow what is raised (logging does)."""
        self.refused.append(error)
        raise error

    def traced_by(self, mode: Any, constant: Container[int]) -> None:
        """Store the tracer of a step that has run under `mode` of make_fx.

        Args:
            constant: indices of the inputs that are buffers.
        """
        self.tracer = mode.tracer
        inputs = [node for node in mode.tracer.graph.nodes if node.op == "placeholder"]
        self.constant_inputs = frozenset(n for i, n in enumerate(inputs) if i in constant)

    def is_of_data(self, tensor: Tensor) -> bool:
        """Whether a traced tensor depends on the batch or parameters; False before `traced_by`."""
        slot = None if self.tracer is None else get_proxy_slot(tensor, self.tracer, None)
        waiting = [] if slot is None else [slot.proxy.node]
        seen: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node.op == "placeholder" and node not in self.constant_inputs:
                return True
            if node not in seen:
                seen.add(node)
                waiting += node.all_input_nodes
        return False

    def note(self, text: str) -> None:
        """Add a note that the plan shows to the user."""
        self.notes[text] = None

    def counter(self, value: int, name: str) -> StepCounter:
        """Return a counter with this value and name, whose comparisons become guards."""
        return StepCounter(value, CounterRef(name), self.guards.setdefault)

    def optimizer_number(self, value: Any, place: Place) -> StepCounter:
        """Return a counter for a number of an optimizer at `place`, which becomes an input of the
        step.
        """
        self.numbers_read[place] = None
        return self.counter(value, str(place))


class MetricValue:
    """Stands for the result of a torchmetrics call during capture: it can be logged, but not
    computed with.
    """

    def __init__(self, name: str, key: str | None = None) -> None:
        self._metric_name, self._metric_key = name, key

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise the `CaptureError` for an operation on the value."""
        raise CaptureError(
            f"the value of metric {self._metric_name!r} is used in a computation ({user_frame()}):"
            " metrics are updated "
            "outside the captured graph",
            "log the metric (`self.log(name, self.metric)`) and compute what the loss needs with"
            " torch functions",
        )

    __torch_function__ = classmethod(lambda cls, *_, **__: MetricValue("")._refuse())
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _refuse
    )
    __neg__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __float__ = __int__ = __getitem__ = (
        __iter__
    ) = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()


class AppendedList:
    """Stands for a list of the module that the step only appends to (`self.outputs.append(loss)`).

    Appended items become results of the graph. Nothing can be read, so the graph does not depend on
    the list's content.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._items: list[Any] = []

    def append(self, item: Any) -> None:
        """Record `item`, to be appended to the user's list after the step."""
        self._items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        """Record the items of an iterable, to be appended to the user's list after the step."""
        self._items.extend(items)

    def __iadd__(self, items: Iterable[Any]) -> "AppendedList":  # type: ignore[misc]
        self.extend(items)
        return self

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise the `CaptureError` for a method that reads the list."""
        raise CaptureError(
            f"the step appends to {self._label} and also looks at it ({user_frame()}): a captured"
            " step does not see "
            "what earlier steps left there",
            "read the list in a hook such as on_train_epoch_end",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __len__ = __iter__ = __contains__ = __bool__ = __reversed__ = __eq__ = __add__ = __radd__ = (
        __mul__
    ) = _refuse
    __setitem__ = __delitem__ = __getitem__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = None  # type: ignore[assignment]  # as of lists


_CHANGING = {
    "optimizers",
    "lr_scheduler_configs",
    "callback_metrics",
    "logged_metrics",
    "progress_bar_metrics",
}
_INSTEAD_OF_CHANGING = (
    "read it in a callback or in on_train_batch_end; the learning rate is logged by the callback"
    " LearningRateMonitor"
)


class _View:
    """An object of Lightning, the Trainer first of all, that notes which of its values are read, by
    dotted path.

    Counters are given as StepCounters; everything else is the object's own.
    """

    def __init__(
        self, viewed: Any, path: str, counters: Mapping[str, Any], reads: dict[str, Any]
    ) -> None:
        object.__setattr__(self, "_view", (viewed, path, counters, reads))

    @property  # type: ignore[misc]  # which object it is taken for
    def __class__(self) -> type:
        return type(self._view[0])

    def __getattr__(self, name: str) -> Any:
        viewed, path, counters, reads = object.__getattribute__(self, "_view")
        path = f"{path}.{name}".lstrip(".")
        if path in counters:
            return counters[path]
        if path in _CHANGING:
            raise CaptureError(
                f"the step reads trainer.{name} ({user_frame()}): the captured step would keep its"
                " first value",
                _INSTEAD_OF_CHANGING,
            )
        if path in ("logger", "loggers") and viewed.loggers:
            raise CaptureError(
                f"a logger is used directly in the step ({user_frame()}): a captured step repeats"
                " tensor work only, so "
                "it would be called once and never again",
                "use self.log, or call the logger in on_train_batch_end (the step's returned dict"
                " arrives there)",
            )
        try:
            value = getattr(viewed, name)
        except AttributeError:
            reads[path] = MISSING  # it may be there at another step
            raise
        is_lightnings = type(value).__module__.startswith(("lightning.", "alpa_strategy."))
        if value is None or isinstance(
            value, bool | int | float | str | Enum
        ):  # what a guard can compare
            reads[path] = value
        elif is_lightnings and not isinstance(value, nn.Module | list):
            return _View(value, path, counters, reads)
        return value

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise CaptureError(
            f"the step sets trainer.{name} ({user_frame()}): a captured step repeats tensor work"
            " only, so this would "
            "happen once and never again",
            "set it in a hook such as on_train_batch_end",
        )


@contextmanager
def recording(
    module: LightningModule,
    device: torch.device,
    appended: Iterable[Place] = (),
    namespaces: Iterable[dict[str, Any]] = (),
) -> Iterator[Recording]:
    """Record logs, metrics and counters of `module` while the block runs; everything is restored on
    exit.

    appended, namespaces: see `StepCall`.

    Raises:
        CaptureError: the block did something that cannot be captured, even if its own code caught
            the error.
    """
    record = Recording()
    names = {id(m): name for name, m in module.named_modules()}
    with ExitStack() as stack:
        # Outermost, so that what the other contexts put into attributes is gone when they are
        # compared.
        held: set[int] = set()  # ids of what lives longer than the step
        record.snapshots = stack.enter_context(attributes_kept(module, record, held))
        record.appended = {place: AppendedList(place.attribute) for place in appended}
        # The attribute may be the class's: this then hides it.
        lists = [(place.holder(module), place.name, x) for place, x in record.appended.items()]
        stack.enter_context(patched(lists))
        files = stack.enter_context(globals_kept(module, held, record.is_of_data))
        stack.enter_context(patched(functions_of_counters(namespaces)))
        stack.enter_context(_recording_class(module, record, names, device))
        for child in module.modules():
            if child is module or not isinstance(child, LightningModule):
                continue
            if child._trainer is not None:
                stack.enter_context(_recording_class(child, record, None, device))
        for name, metric in module.named_modules():
            if is_metric(metric):  # those inside a collection may be called by themselves
                stack.enter_context(_shadowed_metric(metric, name, record))
        stack.enter_context(_forbidden_calls(record, held))
        stack.enter_context(patched(side_effects_refused(record, files)))
        stack.enter_context(collectives_refused())
        stack.enter_context(patched(batch_norms.forward_patches()))
        try:
            yield record
        except Exception as error:
            if record.refused and error is not record.refused[0]:
                raise record.refused[0] from error
            raise
        if record.refused:  # and the step's code went on
            raise record.refused[0]


def _recording_log(record: Recording, names: Mapping[int, str]) -> dict[str, Callable[..., None]]:
    """Return name -> replacement of the module's `log` and `log_dict`: both append (name, value,
    other arguments) to `record.logs`. CaptureError if a value is no tensor, number, metric or dict.

    Args:
        names: id of a metric -> its path in the module.
    """

    def value_of(key: str, value: Any) -> Any:
        if isinstance(value, MetricValue):
            return MetricRef(value._metric_name, "value", value._metric_key)
        if is_metric(value):
            return MetricRef(names.get(id(value), ""), "metric")
        if isinstance(value, Tensor):
            return (
                value.clone()
            )  # the value as it is now: a later in-place op must not change what was logged
        if isinstance(value, CounterRef | MetricRef | bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {k: value_of(key, made_of(v)) for k, v in value.items()}
        raise CaptureError(
            f"self.log({key!r}, ...) got a {type(value).__name__} ({user_frame()})",
            "log a tensor, a number or a torchmetrics Metric",
        )

    def log(self: LightningModule, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(LightningModule.log).bind(self, *args, **kwargs).arguments
        arguments = {k: made_of(v) for k, v in bound.items() if k != "self"}
        name, value = arguments.pop("name"), arguments.pop("value")
        record.logs.append((name, value_of(name, value), arguments))

    def log_dict(self: LightningModule, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        values = dictionary
        if isinstance(values, MetricValue):
            raise CaptureError(
                f"self.log_dict of a metric whose value is a dict ({user_frame()}) is not supported"
                " in a captured step",
                "log a MetricCollection, or the metric's own numbers in on_train_epoch_end",
            )
        if isinstance(values, MetricCollection):
            path = names.get(id(values), "")
            values = {
                key: MetricRef(path, "metric", key)
                for key in map(str, values.keys(keep_base=False))
            }
        for name, value in values.items():
            log(self, name, value, *args, **kwargs)  # whose arguments stand in the same order

    return {"log": log, "log_dict": log_dict}


def _counting_members(
    module: LightningModule, record: Recording, device: torch.device
) -> dict[str, Any]:
    """Return name -> member of a subclass of the module's class that records or refuses an access,
    besides log methods: counters, the Trainer, optimizers and others.
    """
    original = type(module)
    trainer_property: Any = original.trainer
    trainer = module._trainer
    counters = {
        n: record.counter(int(getattr(trainer, n, 0)), n) for n in ("global_step", "current_epoch")
    }
    optimizers = optimizer_numbers.optimizer_views(trainer, record.optimizer_number)
    schedulers = optimizer_numbers.scheduler_views(trainer, record.optimizer_number)
    known = {**counters, "optimizers": optimizers} if optimizers else counters
    view = _View(trainer, "", known, record.trainer_reads) if trainer is not None else None

    def refuse_print(self: LightningModule, *_: Any, **__: Any) -> NoReturn:
        record.refuse(
            CaptureError(
                f"the step prints ({user_frame()}): captured, it would do so once and never again",
                "print in a hook such as on_train_batch_end, and log values with self.log",
            )
        )

    return {
        "global_step": property(lambda self: counters["global_step"]),
        "current_epoch": property(lambda self: counters["current_epoch"]),
        "trainer": property(
            lambda self: trainer_property.fget(self) if view is None else view,
            trainer_property.fset,
        ),
        "device": property(lambda self: device),
        "all_gather": lambda self, *_, **__: refuse_collective("self.all_gather"),
        "print": refuse_print,
        "logger": property(lambda self: getattr(view, "logger", None)),
        "loggers": property(lambda self: getattr(view, "loggers", [])),
        "optimizers": lambda self, *_, **__: optimizer_numbers.one_or_all(optimizers),
        "lr_schedulers": lambda self: optimizer_numbers.one_or_all(schedulers),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
    }


@contextmanager
def _recording_class(
    module: LightningModule,
    record: Recording,
    names: Mapping[int, str] | None,
    device: torch.device,
) -> Iterator[None]:
    """Swap the module's class for a subclass whose log methods and counters record; a CaptureError
    if the block sets an attribute of the class.

    Args:
        names: path of a submodule by its id; None: `module` is inside of the one that trains, and
            its log methods are Lightning's, which raise.
    """
    original = type(module)
    members = _counting_members(module, record, device)
    if names is not None:
        members |= _recording_log(record, names)
    kind = type(original.__name__, (original,), members)
    class_names = set(vars(kind))
    hidden: set[str] = set()
    if names is not None:
        hidden = vars(module).keys() & {"log", "log_dict"}
    # nn.Module's own __setattr__ would look at the value first.
    object.__setattr__(module, "__class__", kind)
    try:
        # Attributes of the instance (a test's `module.log = ...`) would win over the class's.
        with patched((vars(module), name, MISSING) for name in hidden):
            yield
        if stored := vars(kind).keys() - class_names:  # `type(self).calls += 1`
            raise changed_attributes(f"{original.__name__}.{name}" for name in stored)
    finally:
        object.__setattr__(module, "__class__", original)


def _shadowed_metric(
    metric: nn.Module, name: str, record: Recording
) -> AbstractContextManager[None]:
    """Context in which calls of `forward` and `update` of the metric `name` are appended to
    `record.metrics`, not run. `forward` and `compute` return MetricValues (a collection's: a dict).
    Texts among positional arguments, and wrappers in a collection, raise CaptureError.
    """

    def keep(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: t.clone(), (args, kwargs)
        )  # as they are now
        if any(isinstance(leaf, str) for arg in args for leaf in pytree.tree_leaves(arg)):
            raise CaptureError(
                f"metric {name!r} is given texts ({user_frame()}): the captured step sees the"
                " tensors of all ranks, "
                "but the texts of one",
                "update it in a hook such as on_train_batch_end, with what the step returns",
            )
        record.metrics.append((name, method, args, kwargs))

    def value(*_: Any, **__: Any) -> MetricValue | dict[str, MetricValue]:
        if not isinstance(metric, MetricCollection):
            return MetricValue(name)
        if wrapped := [
            key
            for key, member in metric.items(keep_base=False)
            if isinstance(member, WrapperMetric)
        ]:
            raise CaptureError(
                f"metric {name!r} is asked for its values ({user_frame()}): those of"
                f" {wrapped[0]!r}, which wraps "
                "another one, may have names of their own",
                "update it in the step, and log its values in on_train_epoch_end",
            )
        return {key: MetricValue(name, key) for key in map(str, metric.keys(keep_base=False))}

    def forward(*args: Any, **kwargs: Any) -> MetricValue | dict[str, MetricValue]:
        keep("forward", args, kwargs)
        return value()

    shadows = {
        "forward": forward,
        "update": lambda *args, **kwargs: keep("update", args, kwargs),
        "compute": value,
    }
    return patched((vars(metric), key, shadow) for key, shadow in shadows.items())


def _forbidden_calls(record: Recording, held: Container[int]) -> AbstractContextManager[None]:
    """Return the context that refuses calls whose effect a forward graph cannot have.

    Without it, the effect would be lost silently. An autograd.Function becomes an op, inference
    mode no_grad; hooks on saved tensors and checks of distributions are left out, with a note.

    Args:
        held: ids of objects that are not used by the step alone.
    """

    def check_iterator(iterator: Any, *_: Any) -> None:
        if id(iterator) in held:
            refuse_iterator()

    backward_fix = "return the loss: Lightning calls backward"
    grad_fix = "use a loss without a gradient inside it"
    hooks_fix = "change gradients in on_after_backward"
    saved_tensors_hooks = torch.autograd.graph.saved_tensors_hooks
    patches: list[tuple[Any, str, Any]] = [
        (builtins, "next", checked(next, check_iterator)),
        (torch.distributions.Distribution, "__init__", _without_argument_checks(record)),
        (saved_tensors_hooks, "__enter__", _hooks_note(record)),
        # Its __enter__ has pushed nothing.
        (saved_tensors_hooks, "__exit__", lambda *_: None),
        (torch.autograd.Function, "apply", classmethod(_apply_function)),
        # The trace records no_grad.
        (torch._C, "_InferenceMode", lambda mode: torch.no_grad() if mode else nullcontext()),
        (Tensor, "register_hook", _refusal("Tensor.register_hook", hooks_fix)),
        (torch.autograd, "grad", _refusal("torch.autograd.grad", grad_fix)),
        (torch.autograd, "backward", _refusal("backward()", backward_fix)),
        (Tensor, "backward", _refusal("backward()", backward_fix)),
    ]
    for name in _BACKWARD_HOOKS:
        patches.append((nn.Module, name, _refusal("a module's backward hook", hooks_fix)))
    return patched(patches)


# Methods that torch calls for modules with backward hooks.
_BACKWARD_HOOKS = ("_get_backward_hooks", "_get_backward_pre_hooks")


def _refusal(name: str, fix: str) -> Callable[..., NoReturn]:
    """Return a function that takes any arguments and raises CaptureError with the user's line.

    Args:
        name: of the function that it replaces.
        fix: what the user can do instead.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise CaptureError(
            f"{name} is used in the step ({user_frame()}): a captured step cannot keep it", fix
        )

    return refuse


def _apply_function(cls: type, *args: Any, **_: Any) -> Any:
    """Replace `apply` of the autograd.Function `cls` in a captured step: the call becomes one op.

    Raises:
        CaptureError: it is the function of re-entrant checkpointing.
    """
    # Re-entrant checkpointing runs the forward without grad.
    if cls.__name__ == "CheckpointFunction":
        fix = "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        _refusal("checkpoint", fix)()
    tensors = []
    for leaf in pytree.tree_leaves(args):
        if type(leaf) is not StepCounter and isinstance(leaf, Tensor):
            tensors.append(leaf)
    return apply_as_op(cls, *pytree.tree_map(lambda leaf: as_tensor(leaf, tensors), args))


def _hooks_note(record: Recording) -> Callable[[Any], None]:
    """Return `__enter__` of hooks on saved tensors that only notes that they are ignored."""

    def enter(hooks: Any) -> None:
        name = type(hooks).__name__
        feature = f"torch.autograd.graph.{name}"
        if "checkpoint" in name:
            feature = "activation checkpointing"
        record.note(f"{feature} in the module is ignored: the plan decides what is recomputed")

    return enter


def _without_argument_checks(record: Recording) -> Callable[..., None]:
    """Return `__init__` of a torch.distributions.Distribution that does not check its arguments,
    and notes it.
    """
    original = torch.distributions.Distribution.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        record.note(
            "checks of arguments in torch.distributions are left out: they look at the values of"
            " tensors"
        )
        # `validate_args` is the third argument.
        original(self, *args[:2], **{**kwargs, "validate_args": False})

    return init
