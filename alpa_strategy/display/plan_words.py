"""A plan in words: `4 pipeline stages of 8-way tensor parallel, ZeRO-1`."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from alpa_strategy.display.stage_groups import devices_text, group_sizes
from alpa_strategy.ir.plan import Plan, StagePlan, TaskFigures
from alpa_strategy.units import format_bytes, format_flops, format_rate, format_share

# Ops with a parameter as operand: their name -> the position of the parameter.
_PRODUCTS = {
    "linear": 1,
    "addmm": 2,
    "conv1d": 1,
    "conv2d": 1,
    "conv3d": 1,
    "convolution": 1,
    "embedding": 0,
}

# Share of a stage's elements from which on experts are named.
_LEAST_EXPERTS = 0.1

# Share of a stage's products from which on divided matrices are named beside data parallelism.
_LEAST_DIVIDED = 0.1

# Share of the memory limit from which on it is said what of the device no plan may use.
_ALMOST_ALL = 0.95


@dataclass(frozen=True)
class StageSummary:
    """A stage's parallelism, read from its parameters and strategies."""

    # Devices among which samples or their tokens, matrices, and experts are divided. A device may
    # have its part of the samples and of the experts.
    data: int
    tensor: int
    experts: int

    # 0 to 3: nothing, state, and gradients, and parameters are sharded among data-parallel devices.
    zero: int

    remat: bool

    # Of `data`, the devices among which some products divide their matrices instead.
    partly_tensor: int = 1

    # Of `data`, the devices among which the tokens of a sample are divided.
    sequence: int = 1

    @property
    def samples(self) -> int:
        """Devices among which samples are divided."""
        return self.data // self.sequence

    @property
    def words(self) -> str:
        """Such as `2-way data parallel, 4-way tensor parallel, ZeRO-1`."""
        words = []
        if self.data == self.tensor == self.experts == 1:
            words.append("one device")
        if self.samples > 1:
            words.append(f"{self.samples}-way data parallel")
        if self.sequence > 1:
            words.append(f"{self.sequence}-way sequence parallel")
        if self.tensor > 1:
            words.append(f"{self.tensor}-way tensor parallel")
        if self.partly_tensor > 1:
            also = "also " if self.tensor > 1 else ""
            words.append(f"{also}{self.partly_tensor}-way tensor parallel in some layers")
        if self.experts > 1:
            words.append(f"{self.experts}-way expert parallel")
        if self.zero:
            words.append(f"ZeRO-{self.zero}")
        if self.remat:
            words.append("activation checkpointing")
        return ", ".join(words)


def stage_summary(stage: StagePlan) -> StageSummary:
    """Return how a stage's products and parameters are divided, axis by axis."""
    data = tensor = experts = partly_tensor = sequence = 1
    zero = 0
    for axis, size in enumerate(stage.logical_mesh):
        if size == 1:
            continue
        elements = _elements_by_storage(stage, axis)
        has_experts = elements["experts"] >= _LEAST_EXPERTS * sum(elements.values()) > 0
        if has_experts:
            experts *= size
        if _divides_matrices(stage, axis, elements):
            tensor *= size
        else:
            data *= size
            if _divides_tokens(stage, axis):
                sequence *= size
            zero = max(zero, _zero_level(elements, _uses_shards(stage, axis)))
            if not has_experts and _divides_some_matrices(stage, axis):
                partly_tensor *= size
    return StageSummary(data, tensor, experts, zero, stage.remat, partly_tensor, sequence)


def _elements_by_storage(stage: StagePlan, axis: int) -> Counter[str]:
    """Return the elements of parameters that are `full`, `once` (gathered once per step), `experts`
    (a batch of matrices, divided along the batch), or `shards` on a mesh axis.
    """
    elements: Counter[str] = Counter()
    for name, plan in stage.parameter_plans.items():
        mode = plan.modes[axis]
        shape = stage.shapes.get(name, ())
        if mode.is_gathered_once:
            kind = "once"
        elif mode.is_unsharded:
            kind = "full"
        elif mode.dim == 0 and len(shape) == 3:
            kind = "experts"
        else:
            kind = "shards"
        elements[kind] += math.prod(shape)
    return elements


