"""One rank's trace: the events of torch's profiler as nested slices with the user's names.

torch records no module for ops of the backward. Each node of autograd has the sequence number of
the op that made it, and that op ran in its module's range.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alpa_strategy.profiling.ranges import MODULE, RangeInfo

# Categories of torch's events that are stored.
_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NODE = "autograd::engine::evaluate_function: "
_SEQUENCE = "Sequence number"
_CORRELATION = "correlation"

# Of categories of this file.
OP = "op"
KERNEL = "kernel"
ANNOTATION = "annotation"


@dataclass
class Slice:
    """A named interval on a thread or a stream. Times are nanoseconds of the rank's clock."""

    name: str

    # A kind of `ranges.py`, OP, KERNEL or ANNOTATION.
    category: str

    start: int
    end: int

    # Name of the thread or stream.
    track: str

    details: dict[str, Any] = field(default_factory=dict)


def slices_of(
    torch_trace: Mapping[str, Any], infos: Mapping[str, RangeInfo], root: str = ""
) -> list[Slice]:
    """Return the slices of a trace that torch's profiler has exported, nested on each track.

    Args:
        torch_trace: JSON data of `torch.profiler.profile.export_chrome_trace`.
        infos: what the names of ranges stand for.
        root: name of nodes of the backward that are of no module: those of the loss.
    """
    base = int(torch_trace.get("baseTimeNanoseconds", 0))
    events = [event for event in torch_trace["traceEvents"] if event.get("ph") == "X"]
    host_events = [event for event in events if event.get("cat") in _HOST]
    device_events = [event for event in events if event.get("cat") in _DEVICE]
    threads = _thread_names(host_events)
    slices = []
    for event in host_events:
        slices.append(_host_slice(event, base, threads[event["tid"]], infos))
    slices = nested(slices)
    # First, so that a module is around a node of the same length.
    slices = nested([*_backward_modules(slices, root), *slices])
    modules = _modules_of_launches(slices)
    for event in device_events:
        slices.append(_device_slice(event, base, modules))
    for trace_slice in slices:
        trace_slice.details.pop(_SEQUENCE, None)
        trace_slice.details.pop(_CORRELATION, None)
    return nested(slices)


def _thread_names(events: Iterable[Mapping[str, Any]]) -> dict[Any, str]:
    """Return thread id -> name: `host` is the thread that has recorded most."""
    counts: dict[Any, int] = {}
    for event in events:
        counts[event["tid"]] = counts.get(event["tid"], 0) + 1
    names = {}
    for number, tid in enumerate(sorted(counts, key=lambda tid: -counts[tid])):
        names[tid] = "host" if number == 0 else f"host, thread {number + 1}"
    return names


def _host_slice(
    event: Mapping[str, Any], base: int, track: str, infos: Mapping[str, RangeInfo]
) -> Slice:
    """Return the slice of an event of the profiler on the host.

    Args:
        base: nanoseconds at which the profiler's times begin.
        track: name of its thread.
        infos: kind and details of the package's ranges, by name.
    """
    name = event["name"]
    details = {}
    for key in (_SEQUENCE, _CORRELATION):
        if key in event.get("args", {}):
            details[key] = event["args"][key]
    category = OP
    if event["cat"] == "user_annotation":
        category = ANNOTATION
        info = infos.get(name)
        if info is not None:
            category = info.kind
            details |= info.details
    start = base + round(event["ts"] * 1000)
    return Slice(name, category, start, start + round(event["dur"] * 1000), track, details)


def _device_slice(event: Mapping[str, Any], base: int, modules: Mapping[Any, str]) -> Slice:
    """Return the slice of a kernel.

    Args:
        base: nanoseconds at which the profiler's times begin.
        modules: correlation number of a launch -> the module that launched it.
    """
    start = base + round(event["ts"] * 1000)
    arguments = event.get("args", {})
    details = {}
    module = modules.get(arguments.get(_CORRELATION))
    if module is not None:
        details["module"] = module
    track = f"device {arguments.get('device', 0)}, stream {arguments.get('stream', event['tid'])}"
    return Slice(event["name"], KERNEL, start, start + round(event["dur"] * 1000), track, details)


def nested(slices: Iterable[Slice]) -> list[Slice]:
    """Return slices by start, the outer ones first, each within the one around it.

    A slice that ends after the one around it is cut in place: torch rounds times.
    """
    ordered = sorted(slices, key=lambda trace_slice: (trace_slice.start, -trace_slice.end))
    for trace_slice, around in with_parents(ordered):
        if around:
            trace_slice.end = min(trace_slice.end, around[-1].end)
    return ordered


def with_parents(slices: Sequence[Slice]) -> Iterator[tuple[Slice, list[Slice]]]:
    """Yield each slice of `nested` with the slices around it on its track, the outermost first. The
    list is changed afterwards: copy it to keep it.
    """
    open_slices: dict[str, list[Slice]] = {}
    for trace_slice in slices:
        stack = open_slices.setdefault(trace_slice.track, [])
        while stack and stack[-1].end <= trace_slice.start:
            stack.pop()
        yield trace_slice, stack
        stack.append(trace_slice)


def _backward_modules(slices: Sequence[Slice], root: str) -> list[Slice]:
    """Return a slice around consecutive nodes of the backward that are of one module.

    A node without a sequence number adds to a gradient: it is of the module of the node before it.

    Args:
        slices: of the host, in order of time.
        root: module of nodes that are of no other.
    """
    modules: dict[int, str] = {}
    result: list[Slice] = []
    # Track -> the slice that grows, and the one around it.
    growing: dict[str, tuple[Slice, Slice | None]] = {}
    for trace_slice, around in with_parents(slices):
        is_in_node = any(outer.name.startswith(_NODE) for outer in around)
        if is_in_node or trace_slice.category != OP:
            continue
        sequence = trace_slice.details.get(_SEQUENCE)
        if not trace_slice.name.startswith(_NODE):
            module = _innermost_module(around)
            if sequence is not None and module:
                modules[sequence] = module
            continue
        parent = around[-1] if around else None
        last, last_parent = growing.get(trace_slice.track, (None, None))
        if last_parent is not parent:
            last = None
        if last is not None:
            # In between, autograd frees what the last node has used.
            last.end = trace_slice.start
        module = modules.get(sequence, "") if sequence is not None else ""
        if not module:
            module = root if last is None else last.name
        if last is not None and last.name == module:
            last.end = trace_slice.end
        elif module:
            new = Slice(
                module,
                MODULE,
                trace_slice.start,
                trace_slice.end,
                trace_slice.track,
                {"backward": True},
            )
            growing[trace_slice.track] = (new, parent)
            result.append(new)
    return result


def _innermost_module(around: Sequence[Slice]) -> str:
    """Return the name of the last module's slice in `around`; "" if there is none."""
    for outer in reversed(around):
        if outer.category == MODULE:
            return outer.name
    return ""


def _modules_of_launches(slices: Sequence[Slice]) -> dict[Any, str]:
    """Return the module, or the collective, that launched a kernel, by the launch's number."""
    modules = {}
    for trace_slice, around in with_parents(slices):
        if _CORRELATION not in trace_slice.details:
            continue
        named = [outer for outer in around if outer.category not in (OP, ANNOTATION)]
        if named:
            modules[trace_slice.details[_CORRELATION]] = named[-1].name
    return modules
