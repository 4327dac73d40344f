"""Parts of a plan as rich tables and lines: headline, seconds, stages, parameters, collectives; and
the table of `alpa plan --tune batch_size`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alpa_strategy.display.console import DottedName, plain
from alpa_strategy.display.stage_groups import idle_shares
from alpa_strategy.display.timeline import device_range, has_timeline
from alpa_strategy.errors import printable
from alpa_strategy.ir.plan import (
    NO_BOUND,
    ParameterMode,
    ParameterPlan,
    Plan,
    Predicted,
    StagePlan,
    stages_by_devices,
)
from alpa_strategy.ir.value_names import INDEX_IN_NAME, collapse_indices
from alpa_strategy.units import (
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    format_share,
)

# Columns of the bar of a step's seconds.
BAR_WIDTH = 40

# By storage placement, and by share of a step's seconds.
MODE_STYLES = {"R": "dim", "R*": "cyan", "S": "magenta", "G": "green"}
PART_STYLES = {
    "compute": "blue",
    "communication": "magenta",
    "optimizer": "green",
    "host": "yellow",
    "waiting": "dim",
}
# A component of a dotted name that is an index. One of thousands of digits is a name.
Shape = tuple[int, ...]
MODE_MEANINGS = {
    "R": "replicated",
    "R*": "replicated, gradient summed once per step (data parallel)",
    "S": "sharded along dim n, used in shards or gathered at each use (tensor parallel, ZeRO-3)",
    "G": "sharded along dim n, gathered once per step (ZeRO-1)",
}


def note_text(note: str) -> Text:
    """Return a note of a plan as a line."""
    return Text.assemble(("note  ", "yellow"), plain(note, keeps_lines=True))


def plan_timing(plan: Plan, peak_rss: float | None = None) -> Text:
    """Return a line with the seconds of each planning phase, and the memory that planning took.

    Args:
        plan: whose `solve 2x4` and `solve 8` are added up as `solve`.
        peak_rss: bytes; None: not known.
    """
    by_phase: dict[str, float] = defaultdict(float)
    for name, seconds in plan.solver_seconds.items():
        by_phase[name.split(" ")[0]] += seconds
    phases = [f"{phase} {format_seconds(seconds)}" for phase, seconds in by_phase.items()]
    total = sum(plan.solver_seconds.values())
    # A training's plan has only the seconds of the solvers: it captured before.
    verb = "planned" if "capture" in by_phase else "solved"
    text = f"{verb} in {format_seconds(total)}" + (f": {', '.join(phases)}" if phases else "")
    memory = f"; peak memory {format_bytes(peak_rss)}" if peak_rss else ""
    return plain(text + memory, "dim")


# Share of a step's seconds from which on the host's time is reported as the limit.
LIMITED_BY_HOST = 0.5
# Times the prediction from which on a likely cause of a slow step is named.
CLEARLY_SLOWER = 1.5
# A lower bound of the step that is at least this share below it says little.
WEAK_BOUND = 0.2


def prediction_text(seconds: float, planned_seconds: float) -> str:
    """Return the predicted seconds of a step, and how they differ from the plan's if they do.

    Args:
        seconds: predicted with the Trainer's loop as the job has measured it.
        planned_seconds: predicted by the plan, before the job.
    """
    shown = format_seconds(seconds)
    planned = format_seconds(planned_seconds)
    if shown == planned:
        return shown
    difference = format_seconds(abs(seconds - planned_seconds))
    if seconds > planned_seconds:
        change = f"{difference} more"
    else:
        change = f"{difference} less"
    return f"{shown} ({planned} by the plan, {change} in the Trainer's loop and loader)"


def measured_line(
    prediction: Predicted,
    measured_seconds: float,
    rates: str = "",
    planned_seconds: float | None = None,
    likely_cause: str = "",
) -> Text:
    """Return a line with measured and predicted seconds per step, and whether the host limits
    it.

    Args:
        prediction: of a step.
        measured_seconds: of a step.
        rates: measured, in words (`rates_text`).
        planned_seconds: predicted for a step by the plan; None: as by `prediction`.
        likely_cause: of a step that takes clearly longer than predicted; "": not known.
    """
    predicted = prediction.step_seconds
    planned = predicted if planned_seconds is None else planned_seconds
    shown = prediction_text(predicted, planned)
    text = Text.assemble(
        ("alpa ", "bold"),
        f"step measured {format_seconds(measured_seconds)}, predicted {shown}",
    )
    if predicted > 0 and measured_seconds > 0:
        ratio = measured_seconds / predicted
        is_near = 0.95 <= ratio <= 1.05
        text.append(", as predicted" if is_near else f": {_ratio(ratio)} the prediction")
    if rates:
        text.append(f", {rates}")
    host_seconds = prediction.host_seconds + prediction.loop_seconds
    if host_seconds >= LIMITED_BY_HOST * predicted > 0:
        shares = f"{format_seconds(host_seconds)} of {format_seconds(predicted)}"
        loop = f"{format_seconds(prediction.loop_seconds)} in the Trainer's loop and loader"
        text.append(f"; limited by the host: {shares}, {loop}", style="yellow")
    if likely_cause and measured_seconds > CLEARLY_SLOWER * predicted > 0:
        text.append(f"; {likely_cause}", style="yellow")
    return text


def headline(plan: Plan) -> Text:
    """Return devices, mesh or stages, precision, and how close the plan is to the optimum."""
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
    if plan.figures is not None and plan.figures.precision:
        text.append(", ").append_text(plain(plan.figures.precision))
    text.append(f", {proof_of(plan)}", style="green" if plan.gap <= 1e-6 else "yellow")
    return text


def baselines_text(plan: Plan) -> Text:
    """Return the named plans with their seconds, and the ratios of these to the plan's seconds."""
    step = plan.predicted.step_seconds
    lines = []
    for name, seconds in plan.baselines.items():
        if seconds is None or not math.isfinite(seconds):
            lines.append(Text.assemble(plain(name), " ", ("does not fit", "red")))
        else:
            ratio = seconds / step if step > 0 else 1.0
            shown = f" {format_seconds(seconds)} "
            lines.append(Text.assemble(plain(name), shown, (f"({_ratio(ratio)})", "dim")))
    return Text(", ").join(lines)