def _divides_matrices(stage: StagePlan, axis: int, elements: Counter[str]) -> bool:
    """Whether an axis divides the matrices of products more often than their samples; without
    products, whether most elements of parameters are in shards.
    """
    num_divided, num_full = _products(stage, axis)
    if num_divided == num_full == 0:
        return elements["shards"] > elements["full"] + elements["once"]
    return num_divided > num_full


def _divides_some_matrices(stage: StagePlan, axis: int) -> bool:
    """Whether an axis divides the matrices of more than a few products."""
    num_divided, num_full = _products(stage, axis)
    return num_divided >= _LEAST_DIVIDED * (num_divided + num_full) > 0


def _divides_tokens(stage: StagePlan, axis: int) -> bool:
    """Whether an axis divides the tokens of sequences, not the samples of the batch: the second dim
    of most linear layers' inputs, [samples, tokens, width].
    """
    dims: Counter[int | None] = Counter()
    for name, strategies in stage.strategies.items():
        if name.rpartition("_")[0] == "linear":
            dims[strategies[axis].inputs[0].shard_dim] += 1
    return dims[1] > dims.total() / 2


def _products(stage: StagePlan, axis: int) -> tuple[int, int]:
    """Return how many products read a divided and a full matrix on an axis."""
    num_divided = num_full = 0
    for name, strategies in stage.strategies.items():
        # `linear_3`
        position = _PRODUCTS.get(name.rpartition("_")[0])
        inputs = strategies[axis].inputs
        if position is None or position >= len(inputs):
            continue
        if inputs[position].shard_dim is None:
            num_full += 1
        else:
            num_divided += 1
    return num_divided, num_full


def _uses_shards(stage: StagePlan, axis: int) -> bool:
    """Whether products read as many divided matrices as the axis stores in shards: then no
    matrix is gathered for its use, as under ZeRO-3.
    """
    num_sharded = 0
    for name, plan in stage.parameter_plans.items():
        mode = plan.modes[axis]
        num_sharded += mode.is_shard and len(stage.shapes.get(name, ())) > 1
    num_divided, _ = _products(stage, axis)
    return num_divided >= num_sharded > 0


def _zero_level(elements: Counter[str], uses_shards: bool) -> int:
    """Return the ZeRO level of an axis that divides samples: 0, 1 or 3."""
    if not uses_shards and elements["shards"] > elements["full"] + elements["once"]:
        return 3
    return 1 if elements["once"] > elements["full"] else 0


def plan_words(plan: Plan) -> str:
    """Return the plan in words, such as `4 pipeline stages of 8-way tensor parallel, ZeRO-1`.

    They are true of every stage: `8 pipeline stages on 1 to 4 devices each, up to 4-way data
    parallel, ZeRO-1 in 3 of 8 stages`.
    """
    summaries = [stage_summary(stage) for stage in plan.stages]
    sizes = group_sizes(plan)
    count = len(summaries)
    is_uniform = len({summary.words for summary in summaries}) == 1
    if len(sizes) < count:
        # Interleaved: a group of devices has several stages.
        groups = "one group" if len(sizes) == 1 else f"{len(sizes)} groups"
        if is_uniform:
            words = f"{count} pipeline stages on {groups} of devices, each {summaries[0].words}"
        else:
            stages = f"{count} pipeline stages on {groups} of {devices_text(sizes)}"
            words = ", ".join([stages, *_words_of_unequal(summaries)])
    elif count == 1:
        words = summaries[0].words
    elif is_uniform:
        words = f"{count} pipeline stages of {summaries[0].words}"
    else:
        stages = f"{count} pipeline stages on {devices_text(sizes)} each"
        words = ", ".join([stages, *_words_of_unequal(summaries)])
    if plan.num_microbatches > 1:
        words += f", {plan.num_microbatches} micro-batches"
    return words


