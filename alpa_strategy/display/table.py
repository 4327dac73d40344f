"""The plan as a rich table: what it costs, what it beats, how each parameter lies, what is
communicated; the same as a
picture and as a page; and what `alpa plan --tune batch_size` found."""

import io
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from alpa_strategy.display.console import make_console, plain
from alpa_strategy.display.timeline import MAX_DRAWN, device_range, plan_timeline
from alpa_strategy.errors import printable
from alpa_strategy.ir.plan import ParameterMode, ParameterPlan, Plan, Predicted, StagePlan
from alpa_strategy.units import format_bytes, format_count, format_seconds

BAR_WIDTH = 40
MODE_STYLES = {"R": "dim", "R*": "cyan", "S": "magenta", "G": "green"}
PART_STYLES = {
    "compute": "blue",
    "communication": "magenta",
    "optimizer": "green",
    "host": "yellow",
    "waiting": "dim",
}
PICTURE_WIDTH = 120  # columns
_WEB_FONTS = re.compile(
    r"@font-face \{.*?\}\s*", re.DOTALL
)  # of rich's pictures: the reader's own do
# A part of a dotted name that is an index. One of thousands of digits is a name, not a number.
_INDEX = re.compile(r"[0-9]{1,9}")
_INDEX_IN_NAME = re.compile(rf"(?<![^.]){_INDEX.pattern}(?![^.])")
Shape = tuple[int, ...]
MODE_MEANINGS = {
    "R": "replicated",
    "R*": "replicated, gradient summed once per step (data parallel)",
    "S": "sharded along dim n, used in shards or gathered at each use (tensor parallel, ZeRO-3)",
    "G": "sharded along dim n, gathered once per step (ZeRO-1/2)",
}


def plan_table(
    plan: Plan, memory_limit: float | None = None, process_bytes: int = 0
) -> RenderableType:
    """The whole plan; in bytes, where known: `memory_limit`, `process_bytes` (host's, beside the
    plan's tensors).
    """
    parts: list[RenderableType] = [_phases(plan, memory_limit), Text()] if plan.phases else []
    parts += [_headline(plan), _summary(plan, memory_limit, process_bytes)]
    if len(plan.stages) > 1:
        parts += [Text(), stage_overview(plan)]
    if (clock := plan_timeline(plan, MAX_DRAWN)) is not None:
        parts += [Text(), clock]
    for equal in equal_stages(plan):
        stage = plan.stages[equal[0]]
        if len(plan.stages) > 1:
            parts += [Text(), _stage_line(equal, [plan.stages[index] for index in equal])]
        parts += [Text(), _parameters(stage, len(equal) > 1)]
        if stage.collectives:
            parts += [Text(), _collectives(stage)]
    parts += [Text(), _legend(plan)]
    parts += [_note(note) for note in plan.notes]
    return Group(*parts)


def _note(note: str) -> Text:
    return Text.assemble(("note  ", "yellow"), plain(note, keeps_lines=True))


def plan_svg(plan: Plan) -> str:
    """The table as an SVG picture, which loads nothing from elsewhere."""
    return _WEB_FONTS.sub("", _printed(plan).export_svg(title="alpa"))


def plan_html(plan: Plan) -> str:
    """The table as a page, which loads nothing from elsewhere."""
    return _printed(plan).export_html()


def _printed(plan: Plan) -> Console:
    console = make_console(record=True, file=io.StringIO(), width=PICTURE_WIDTH)
    console.print(plan_table(plan))
    return console


def plan_timing(plan: Plan, peak_rss: float | None = None) -> Text:
    """Where planning spent its time (`solve 2x4` and `solve 8` together as `solve`), and the memory
    that it took.
    """
    by_phase: dict[str, float] = defaultdict(float)
    for name, seconds in plan.solver_seconds.items():
        by_phase[name.split(" ")[0]] += seconds
    phases = [f"{phase} {format_seconds(seconds)}" for phase, seconds in by_phase.items()]
    total = sum(plan.solver_seconds.values())
    text = f"planned in {format_seconds(total)}" + (f": {', '.join(phases)}" if phases else "")
    memory = f"; peak memory {format_bytes(peak_rss)}" if peak_rss else ""
    return plain(text + memory, "dim")