def seconds_legend(parts: Mapping[str, float]) -> Text:
    """Return the names, seconds and colours of the pieces of `seconds_bar`."""
    words = []
    for name, seconds in parts.items():
        square = ("■ ", PART_STYLES[name])
        words.append(Text.assemble(square, f"{name} {format_seconds(seconds)}"))
    return Text("  ").join(words)


def seconds_bar(parts: Mapping[str, float]) -> Text:
    """Return a bar with a piece for each part of a step, of which there is at least one."""
    # In units of the largest one no sum overflows, whatever numbers a file has.
    largest = max(parts.values())
    total = sum(seconds / largest for seconds in parts.values())
    bar = Text()
    done = 0.0
    drawn = 0
    for name, seconds in parts.items():
        done += seconds / largest

        # Rounded is the sum so far: rounded pieces might not fill the bar.
        end = round(BAR_WIDTH * done / total)
        bar.append("━" * (end - drawn), style=PART_STYLES[name])
        drawn = end
    return bar


def iteration_phases(plan: Plan, memory_limit: float | None) -> RenderableType:
    """Return a table with a row for each phase of the iteration, below their total seconds."""
    table = plain_table("phase", "layout")
    add_columns(table, (), ("times", "each", "if it stays", "moving", "together", "memory"))
    for phase in plan.phases:
        seconds = (phase.seconds, phase.staying_seconds, phase.moved_seconds, phase.total_seconds)
        columns = list(map(_optional_seconds, seconds))
        is_too_large = phase.peak_bytes > (memory_limit or math.inf)
        memory = Text(format_bytes(phase.peak_bytes), "red" if is_too_large else "")
        table.add_row(plain(phase.name), plain(phase.layout), str(phase.times), *columns, memory)

    staying_seconds = []
    for phase in plan.phases:
        if phase.staying_seconds is not None:
            staying_seconds.append(phase.times * phase.staying_seconds)

    text = Text.assemble(("Iteration", "bold"), f"  {format_seconds(plan.iteration_seconds)}")
    if len(staying_seconds) == len(plan.phases):
        total = format_seconds(sum(staying_seconds))
        text.append(f", {total} if all parameters stay as they lie for training", "dim")
    return Group(text, table)


