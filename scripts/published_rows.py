"""Rows of published results as cases that can be priced: model, cluster, configuration, figures.

A row gives the configuration. Its missing details (kernels, bytes of optimizer state) follow from
the program that was run (`PROGRAMS`). Nothing here is about a single row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from alpa_strategy.cluster.spec import ClusterSpec


@dataclass(frozen=True)
class Program:
    """What a row's source trained with.

    Attributes:
        fused_attention: flash attention or one like it; before 2022 attention was written out.
        compiled: pointwise ops fused, by a compiler or by hand; rows that say `compile` overrule
            it.
        state_bytes: of the optimizer's per parameter, beside a bf16 parameter and its gradient:
            fp32 master weights and two moments are 12.
        gradient_bytes: of an element of a gradient where it is reduced and accumulated.
        alibi, fused_loss, balanced: attention with a bias; a loss that makes no float32 logits;
            stages of a pipeline that are cut by time and not by blocks.
        recomputes_blocks: "selective" recomputation is that of whole blocks, evenly spaced; HFU /
            MFU tells how many.
        gathers_again: sequence-parallel activations are saved as shards and re-gathered in the
            backward.
        flops: how tokens/s follow from published FLOP/s (`measured_seconds`).
        fused_casts: float8 matmuls scale and cast in kernels of their library, whatever else is
            compiled.
        keeps_float8: operands of a float8 matmul are saved for backward in float8.
        shards: parameters are always sharded (FSDP), gathered once a step if there are stages.
    """

    fused_attention: bool = True
    alibi: bool = False
    fused_loss: bool = False
    balanced: bool = False
    recomputes_blocks: bool = False
    gathers_again: bool = False
    compiled: bool = False
    state_bytes: float = 12.0
    gradient_bytes: int = 4
    bias: bool = True
    flops: str = ""
    fused_casts: bool = False
    keeps_float8: bool = False
    shards: bool = False


# (pattern, program): the first pattern that a source matches counts.
PROGRAMS: tuple[tuple[str, Program], ...] = (
    # Parameters are not re-gathered for a pipeline's micro-batches (parallelize_llama.py); the loss
    # is compiled since 2025 (loss.py).
    ("torchtitan.*(asyncTP|h200)", Program(shards=True, fused_loss=True)),
    ("torchtitan", Program(shards=True)),
    # MPT: ALiBi, fused cross-entropy; composer gathers in bf16 and reduces in fp32, but for
    # `mp_mode PURE` (in notes) float8 by TransformerEngine
    (
        "llm-foundry",
        Program(bias=False, alibi=True, fused_loss=True, fused_casts=True, keeps_float8=True),
    ),
    (
        "cases_april2021",
        Program(fused_attention=False, compiled=True, gradient_bytes=2, flops="recomputed"),
    ),
    (
        "arXiv 2205",
        Program(fused_attention=False, compiled=True, gradient_bytes=2, gathers_again=True),
    ),
    ("Megatron-LM", Program(compiled=True, gathers_again=True, flops="model")),
    ("nanotron", Program(balanced=True, gathers_again=True, flops="model")),
    # fms_fsdp/policies/ac_handler.py
    ("fms-fsdp", Program(compiled=True, gradient_bytes=2, recomputes_blocks=True)),
    ("lightning-thunder", Program(state_bytes=4.0, gradient_bytes=2)),
)

# Bandwidth reached between nodes, as a share of the line rate; the cluster files have it as well.
REACHED = 0.7
CLUSTERS = (
    (r"A100 40GB", "a100_40gb"),
    (r"A100", "a100_80gb"),
    (r"H100.*(500 W|lower TDP)", "h100_500w"),
    (r"H100", "dgx_h100"),
    (r"H200", "dgx_h200"),
    (r"B200", "dgx_b200"),
    (r"V100", "p3_16xlarge_x8"),
)


@dataclass(frozen=True)
class Case:
    """A row that can be priced. Sizes are counts; `model` are the arguments of `Transformer`
    without `num_blocks`.

    Attributes:
        rows: sequences of one replica's micro-batch.
        num_microbatches: of a step, per replica.
        shard: devices among which ZeRO splits a parameter (fewer than `dp`: the rest keeps
            replicas).
        recompute: `none`, `full`, `layer` (full blocks), `attention`, or `op` (all but attention
            and every other matmul).
        share: of the blocks that recompute so.
        async_tp: tensor parallel collectives are split into chunks that are overlapped with their
            matmuls.
        seconds, num_bytes: of a step, as measured; None: not published.
    """

    row: int
    source: str
    name: str
    program: Program
    cluster: ClusterSpec
    num_blocks: int
    model: dict[str, Any]
    rows: int
    num_microbatches: int
    dp: int
    tp: int
    pp: int
    loops: int
    zero: int
    shard: int
    recompute: str
    compiled: bool
    seconds: float
    num_bytes: float | None
    share: float = 1.0
    async_tp: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.num_microbatches * self.dp * self.model["seq_len"]


class _NotExpressed(Exception):
    """A row cannot be expressed as a case; the message is the reason."""


def express(row: dict[str, Any]) -> Case | str:
    """Return the case of a published row, or the reason that it cannot be expressed."""
    try:
        return _case(row)
    except _NotExpressed as reason:
        return str(reason)


def _case(row: dict[str, Any]) -> Case:
    program = _program(row)
    notes = str(row["notes"] or "")
    model = _model_sizes(row, program)
    dp, tp, pp = _degrees(row)
    global_batch = row["global_batch"] or 0
    local_batch = row["local_batch"] or global_batch // dp
    micro_batch = _micro_batch(row, local_batch, pp)
    recompute, share = _recomputed_share(row, program)
    if "mp_mode PURE" in notes:
        program = replace(program, gradient_bytes=2)
    source = _short(row["source"])
    if model["float8"] and _precision(row) != "amp_fp8":
        source += " float8"
    case = Case(
        row=row["id"],
        source=source,
        name=row["model"],
        program=program,
        cluster=_cluster(row),
        num_blocks=row["arch"]["layers"],
        model=model,
        rows=micro_batch,
        num_microbatches=max(1, local_batch // micro_batch),
        dp=dp,
        tp=tp,
        pp=pp,
        loops=row["vp"] or 1,
        zero=_zero(row, program, pp),
        shard=min(8, dp) if "HSDP" in notes else dp,
        recompute=recompute,
        compiled=program.compiled if row["compile"] is None else bool(row["compile"]),
        seconds=0.0,
        num_bytes=_bytes(row, notes),
        share=share,
        async_tp=bool(row.get("async_tp")),
    )
    seconds = _measured_seconds(row, case)
    if not seconds:
        raise _NotExpressed("neither seconds, tokens/s nor FLOP/s are published")
    return replace(case, seconds=seconds)


def _program(row: dict[str, Any]) -> Program:
    """Return the program of a row's source.

    Raises:
        _NotExpressed: it is not known, or used parallelism or kernels that are not modelled.
    """
    programs = [program for pattern, program in PROGRAMS if re.search(pattern, row["source"])]
    if not programs:
        raise _NotExpressed(
            "its source says too little of the program (precision, kernels, layout)"
        )
    if (row["cp"] or 1) > 1:
        raise _NotExpressed("a pinned degree of context parallelism: the planner chooses it")
    if (row["ep"] or 1) > 1:
        raise _NotExpressed("expert parallelism: the row's `arch` does not say the experts")
    if _is_float8(row) and "thunder" in row["source"]:
        raise _NotExpressed(
            "how its program keeps float8 parameters and activations is not published"
        )
    if "low rowwise baseline" in str(row["notes"]):
        raise _NotExpressed(
            "its page calls this baseline too low, for a fault of its kernels (torchtitan #1207)"
        )
    return programs[0]


def _precision(row: dict[str, Any]) -> str:
    return str(row["precision"]).lower()


def _is_float8(row: dict[str, Any]) -> bool:
    return bool(re.search("fp8|float8", _precision(row)))


def _degrees(row: dict[str, Any]) -> tuple[int, int, int]:
    """Return the (data, tensor, pipeline) parallel degrees of a row."""
    gpus = row["gpus"]
    tp = row["tp"] or 1
    pp = row["pp"] or 1
    dp = row["dp"] or gpus // (tp * pp)
    if dp * tp * pp != gpus:
        raise _NotExpressed(f"{dp} x {tp} x {pp} devices are not {gpus}")
    if pp > 1 and dp * tp > 8 and dp * tp % 8:
        raise _NotExpressed("stages that take parts of several nodes")
    return dp, tp, pp


def _micro_batch(row: dict[str, Any], local_batch: int, pp: int) -> int:
    """Return the sequences of one replica's micro-batch."""
    if not local_batch:
        raise _NotExpressed("the batch size is not published")
    if row["micro_batch"]:
        return row["micro_batch"]
    if row["grad_accum"]:
        return local_batch // row["grad_accum"]
    if row["local_batch"]:
        # torchtitan's default is as many micro-batches as stages
        return max(1, local_batch // pp)
    raise _NotExpressed("the micro-batch is not published")


def _recomputed_share(row: dict[str, Any], program: Program) -> tuple[str, float]:
    """Return (kind of recomputation, share of the blocks that recompute so)."""
    recompute = _recompute(row["activation_checkpointing"])
    if recompute is None:
        raise _NotExpressed(f"recomputation {row['activation_checkpointing']!r} is not known")
    if program.recomputes_blocks and recompute == "op":
        mfu = row["mfu_percent"]
        hfu = row["hfu_percent"]
        if mfu and hfu:
            # HFU counts recomputed forwards as well, and a forward is a third of a step.
            return "layer", min(1.0, 3 * (hfu / mfu - 1))
    share = 0.5 if recompute == "layer" else 1.0
    return recompute, share


def _model_sizes(row: dict[str, Any], program: Program) -> dict[str, Any]:
    """Return the arguments of `Transformer` without `num_blocks`."""
    arch = row["arch"]
    notes = str(row["notes"] or "")
    seq_len = row["seq_len"] or _number(r"block size (\d+)", notes)
    if not seq_len:
        raise _NotExpressed("the sequence length is not published")
    gated = "llama" in row["model"].lower()
    float8 = ""
    if _is_float8(row):
        float8 = "rowwise" if "rowwise" in _precision(row) else "tensorwise"
    return {
        "dim": arch["hidden"],
        "heads": arch["heads"],
        "kv_heads": arch.get("kv_heads") or arch["heads"],
        "ffn": arch.get("ffn") or 4 * arch["hidden"],
        # by default Megatron's GPT-2 vocabulary, padded
        "vocab": arch.get("vocab") or 51200,
        "seq_len": seq_len,
        "gated": gated,
        "bias": program.bias and not gated,
        "fused": program.fused_attention,
        "alibi": program.alibi,
        "fused_loss": program.fused_loss,
        "tied": bool(arch.get("tied", not gated)),
        "float8": float8,
    }


def _zero(row: dict[str, Any], program: Program, pp: int) -> int:
    """As published, or as the program has it where the row does not say."""
    if row["zero"] is None and program.shards:
        return 2 if pp > 1 else 3
    return row["zero"] or 0


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def _recompute(text: str | None) -> str | None:
    if text is None or text == "none":
        return "none"
    if text.startswith("full"):
        return "full"
    if text == "selective layer":
        return "layer"
    if text.startswith("selective"):
        return "attention" if "attention" in text else "op"
    return None


def _bytes(row: dict[str, Any], notes: str) -> float | None:
    if row["memory_gib"] is None:
        return None
    return row["memory_gib"] * (1e9 if "GB as printed" in notes else 2**30)


def _cluster(row: dict[str, Any]) -> ClusterSpec:
    hardware = row["hardware"]
    name = next(name for pattern, name in CLUSTERS if re.search(pattern, hardware["gpu"]))
    per_node, gpus = hardware["gpus_per_node"] or 8, row["gpus"]
    counts: dict[str, Any] = {
        "num_nodes": max(1, -(-gpus // per_node)),
        "devices_per_node": min(per_node, gpus),
    }
    speed = re.search(r"(\d+) ?Gb(?:ps|/s)(.*)", hardware.get("inter") or "")
    if speed:  # bits per second of a node, or of each of its GPUs
        line = int(speed[1]) * 1e9 / 8 * (per_node if "per GPU" in speed[2] else 1)
        counts["inter_node.bandwidth"] = REACHED * line
    return ClusterSpec.load(name, counts)


def _measured_seconds(row: dict[str, Any], case: Case) -> float:
    """Of a step: as published, or from tokens/s, or from FLOP/s or MFU as the program counts
    FLOPs.
    """
    if row["step_seconds"]:
        return float(row["step_seconds"])
    if row["tokens_per_s_per_gpu"]:
        return case.tokens / row["gpus"] / row["tokens_per_s_per_gpu"]
    rate = (row["tflops_per_gpu"] or 0) * 1e12
    if not rate and row["mfu_percent"]:
        peak = dict(case.cluster.device.peak_flops)["bfloat16"]
        rate = row["mfu_percent"] / 100 * peak
    if rate and case.program.flops:
        return step_flops(case) / rate / row["gpus"]
    return 0.0


def step_flops(case: Case) -> float:
    """FLOPs of a step as Megatron counts them: attention as if it were not causal, recomputation
    where it says so.
    """
    m = case.model
    width = m["kv_heads"] * m["dim"] // m["heads"]
    block = 2 * m["dim"] * (2 * m["dim"] + 2 * width + (3 if m["gated"] else 2) * m["ffn"])
    block += 4 * m["seq_len"] * m["dim"]
    times = 4 if case.program.flops == "recomputed" else 3
    return case.tokens * (times * case.num_blocks * block + 3 * 2 * m["dim"] * m["vocab"])


def _short(source: str) -> str:
    """`torchtitan asyncTP`, `llm-foundry A100 40GB`: the source in a table."""
    for pattern, name in (
        (r"llm-foundry.*Large Scale", "llm-foundry H100 at scale"),
        (r"llm-foundry.*\"(.*?)( with|\")", "llm-foundry {}"),
        (r"torchtitan.*asyncTP", "torchtitan TP"),
        (r"torchtitan.*h200", "torchtitan H200"),
        (r"torchtitan.*performance", "torchtitan A100"),
        (r"torchtitan", "torchtitan H100"),
        (r"cases_april2021", "Megatron 2021"),
        (r"arXiv 2205", "Megatron 2022"),
        (r"Megatron-LM", "Megatron H100"),
        (r"(nanotron|fms-fsdp|lightning-thunder|autoparallel)", "{}"),
    ):
        if match := re.search(pattern, source):
            return name.format(*match.groups())
    return " ".join(source.split()[:3])