# Of a step that the host's own time takes at least this share of, the report says so.
LIMITED_BY_HOST = 0.5


def measured_line(prediction: Predicted, measured_seconds: float) -> Text:
    """One line: predicted against measured seconds per step, and whether the host limits it."""
    predicted = prediction.step_seconds
    text = Text.assemble(
        ("alpa ", "bold"),
        f"step measured {format_seconds(measured_seconds)}, predicted {format_seconds(predicted)}",
    )
    if predicted > 0 and measured_seconds > 0:
        ratio = measured_seconds / predicted
        way = "as predicted" if 0.95 <= ratio <= 1.05 else f"{_ratio(ratio)} the prediction"
        text.append(f" ({way})", style="dim")
    host_seconds = prediction.host_seconds + prediction.loop_seconds
    if host_seconds >= LIMITED_BY_HOST * predicted > 0:
        shares = f"{format_seconds(host_seconds)} of {format_seconds(predicted)}"
        loop = f"{format_seconds(prediction.loop_seconds)} in the Trainer's loop and loader"
        text.append(f"; limited by the host: {shares}, {loop}", style="yellow")
    return text


def _headline(plan: Plan) -> Text:
    count = max(stage.first_device + math.prod(stage.submesh) for stage in plan.stages)
    text = Text.assemble(("Alpa plan", "bold"), f"  {count} device{'s' * (count != 1)}")
    if plan.cluster_name:
        text.append(" on ").append_text(plain(plan.cluster_name))
    if len(plan.stages) == 1:
        text.append(f", mesh {mesh_text(plan.stages[0].logical_mesh)}")
        text.append(f", {plan.num_microbatches} micro-batches" if plan.num_microbatches > 1 else "")
        text.append(recomputes(plan.stages[0]))
    else:
        text.append(f", {len(plan.stages)} stages, {plan.num_microbatches} micro-batches, ")
        text.append_text(plain(plan.schedule))
    text.append(f", {proof_of(plan)}", style="green" if plan.gap <= 1e-6 else "yellow")
    return text


def _summary(plan: Plan, memory_limit: float | None, process_bytes: int) -> Table:
    p = plan.predicted
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    parts = step_parts(plan)
    line = Text.assemble((format_seconds(p.step_seconds), "bold"))
    if not plan.is_eager:  # nobody knows what such steps do
        table.add_row("step", line.append("  ").append(_bar(parts)) if parts else line)
    if parts:
        words = [
            Text.assemble(("■ ", PART_STYLES[name]), f"{name} {format_seconds(s)}")
            for name, s in parts.items()
        ]
        table.add_row("", Text("  ").join(words))
    memory = Text(format_bytes(p.peak_bytes) + " per device at the peak")
    if memory_limit and math.isfinite(memory_limit):
        memory.append(
            f", {p.peak_bytes / memory_limit:.0%} of {format_bytes(memory_limit)}", style="dim"
        )
    if process_bytes:
        memory.append(
            f", {format_bytes(p.peak_bytes + process_bytes)} with the process itself", style="dim"
        )
    table.add_row("memory", memory)
    if plan.baselines:
        table.add_row("instead", _baselines(plan))
    return table


def _baselines(plan: Plan) -> Text:
    """The named plans that were priced, and how many times the plan's seconds they take."""
    step, lines = plan.predicted.step_seconds, []
    for name, seconds in plan.baselines.items():
        if seconds is None or not math.isfinite(seconds):
            lines.append(Text.assemble(plain(name), " ", ("does not fit", "red")))
        else:
            ratio = seconds / step if step > 0 else 1.0
            shown = f" {format_seconds(seconds)} "
            lines.append(Text.assemble(plain(name), shown, (f"({_ratio(ratio)})", "dim")))
    return Text(", ").join(lines)