def batch_words(figures: TaskFigures) -> str:
    """Return the samples of a step of all devices together, such as `1024 samples of 1024 tokens`;
    "" if they are not known.
    """
    samples = figures.num_samples
    if not samples:
        return ""
    words = f"{samples} sample{'s' * (samples != 1)}"
    if not figures.num_tokens:
        return words
    length, rest = divmod(figures.num_tokens, samples)
    return f"{words}, {figures.num_tokens} tokens" if rest else f"{words} of {length} tokens"


def task_words(plan: Plan) -> str:
    """Return a text of the task for which a plan was made, as far as it is known, such as `1024
    samples of 1024 tokens, 16 a micro-batch, 16-mixed, AdamW; pinned: num_microbatches=64`; "" if
    nothing is known.
    """
    figures = plan.figures
    if figures is None:
        return ""
    words = [batch_words(figures)]
    if figures.num_samples and plan.num_microbatches > 1:
        words.append(f"{figures.num_samples / plan.num_microbatches:g} a micro-batch")
    words += [figures.precision, figures.optimizer_name]
    made_for = ", ".join(word for word in words if word)
    pins = f"pinned: {', '.join(figures.pins)}" if figures.pins else ""
    return "; ".join(part for part in (made_for, pins) if part)


def _words_of_unequal(summaries: Sequence[StageSummary]) -> list[str]:
    """Return texts on stages that differ: of each kind of parallelism the largest number of devices
    and the stages with it; of ZeRO levels and checkpointing the number of stages.
    """
    words = []
    is_tensor_parallel = any(summary.tensor > 1 for summary in summaries)
    for kind, sizes in (
        ("data", [summary.samples for summary in summaries]),
        ("sequence", [summary.sequence for summary in summaries]),
        ("tensor", [summary.tensor for summary in summaries]),
        ("partly tensor", [summary.partly_tensor for summary in summaries]),
        ("expert", [summary.experts for summary in summaries]),
    ):
        most = max(sizes)
        if most > 1:
            where = [index for index, size in enumerate(sizes) if size == most]
            is_all = len(where) == len(sizes)
            of_stages = "" if is_all else f" (most in {_stages_text(where)})"
            up_to = "" if is_all else "up to "
            name = kind.removeprefix("partly ")
            also = ""
            some = ""
            if kind.startswith("partly "):
                some = " in some layers"
                if is_tensor_parallel:
                    also = "also "
            words.append(f"{also}{up_to}{most}-way {name} parallel{some}{of_stages}")

    features = Counter(f"ZeRO-{summary.zero}" for summary in summaries if summary.zero)
    features["activation checkpointing"] = sum(summary.remat for summary in summaries)
    for feature, count in sorted(features.items()):
        if count == len(summaries):
            words.append(feature)
        elif count:
            words.append(f"{feature} in {count} of {len(summaries)} stages")
    return words


def _stages_text(indices: Sequence[int]) -> str:
    """Return the first of several stages as text: `stages 0, 3`."""
    shown = ", ".join(map(str, indices[:4]))
    more = ", ..." if len(indices) > 4 else ""
    return f"stage{'s' * (len(indices) > 1)} {shown}{more}"


def peak_text(plan: Plan, memory_limit: float | None, process_bytes: int) -> Text:
    """Return the bytes of a device at the peak, as a share of its limit and with the process.

    Args:
        memory_limit: bytes per device; None: not known.
        process_bytes: of host memory that the process takes in addition to the plan's tensors.
    """
    peak = plan.predicted.peak_bytes
    text = Text(f"peak {format_bytes(peak)}")
    of_limit = ""
    if memory_limit and math.isfinite(memory_limit):
        left = memory_limit - peak
        over = "left" if left >= 0 else "too much"
        text.append(f" of {format_bytes(memory_limit)}", style="dim")
        of_limit = f" ({peak / memory_limit:.0%}), {format_bytes(abs(left))} {over}"
        of_limit += _unusable_text(plan, memory_limit)
    text.append(f" per device{of_limit}", style="dim")
    if process_bytes:
        with_process = format_bytes(peak + process_bytes)
        text.append(f", {with_process} with the process itself", style="dim")
    return text