def _optional_seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def stage_overview(plan: Plan) -> Table:
    """Return a table with a row for each stage, in seconds of one micro-batch.

    Column `remat`: whether, and in how many recompute segments, it recomputes. Column `idle`: the
    share of the step in which its devices are idle.
    """
    idle = idle_shares(plan)
    groups = stages_by_devices(plan)
    has_schedule = has_timeline(plan)
    recomputes_any = any(stage.remat for stage in plan.stages)
    names = ["forward", "backward"]
    if recomputes_any:
        names.append("remat")
    names.append("memory")
    if has_schedule:
        names.append("idle")

    table = plain_table("stage")
    table.add_column("layers", overflow="fold", min_width=15)
    add_columns(table, ("devices", "mesh"), names)
    for index, stage in enumerate(plan.stages):
        # `blocks.0-3`; names of a file are short enough for this pattern.
        layers = re.sub(r"\b([\w.]+\.)(\d+)-\1(\d+)", r"\1\2-\3", printable(stage.layers))
        row: list[RenderableType] = [
            str(index),
            plain(layers),
            device_range(stage),
            mesh_text(stage.logical_mesh),
        ]
        for seconds in (stage.forward_seconds, stage.backward_seconds):
            row.append(format_seconds(seconds) if seconds else "")
        if recomputes_any:
            row.append(_remat_text(stage))
        row.append(format_bytes(stage.predicted.peak_bytes))
        if has_schedule:
            mesh = next(m for m, stages in enumerate(groups) if index in stages)
            row.append(format_share(idle[mesh]))
        table.add_row(*row)
    return table


def _remat_text(stage: StagePlan) -> str:
    """Return the entry in column `remat`: `in 3` (segments), `whole`, or "" for none."""
    if not stage.remat:
        return ""
    return f"in {len(stage.spans)}" if stage.recompute_splits else "whole"


def stage_line(indices: Sequence[int], stages: Sequence[StagePlan]) -> Text:
    """Return the heading of the tables of one stage, or of several equal ones."""
    # Equal stages differ in the activations of micro-batches in flight.
    stage = max(stages, key=lambda candidate: candidate.predicted.peak_bytes)
    is_one = len(stages) == 1
    has_one_device = math.prod(stage.submesh) == 1
    devices = f"{'device' if has_one_device else 'devices'} {device_range(stage)}, "
    name = f"{'Stage' if is_one else 'Stages'} {index_ranges(indices)}"
    mesh = f"{devices if is_one else 'each '}mesh {mesh_text(stage.logical_mesh)}, "
    text = Text.assemble((name, "bold"), f"  {mesh}")

    seconds = format_seconds(stage.predicted.step_seconds)
    memory = format_bytes(stage.predicted.peak_bytes)
    text.append(f"{seconds}, {memory}" if is_one else f"{seconds}, up to {memory}")
    return text.append(recomputes(stage))


def parameters_table(stage: StagePlan, stands_for_others: bool) -> Table:
    """Return a table of a stage's parameters, a row for each group with the same storage placement.

    Args:
        stage: with the parameters.
        stands_for_others: whether the names of equal stages differ in their indices.
    """
    groups = parameter_groups(stage.parameter_plans, stage.shapes)
    table = plain_table()
    table.add_column("parameters")
    table.add_column("", justify="right", style="dim", no_wrap=True)
    has_shapes = any(group.shape is not None for group in groups)
    if has_shapes:
        add_columns(table, ("shape",), ("elements",))
    axes = [f"axis {axis} ({size})" for axis, size in enumerate(stage.logical_mesh)]
    add_columns(table, axes, ())
    if any(group.on_host for group in groups):
        add_columns(table, ("memory",), ())

    for group in groups:
        pattern = collapse_indices(group.pattern) if stands_for_others else group.pattern
        count = len(group.names)
        row: list[RenderableType] = [DottedName(pattern), f"x{count}" if count > 1 else ""]
        if group.shape is not None:
            num_elements = count * math.prod(group.shape)
            row += [mesh_text(group.shape) or "scalar", format_count(num_elements)]
        elif has_shapes:
            row += ["", ""]
        for mode in group.modes:
            row.append(Text(str(mode), style=MODE_STYLES.get(mode.storage.value, "")))
        if group.on_host:
            row.append("host")
        table.add_row(*row)
    return table