def _bar(parts: Mapping[str, float]) -> Text:
    largest = max(parts.values())  # in its units no sum overflows, whatever a file says
    total = sum(seconds / largest for seconds in parts.values())
    bar, done, drawn = Text(), 0.0, 0
    for name, seconds in parts.items():
        done += seconds / largest
        end = round(
            BAR_WIDTH * done / total
        )  # of the sum so far: rounding each part would not fill the bar
        bar.append("━" * (end - drawn), style=PART_STYLES[name])
        drawn = end
    return bar


def _phases(plan: Plan, memory_limit: float | None) -> RenderableType:
    """One row a phase of the iteration, and what it takes altogether."""
    table = _plain_table("phase", "layout")
    _add_columns(table, (), ("times", "each", "if it stays", "moving", "together", "memory"))
    for phase in plan.phases:
        seconds = (phase.seconds, phase.staying_seconds, phase.moved_seconds, phase.total_seconds)
        each = ["" if value is None else format_seconds(value) for value in seconds]
        memory = Text(
            format_bytes(phase.peak_bytes),
            "red" if phase.peak_bytes > (memory_limit or math.inf) else "",
        )
        table.add_row(plain(phase.name), plain(phase.layout), str(phase.times), *each, memory)
    stays = [
        phase.times * phase.staying_seconds
        for phase in plan.phases
        if phase.staying_seconds is not None
    ]
    text = Text.assemble(("Iteration", "bold"), f"  {format_seconds(plan.iteration_seconds)}")
    if len(stays) == len(plan.phases):
        text.append(
            f", {format_seconds(sum(stays))} if all parameters stay as they lie for training", "dim"
        )
    return Group(text, table)


def stage_overview(plan: Plan) -> Table:
    """One row a stage, seconds of one micro-batch.

    `remat`: whether, and in how many spans, it recomputes; `idle`: the share of the step in which
    its devices wait.
    """
    clock = plan_timeline(plan)  # with all micro-batches: a few would overstate the ends
    table = _plain_table("stage")
    table.add_column("layers", overflow="fold", min_width=15)
    remat = any(stage.remat for stage in plan.stages)
    names = (
        "forward",
        "backward",
        *(("remat",) if remat else ()),
        "memory",
        *(("idle",) if clock else ()),
    )
    _add_columns(table, ("devices", "mesh"), names)
    for index, stage in enumerate(plan.stages):
        seconds = (stage.forward_seconds, stage.backward_seconds)
        # `blocks.0-3`; names of a file are cut to a length that this can go through.
        layers = re.sub(r"\b([\w.]+\.)(\d+)-\1(\d+)", r"\1\2-\3", printable(stage.layers))
        row: list[RenderableType] = [
            str(index),
            plain(layers),
            device_range(stage),
            mesh_text(stage.logical_mesh),
        ]
        row += [format_seconds(each) if each else "" for each in seconds]
        if remat:
            row.append(
                "" if not stage.remat else f"in {len(stage.spans)}" if stage.remat_cuts else "whole"
            )
        row.append(format_bytes(stage.predicted.peak_bytes))
        if clock:
            mesh = next(m for m, stages in enumerate(clock.stages) if index in stages)
            row.append(f"{clock.idle_share(mesh):.0%}")
        table.add_row(*row)
    return table


def _stage_line(indices: Sequence[int], stages: Sequence[StagePlan]) -> Text:
    """The heading of what one stage, or several equal ones, hold and send."""
    stage = max(
        stages, key=lambda each: each.predicted.peak_bytes
    )  # equal in what they hold, not in what is in flight
    devices = (
        f"device{'s' * (math.prod(stage.submesh) > 1)} {device_range(stage)}, "
        if len(stages) == 1
        else "each "
    )
    name = f"Stage{'s' * (len(stages) > 1)} {index_ranges(indices)}"
    text = Text.assemble((name, "bold"), f"  {devices}mesh {mesh_text(stage.logical_mesh)}, ")
    most = "up to " if len(stages) > 1 else ""
    text.append(
        f"{format_seconds(stage.predicted.step_seconds)},"
        f" {most}{format_bytes(stage.predicted.peak_bytes)}"
    )
    return text.append(recomputes(stage))


