"""Segments: consecutive lines of a program that `torch.compile` compiles together, forward and
backward.

A program is split at reshardings (these stay between the segments, in eager), at random ops (whose
generators are ours), and between the layers of the model, so that the reduction of a layer's
gradients overlaps with the backward. A segment is a function of tensors alone. Segments that are
equal up to names of variables, such as the N blocks of a model, are one function and compiled once.
Inductor's cache on disk serves other ranks and later runs.
"""

import ast
import warnings
from collections import Counter
from collections.abc import (
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.ir.op import OpCall
from alpa_strategy.lower.lines import Line, drop_dead, function_of
from alpa_strategy.sharding.rule_table import library_rule

# A layer of fewer ops is compiled together with its neighbours.
LEAST_OPS = 6
# Of one segment: a segment of the full model would delay its gradients, and compile for minutes.
MOST_OPS = 64
# Functions of torch ops alone, which Dynamo traces.
PLAIN_FUNCTIONS = "alpa_strategy.capture.ops"


def is_compilable(call: OpCall) -> bool:
    """Whether a deterministic op may stand in a compiled segment: no user's code, nor RNNs, which
    it would unroll.
    """
    if isinstance(call.target, torch._ops.OpOverload):
        unrolls = call.target_name.startswith(
            ("aten.lstm.", "aten.gru.", "aten.rnn_tanh.", "aten.rnn_relu.")
        )
        return not unrolls and (
            call.target.namespace in ("aten", "prims") or library_rule(call.target) is not None
        )
    return getattr(call.target, "__module__", None) == PLAIN_FUNCTIONS


class Compiler:
    """Compiles segments; equal ones of any of its programs share one compilation.

    Args:
        options: keyword arguments of `torch.compile`: `backend`, `mode`, `options`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = segment_options(options)
        # The distinct ones
        self.segments: dict[Hashable, Segment] = {}

    def compiled(
        self,
        lines: Sequence[Line],
        namespace: MutableMapping[str, Any],
        parameters: Collection[str],
    ) -> list[Line]:
        """Return `lines` with calls of compiled segments in place of runs of two or more ops. The
        last line, the return, stays as it is. Lines that gather parameters move ahead of their
        layer.

        Args:
            namespace: the names that `lines` refer to; gets the segments.
            parameters: variables that hold the parameters.
        """
        made_ahead = _made_ahead(lines, parameters)
        result: list[Line] = []
        pieces = _joined(
            piece for layer in _layers(lines[:-1], made_ahead) for piece in _pieces(layer)
        )
        read_later: list[set[str]] = [set(lines[-1].reads)]
        for piece in reversed(pieces):
            read_later.append(read_later[-1].union(*(line.reads for line in piece)))
        for piece, later in zip(pieces, read_later[-2::-1], strict=True):
            is_segment = sum(line.call is not None for line in piece) > 1
            result += [self._call(piece, later, namespace)] if is_segment else piece
        return [*result, lines[-1]]

    def _call(
        self,
        lines: Sequence[Line],
        read_later: Collection[str],
        namespace: MutableMapping[str, Any],
    ) -> Line:
        """Return the line that calls the compiled segment of `lines`. Equal segments are one.

        Args:
            read_later: variables that lines after the segment read; it returns those that it
                defines.
            namespace: of the program; gets the segment.
        """
        results = tuple(name for line in lines for name in line.defines if name in read_later)
        defined = {name for line in lines for name in line.defines}
        returned = Line(f"return ({''.join(f'{name}, ' for name in results)})", (), results)
        tree = ast.parse("\n".join(line.code for line in drop_dead([*lines, returned])))
        renamed = _Renamed(namespace, defined)
        body = [ast.unparse(renamed.visit(statement)) for statement in tree.body]
        source = (
            "\n    ".join([f"def segment({', '.join(renamed.arguments.values())}):", *body]) + "\n"
        )
        key = source, tuple(line.call for line in lines)
        if key not in self.segments:
            variables = {short: namespace[name] for name, short in renamed.bound.items()}
            layers = dict.fromkeys(line.module for line in lines if line.module)
            self.segments[key] = Segment(
                source, variables, self._options, next(iter(layers), "the step")
            )
        name = f"segment_{len([known for known in namespace if known.startswith('segment_')])}"
        namespace[name] = self.segments[key]
        arguments = tuple(renamed.arguments)
        code = f"{', '.join(results)}, = {name}({', '.join(arguments)})" if results else f"{name}()"
        note = f"{len(lines)} ops compiled, from {lines[0].note}"
        modules = list(dict.fromkeys(line.module for line in lines if line.module))
        module = " to ".join(dict.fromkeys([modules[0], modules[-1]])) if modules else ""
        return Line(code, results, arguments, note, module)


def segment_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options with Inductor's defaults for a segment, which differ from those for
    a full net.

    A segment's results keep the strides of eager PyTorch. Convolutions in another layout would be
    copied at each end, and gradients in that layout slow down what runs between segments. Options
    for another backend are returned as a copy. A `mode` is replaced by its options.
    """
    if options.get("backend", "inductor") != "inductor":
        return dict(options)
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class MasksInBackward(CustomGraphPass):
        """Masks of the backward (a ReLU's) are made there, of what eager PyTorch keeps as well.

        Where its result leaves the segment, Inductor makes the mask in the forward to keep less,
        and on CPUs it stores
        booleans one by one: 15 times the op's own time.
        """

        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.nodes:
                value = node.meta.get("val")
                is_mask = (
                    isinstance(value, Tensor)
                    and value.dtype == torch.bool
                    and value.device.type == "cpu"
                )
                if is_mask and node.meta.get("partitioner_tag") == "is_backward":
                    node.meta["partitioner_tag"] = "must_be_in_backward"

        def uuid(self) -> str:
            return "alpa_strategy: masks in the backward, 1"

    segment_defaults = {"layout_optimization": False, "joint_custom_post_pass": MasksInBackward()}
    mode = torch._inductor.list_mode_options(options["mode"]) if options.get("mode") else {}
    others = {name: value for name, value in options.items() if name not in ("mode", "options")}
    return {**others, "options": {**segment_defaults, **mode, **(options.get("options") or {})}}


class Segment:
    """A run of ops, called with its tensors; gives a tuple of tensors.

    It compiles when it is called first (with and without gradients), and again for other strides.

    Args:
        source: of the function `segment`.
        namespace: what it refers to.
        place: whose ops these are, for messages.
    """

    def __init__(
        self, source: str, namespace: dict[str, Any], options: Mapping[str, Any], place: str
    ) -> None:
        self.source, self._place = source, place
        self._eager = function_of(source, "segment", namespace)
        self._compiled = torch.compile(self._eager, fullgraph=True, dynamic=False, **options)
        # With gradients, without
        self._has_compiled: set[bool] = set()

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run compiled, or in eager if compilation failed."""
        if self._compiled is self._eager:
            return self._eager(*operands)
        try:
            if torch.is_grad_enabled() in self._has_compiled:
                return self._compiled(*operands)
            # The backward too is compiled now (a failure in the midst of autograd's could not be
            # caught), and kept for later starts where it is of an `autograd.Function`, as
            # BatchNorm's is: its graph is part of the key.
            cached: dict[str, Any] = {"autograd_cache_allow_custom_autograd_functions": True}
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True, **cached):
                results = self._compiled(*operands)
            self._has_compiled.add(torch.is_grad_enabled())
            return results
        except Exception as error:
            # Loads Dynamo, which only those who compile need.
            from torch._dynamo.exc import (
                TorchDynamoException,
            )

            if not isinstance(error, TorchDynamoException):
                raise
            why = " ".join(str(error).strip().splitlines()[:2]) or type(error).__name__
            warnings.warn(
                f"alpa: compile: ops of {self._place} run uncompiled: {why}", stacklevel=2
            )
            self._compiled = self._eager
            return self._eager(*operands)


class _Renamed(ast.NodeTransformer):
    """Names of a segment's variables by the order in which they appear: arguments a0, what it makes
    t0, others g0.

    Args:
        namespace: holds functions and constants; its tensors become arguments.
        made: variables that the segment makes.
    """

    def __init__(self, namespace: Mapping[str, Any], defined: Collection[str]) -> None:
        self._namespace, self._made = namespace, defined
        self.arguments: dict[str, str] = {}
        self._own: dict[str, str] = {}
        self.bound: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Return the name as numbered by its kind: made here `t`, argument `a`, bound object
        `g`.
        """
        known = self._namespace.get(node.id)
        if node.id in self._made:
            names, letter = self._own, "t"
        elif known is None or isinstance(known, Tensor):
            names, letter = self.arguments, "a"
        else:
            names, letter = self.bound, "g"
        return ast.Name(names.setdefault(node.id, f"{letter}{len(names)}"), node.ctx)


def _made_ahead(lines: Sequence[Line], parameters: Collection[str]) -> set[int]:
    """Return the numbers of the lines that gather parameters for use, and of all that these need.

    They depend on parameters alone, and run uncompiled before the other ops of their layer, so that
    they do not split it: as ZeRO-3 by layers does. ZeRO-3's second gather finds them by their
    autograd nodes (`comm/saved_tensor_hooks.py`).
    """
    of_parameters = set(parameters)
    for line in lines:
        if line.reads and of_parameters.issuperset(line.reads):
            of_parameters.update(line.defines)
    needed: set[str] = set()
    numbers: set[int] = set()
    for number, line in reversed(list(enumerate(lines))):
        if (
            line.reads
            and of_parameters.issuperset(line.reads)
            and (line.is_resharding or needed & set(line.defines))
        ):
            numbers.add(number)
            needed.update(line.reads)
    return numbers


def _layers(lines: Sequence[Line], made_ahead: Collection[int]) -> Iterator[list[Line]]:
    """Yield runs of lines of one layer, each with its `made_ahead` lines first, which are never
    compiled.
    """
    sizes = Counter(
        path for line in lines if line.call is not None for path in _numbered(line.module)
    )
    layer_names = [_layer_of(line.module, sizes) for line in lines]
    runs = [list(numbers) for _, numbers in groupby(range(len(lines)), key=layer_names.__getitem__)]
    for layer in runs:
        ahead = [replace(lines[number], call=None) for number in layer if number in made_ahead]
        yield [*ahead, *(lines[number] for number in layer if number not in made_ahead)]


def _layer_of(module: str, sizes: Mapping[str, int]) -> str:
    """Return the path of the layer that a module belongs to; empty if it is in none.

    Of the modules around it that are one of a row (`blocks.3`) it is the largest that makes one
    segment. Where all are larger, it is the smallest that is worth a segment.

    Args:
        sizes: number of ops of every such module.
    """
    paths = _numbered(module)
    for path in reversed(paths):
        if LEAST_OPS <= sizes[path] <= MOST_OPS:
            return path
    for path in paths:
        if sizes[path] >= LEAST_OPS:
            return path
    return ""


def _numbered(module: str) -> list[str]:
    """Return the names of those modules, of a module and all around it, that are an item of a list
    (`blocks.3`), the innermost first.
    """
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in reversed(range(len(parts))) if parts[i].isdigit()]


def _pieces(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """Yield runs of lines that can be compiled, of at most `MOST_OPS`, and runs that cannot."""
    for can, run in groupby(lines, key=lambda line: line.call is not None):
        piece = list(run)
        step = MOST_OPS if can else len(piece)
        for start in range(0, len(piece), step):
            yield piece[start : start + step]


def _joined(pieces: Iterable[list[Line]]) -> list[list[Line]]:
    """Return the pieces, with neighbours that can be compiled joined if both are small: the ends of
    two layers as well.
    """
    joined: list[list[Line]] = []
    for piece in pieces:
        compilable = all(line.call is not None for run in (piece, *joined[-1:]) for line in run)
        if joined and compilable and max(len(piece), len(joined[-1])) < LEAST_OPS:
            joined[-1] = [*joined[-1], *piece]
        else:
            joined.append(piece)
    return joined