def collectives_table(stage: StagePlan) -> RenderableType:
    """Return a table of a stage's collectives, the longest first, and the tensors that most bytes
    of each belong to.
    """
    table = plain_table("collective", "axis", "when")
    add_columns(table, (), ("tensors", "bytes", "time per step"))
    tensors = []
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
        if c.largest:
            line = f"largest part of {c.kind} on axis {c.axis}, {when}: {c.largest}"
            tensors.append(plain(line, "dim"))
    return Group(table, *tensors)


def plain_table(*names: str) -> Table:
    """Return an empty table with columns `names`."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    add_columns(table, names, ())
    return table


def add_columns(table: Table, left: Iterable[str], right: Iterable[str]) -> None:
    """Add columns that are aligned to the left, then such that are aligned to the right."""
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)


def legend(plan: Plan) -> Table:
    """Return a table that explains the letters of the placements that the plan uses."""
    table = Table.grid(padding=(0, 2))
    plans = [parameter for stage in plan.stages for parameter in stage.parameter_plans.values()]
    used = {mode.storage.value for parameter in plans for mode in parameter.modes}
    for kind, meaning in MODE_MEANINGS.items():
        if kind not in used:
            continue
        letter = kind + ("n" if kind in "SG" else "")
        table.add_row(Text(letter, style=MODE_STYLES[kind]), Text(meaning, style="dim"))
    if any(parameter.on_host for parameter in plans):
        meaning = "in host memory with gradient and optimizer state, on the device while in use"
        table.add_row(Text("host"), Text(meaning, style="dim"))
    return table


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


# Texts about a plan: groups of parameters, stages, the proof


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with one name pattern, shape and plan."""

    # Their name, with `*` or ranges in the place of indices.
    pattern: str

    names: tuple[str, ...]

    # Storage placement on each mesh axis.
    modes: tuple[ParameterMode, ...]

    # Full shape in the module; None if it is not known.
    shape: Shape | None

    # Whether they are stored in host memory.
    on_host: bool = False


def parameter_groups(
    plans: Mapping[str, ParameterPlan], shapes: Mapping[str, Shape]
) -> tuple[ParameterGroup, ...]:
    """Group parameters by their name without indices, shape and storage, in order of appearance.

    If one pattern has several groups, each shows the indices for which it stands:
    `blocks.{0-2,5}.fc.weight`.

    Args:
        plans: by name.
        shapes: by name, as far as they are known.
    """
    members: dict[tuple[str, Shape | None, tuple[ParameterMode, ...], bool], list[str]] = {}
    for name, plan in plans.items():
        # With the module's dims: a fused weight [3, n, k] of the step is [3 n, k] to the user.
        key = (collapse_indices(name), shapes.get(name), plan.module_modes, plan.on_host)
        members.setdefault(key, []).append(name)

    patterns = [pattern for pattern, *_ in members]
    groups = []
    for (pattern, shape, modes, on_host), names in members.items():
        if len(names) == 1:
            pattern = names[0]
        elif patterns.count(pattern) > 1:
            # Only the first index is written as a range: blocks.{0-2}.experts.*
            indices = [int(part) for name in names for part in INDEX_IN_NAME.findall(name)[:1]]
            pattern = pattern.replace("*", f"{{{index_ranges(indices)}}}", 1)
        groups.append(ParameterGroup(pattern, tuple(names), modes, shape, on_host))
    return tuple(groups)


def index_ranges(indices: Iterable[int]) -> str:
    """Return indices as ranges: `0-7,13`."""
    ranges: list[list[int]] = []
    for index in sorted(set(indices)):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    texts = []
    for low, high in ranges:
        texts.append(f"{low}" if low == high else f"{low}-{high}")
    return ",".join(texts)