def _parameters(stage: StagePlan, stands_for_others: bool) -> Table:
    groups = parameter_groups(stage.parameter_plans, stage.shapes)
    table = _plain_table()
    table.add_column("parameters", overflow="fold")
    table.add_column("", justify="right", style="dim", no_wrap=True)
    sized = any(group.shape is not None for group in groups)
    if sized:
        _add_columns(table, ("shape",), ("elements",))
    memory = ["memory"] if any(group.on_host for group in groups) else []
    _add_columns(
        table,
        [f"axis {axis} ({size})" for axis, size in enumerate(stage.logical_mesh)] + memory,
        (),
    )
    for group in groups:
        pattern = collapse_indices(group.pattern) if stands_for_others else group.pattern
        row: list[RenderableType] = [
            plain(pattern),
            f"x{len(group.names)}" if len(group.names) > 1 else "",
        ]
        if group.shape is not None:
            row += [
                mesh_text(group.shape) or "scalar",
                format_count(len(group.names) * math.prod(group.shape)),
            ]
        elif sized:
            row += ["", ""]
        row += [
            Text(str(mode), style=MODE_STYLES.get(mode.storage.value, "")) for mode in group.modes
        ]
        table.add_row(*row, *(["host"] if group.on_host else []))
    return table


def _collectives(stage: StagePlan) -> Table:
    table = _plain_table("collective", "axis", "when")
    _add_columns(table, (), ("calls", "bytes", "time per step"))
    for c in sorted(stage.collectives, key=lambda c: (-c.seconds, c.kind)):
        when = "once a step" if c.phase == "step" else c.phase
        table.add_row(
            plain(c.kind),
            str(c.axis),
            plain(when),
            str(c.count),
            format_bytes(c.num_bytes),
            format_seconds(c.seconds),
        )
    return table


def _plain_table(*names: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    _add_columns(table, names, ())
    return table


def _add_columns(table: Table, left: Iterable[str], right: Iterable[str]) -> None:
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)


def _legend(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2))
    plans = [parameter for stage in plan.stages for parameter in stage.parameter_plans.values()]
    used = {mode.storage.value for parameter in plans for mode in parameter.modes}
    for kind in (kind for kind in MODE_MEANINGS if kind in used):
        letter = kind + ("n" if kind in "SG" else "")
        table.add_row(Text(letter, style=MODE_STYLES[kind]), Text(MODE_MEANINGS[kind], style="dim"))
    if any(parameter.on_host for parameter in plans):
        meaning = "in host memory with gradient and optimizer state, on the device while in use"
        table.add_row(Text("host"), Text(meaning, style="dim"))
    return table


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