def _unusable_text(plan: Plan, memory_limit: float) -> str:
    """Return how many bytes of a device no plan may use, to append, for a plan that uses almost all
    that it may; "" for others, and if they are not known.
    """
    if plan.figures is None or not peak_names_unusable(plan, memory_limit):
        return ""
    num_bytes = format_bytes(plan.figures.unusable_bytes)
    return f" ({num_bytes} more are kept for the allocator and libraries)"


def peak_names_unusable(plan: Plan, memory_limit: float) -> bool:
    """Return whether `peak_text` names the bytes of a device that no plan may use: they are known,
    and the plan uses almost all others.
    """
    if plan.figures is None or plan.figures.unusable_bytes == 0:
        return False
    return plan.predicted.peak_bytes >= _ALMOST_ALL * memory_limit


def rates_text(figures: TaskFigures | None, step_seconds: float) -> str:
    """Return the rates of steps that take `step_seconds`, as far as they are known: `100 samples/s,
    102 k tokens/s, MFU 50.0%`; "" if none is. The text names dtypes whose FLOP/s are missing for
    the MFU.
    """
    if figures is None:
        return ""
    words = []
    samples = figures.samples_per_second(step_seconds)
    if samples is not None:
        words.append(f"{format_rate(samples)} samples/s")
    tokens = figures.tokens_per_second(step_seconds)
    if tokens is not None:
        words.append(f"{format_rate(tokens)} tokens/s")
    mfu = figures.mfu(step_seconds)
    if mfu is not None:
        words.append(f"MFU {mfu:.1%}")
    elif words and figures.unrated_dtypes:
        missing = " and ".join(figures.unrated_dtypes)
        words.append(f"MFU not known (no FLOP/s for {missing})")
    return ", ".join(words)


def flops_text(figures: TaskFigures | None) -> str:
    """Return the FLOPs of a step that its MFU counts: `9.86 PFLOP a step in float16: 3.29 PFLOP
    forward, 6.58 PFLOP backward; 4.0% of them are attention's`. "" if they are not known.
    """
    flops = None if figures is None else figures.flops
    if flops is None:
        return ""
    dtypes = list(flops.by_dtype)
    text = f"{format_flops(flops.total)} a step in {dtypes[0]}"
    if len(dtypes) > 1:
        parts = [f"{format_flops(number)} in {dtype}" for dtype, number in flops.by_dtype.items()]
        text = f"{format_flops(flops.total)} a step ({', '.join(parts)})"
    text += f": {format_flops(flops.forward)} forward, {format_flops(flops.backward)} backward"
    if flops.attention:
        text += f"; {format_share(flops.attention / flops.total)} of them are attention's"
    return text


def assumed_rates_text(plan: Plan) -> str:
    """Return a warning if the cluster has no FLOP/s for a dtype of the plan's matmuls, else ""."""
    if plan.figures is None:
        return ""
    return rates_warning(plan.figures.assumed_rates, plan.figures.rated_precision)


def rates_warning(assumed: Mapping[str, str], rated_precision: str) -> str:
    """Return a warning of dtypes for which the cluster has no FLOP/s; "" if there are none.

    Args:
        assumed: dtype without FLOP/s -> the dtype whose FLOP/s are taken.
        rated_precision: a precision in half for which there are FLOP/s; "": there is none.
    """
    if not assumed:
        return ""
    names = ", ".join(assumed)
    taken = ", ".join(dict.fromkeys(assumed.values()))
    text = (
        f"the cluster has no FLOP/s for {names}: its matmuls are priced by those of {taken}. Add"
        " it to peak_flops in the cluster file"
    )
    if rated_precision:
        text += f', or take precision="{rated_precision}", for which it has FLOP/s'
    return text