def equal_stages(plan: Plan) -> list[list[int]]:
    """Return groups of stages, by index, whose meshes, recompute, parameters and collectives are
    the same up to the numbers in names.
    """
    stages_of_key: dict[tuple, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        groups = parameter_groups(stage.parameter_plans, stage.shapes)
        parameters = tuple(
            (collapse_indices(g.pattern), len(g.names), g.shape, g.modes, g.on_host) for g in groups
        )
        collectives = tuple(
            (c.kind, c.axis, c.phase, c.count, c.num_bytes) for c in stage.collectives
        )
        key = (stage.logical_mesh, stage.remat, len(stage.spans), parameters, collectives)
        stages_of_key.setdefault(key, []).append(index)
    return list(stages_of_key.values())


def step_parts(plan: Plan) -> dict[str, float]:
    """Return the seconds of a step by cause; empty if they are not known.

    `waiting` is the time in which a pipeline's busiest stage is idle. `host` includes what the
    runtime needs for each micro-batch of a single stage.
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
        # Devices of one stage wait for no others: the rest is the runtime's own time.
        part = "waiting" if len(plan.stages) > 1 else "host"
        parts[part] = parts.get(part, 0.0) + waiting
    return parts if any(parts.values()) else {}


def mesh_text(shape: Sequence[int]) -> str:
    """Return a shape as text: `2 x 4`."""
    return " x ".join(map(str, shape))


def recomputes(stage: StagePlan) -> str:
    """Return a text to append: whether a stage recomputes activations, and how many results it
    stores in host memory; empty if neither.
    """
    text = ""
    if stage.remat:
        spans = f" in {len(stage.spans)} spans" if stage.recompute_splits else ""
        text += f", activations recomputed{spans}"
    if stage.stored:
        text += f", {len(stage.stored)} ops' results in host memory"
    return text


def proof_of(plan: Plan) -> str:
    """Return how close the plan is proved to be to the optimum, among which plans; or "eager"."""
    if plan.is_eager:
        is_planned = any(stage.strategies for stage in plan.stages)
        return "eager steps, " + (
            "submodules planned" if is_planned else "a replica on each device"
        )

    num_devices = sum(math.prod(stage.submesh) for stage in plan.stages)
    count = plan.num_microbatches
    kind = ""
    if len(plan.stages) == 1 and num_devices > 1:
        kind += " of one stage"
    if plan.is_pipelined:
        kind += f" with {count} micro-batch{'es' * (count != 1)}"
    pins = plan.figures.pins if plan.figures is not None else ()
    if any(not pin.startswith("num_microbatches=") for pin in pins):
        kind += " and these pins" if plan.is_pipelined else " with these pins"
    if plan.gap <= 1e-6:
        return f"proved optimal among plans{kind}" if kind else "proved optimal"
    if plan.gap >= NO_BOUND:
        return "distance to the optimum not known"
    share = max(plan.gap, 1e-4)
    least = format_seconds(plan.predicted.step_seconds * (1 - share))
    weak = ", a weak bound" if share >= WEAK_BOUND else ""
    return f"no plan{kind} takes less than {least} ({share:.2%} less){weak}"


def tune_table(plans: Mapping[int, Plan | Exception], best: int | None, num_ranks: int) -> Table:
    """Return a table with a row for each batch size.

    Args:
        plans: batch size -> its plan, or the error of planning.
        best: the batch size with the most samples per second, if any.
        num_ranks: number of ranks with a batch of their own.
    """
    table = Table()
    for name in (
        "data.batch_size",
        "samples a step",
        "micro-batches",
        "stages",
        "step",
        "samples/s",
        "memory",
    ):
        table.add_column(name, justify="right")
    for size, plan in plans.items():
        num_samples = size * num_ranks
        if not isinstance(plan, Plan):
            first_line = next(iter(str(plan).splitlines()), type(plan).__name__)
            problem = plain(first_line[:60])
            table.add_row(str(size), str(num_samples), problem, style="dim")
            continue
        seconds = plan.iteration_seconds
        count = plan.num_microbatches
        table.add_row(
            str(size),
            str(num_samples),
            f"{count} of {num_samples // count}",
            plain(f"{len(plan.stages)} {plan.schedule}") if len(plan.stages) > 1 else "1",
            format_seconds(seconds),
            format_rate(num_samples / seconds),
            format_bytes(plan.predicted.peak_bytes),
            style="bold green" if size == best else None,
        )
    return table