# What is said of a plan: parameters of equal fate as one line, stages, the proof


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with one name pattern, shape and plan. `shape` is None when it is not known."""

    pattern: str
    names: tuple[str, ...]
    modes: tuple[ParameterMode, ...]
    shape: Shape | None
    on_host: bool = False


def parameter_groups(
    plans: Mapping[str, ParameterPlan], shapes: Mapping[str, Shape]
) -> tuple[ParameterGroup, ...]:
    """Group by name with its indices collapsed, shape and modes, in order of first appearance.

    Where one pattern falls into several groups, each shows the indices that it stands for:
    `blocks.{0-2,5}.fc.weight`.
    """
    members: dict[tuple[str, Shape | None, tuple[ParameterMode, ...], bool], list[str]] = {}
    for name, plan in plans.items():
        # In the module's dims: a fused weight [3, n, k] of the step is [3 n, k] to the user.
        members.setdefault(
            (collapse_indices(name), shapes.get(name), plan.module_modes, plan.on_host), []
        ).append(name)
    patterns, groups = [pattern for pattern, *_ in members], []
    for (pattern, shape, modes, on_host), names in members.items():
        if len(names) == 1:
            pattern = names[0]
        elif patterns.count(pattern) > 1:
            # Only the first index is spelled out: blocks.{0-2}.experts.*
            indices = [int(part) for name in names for part in _INDEX_IN_NAME.findall(name)[:1]]
            pattern = pattern.replace("*", f"{{{index_ranges(indices)}}}", 1)
        groups.append(ParameterGroup(pattern, tuple(names), modes, shape, on_host))
    return tuple(groups)


def collapse_indices(name: str) -> str:
    """Every part of a dotted name that is a number becomes `*`."""
    return ".".join("*" if _INDEX.fullmatch(part) else part for part in name.split("."))


def index_ranges(indices: Iterable[int]) -> str:
    """`0-7,13`."""
    ranges: list[list[int]] = []
    for index in sorted(set(indices)):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)


def equal_stages(plan: Plan) -> list[list[int]]:
    """Indices of stages whose parameters (up to the numbers in their names) and collectives are the
    same, together.
    """
    found: dict[tuple, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        groups = parameter_groups(stage.parameter_plans, stage.shapes)
        held = tuple(
            (collapse_indices(g.pattern), len(g.names), g.shape, g.modes, g.on_host) for g in groups
        )
        said = tuple((c.kind, c.axis, c.phase, c.count, c.num_bytes) for c in stage.collectives)
        found.setdefault(
            (stage.logical_mesh, stage.remat, len(stage.spans), held, said), []
        ).append(index)
    return list(found.values())


def step_parts(plan: Plan) -> dict[str, float]:
    """What a step's seconds go to; `waiting`: a pipeline's busiest stage has nothing to do. Empty
    where unknown.
    """
    p = plan.predicted
    parts = {
        "compute": p.compute_seconds,
        "communication": p.communication_seconds,
        "optimizer": p.optimizer_seconds,
    }
    host = p.host_seconds + p.loop_seconds - p.hidden_seconds
    if host > 0:
        parts["host"] = host
    waiting = p.step_seconds - sum(parts.values())
    if plan.is_pipelined and waiting > 0:
        parts["waiting"] = waiting
    return parts if any(parts.values()) else {}


def mesh_text(shape: Sequence[int]) -> str:
    """`2 x 4`."""
    return " x ".join(map(str, shape))


def recomputes(stage: StagePlan) -> str:
    """In words, to be appended, and what waits in host memory; empty where nothing does."""
    spans = f" in {len(stage.spans)} spans" if stage.remat_cuts else ""
    waiting = f", {len(stage.stored)} ops' results in host memory" if stage.stored else ""
    return (f", activations recomputed{spans}" if stage.remat else "") + waiting


def proof_of(plan: Plan) -> str:
    """How good the plan is known to be, and among which plans."""
    if plan.is_eager:
        is_planned = any(stage.strategies for stage in plan.stages)
        return "steps as written, " + (
            "submodules planned" if is_planned else "a replica on each device"
        )
    count, of_many = (
        plan.num_microbatches,
        sum(math.prod(stage.submesh) for stage in plan.stages) > 1,
    )
    among = (
        f" for {count} micro-batch{'es' * (count != 1)}"
        if plan.is_pipelined
        else " of one stage" * of_many
    )
    if plan.gap <= 1e-6:
        return f"proved optimal{among}"
    if plan.gap >= 1.0:
        return "without a bound"
    return f"within {max(plan.gap, 1e-4):.2%} of a bound{among}"


def tune_table(found: Mapping[int, Plan | Exception], best: int | None, num_ranks: int) -> Table:
    """One row a batch size; `num_ranks`: of those that bring a batch each."""
    table = Table()
    for name in (
        "data.batch_size",
        "rows a step",
        "micro-batches",
        "stages",
        "step",
        "samples/s",
        "memory",
    ):
        table.add_column(name, justify="right")
    for size, plan in found.items():
        rows = size * num_ranks
        if not isinstance(plan, Plan):
            first_line = next(iter(str(plan).splitlines()), type(plan).__name__)
            table.add_row(str(size), str(rows), plain(first_line[:60]), *[""] * 4, style="dim")
            continue
        seconds, parts = plan.iteration_seconds, plan.num_microbatches
        table.add_row(
            str(size),
            str(rows),
            f"{parts} of {rows // parts}",
            plain(f"{len(plan.stages)} {plan.schedule}") if len(plan.stages) > 1 else "1",
            format_seconds(seconds),
            f"{rows / seconds:.4g}",
            format_bytes(plan.predicted.peak_bytes),
            style="bold green" if size == best else None,
        )
    return table
