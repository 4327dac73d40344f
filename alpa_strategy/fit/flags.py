"""A plan as flags of Megatron-LM, torchtitan and DeepSpeed, for those who run these."""

import math
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from alpa_strategy.display.plan_words import StageSummary, stage_summary
from alpa_strategy.fit.request import FitRequest
from alpa_strategy.ir.plan import Plan

# What a framework has no flag for.
NOT_OFFERED = "cannot be expressed"

# Name of a row of the table.
SOME_LAYERS = "tensor parallelism of some layers"


def flags_of(plan: Plan, request: FitRequest) -> dict[str, dict[str, str]]:
    """Return framework -> (setting -> its flags, "" if none is needed, `NOT_OFFERED` if the
    framework has none).

    Stages that differ in their parallelism are described by the middle one.
    """
    middle = stage_summary(plan.stages[len(plan.stages) // 2])
    batch = batch_division(request.batch_size // plan.num_microbatches, middle.data)
    return {
        "Megatron-LM": _megatron(plan, request, middle, batch),
        "torchtitan": _torchtitan(plan, request, middle, batch),
        "DeepSpeed": _deepspeed(plan, request, middle, batch),
    }


@dataclass(frozen=True)
class BatchDivision:
    """How devices divide the sequences of a micro-batch."""

    # Devices, or groups of them, that have sequences of their own.
    data: int

    # Devices of a group: they divide one sequence along its tokens.
    context: int

    # Sequences of a group.
    micro: int


def batch_division(num_sequences: int, num_devices: int) -> BatchDivision:
    """Return how data-parallel devices divide a micro-batch.

    If there are more devices than sequences, a sequence is divided, too.

    Args:
        num_sequences: of a micro-batch.
        num_devices: among which samples are divided.
    """
    num_sequences = max(1, num_sequences)
    data = math.gcd(num_sequences, num_devices)
    return BatchDivision(data, num_devices // data, num_sequences // data)


def flags_table(plan: Plan, request: FitRequest) -> Table:
    """Return a table with the flags by which each framework runs a plan, and what it lacks."""
    table = Table(box=None, padding=(0, 1), show_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for framework, flags in flags_of(plan, request).items():
        missing = [name for name, text in flags.items() if text == NOT_OFFERED]
        offered = []
        # Of a configuration file in JSON.
        entries = []
        for flag in flags.values():
            if flag.startswith('"'):
                entries.append(flag)
            elif flag not in ("", NOT_OFFERED):
                offered.append(flag)
        if entries:
            offered.insert(0, f"{{{', '.join(entries)}}}")
        text = Text(" ".join(offered))
        if missing:
            text.append(f"; {', '.join(missing)}: {NOT_OFFERED}", style="yellow")
        table.add_row(framework, text)
    return table


def _megatron(
    plan: Plan, request: FitRequest, stage: StageSummary, batch: BatchDivision
) -> dict[str, str]:
    """Return flags of pretrain_gpt.py, by the row of the table that they belong to: "" if none is
    needed, NOT_OFFERED if there is none.

    Args:
        plan: the plan.
        request: the model and batch.
        stage: how its stages are sharded.
        batch: how its devices divide a micro-batch.
    """
    zero = {0: "", 1: "--use-distributed-optimizer"}.get(
        stage.zero, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    )
    precisions = {"bf16-mixed": "--bf16", "16-mixed": "--fp16", "32-true": ""}
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    return {
        "stages": f"--pipeline-model-parallel-size {len(plan.stages)}",
        "tensor": f"--tensor-model-parallel-size {stage.tensor}",
        SOME_LAYERS: NOT_OFFERED if stage.partly_tensor > 1 else "",
        "experts": f"--expert-model-parallel-size {stage.experts}" if stage.experts > 1 else "",
        "sequence": "--sequence-parallel" if stage.tensor > 1 else "",
        "context": f"--context-parallel-size {batch.context}" if batch.context > 1 else "",
        "batch": f"--micro-batch-size {batch.micro} --global-batch-size {request.batch_size}",
        "length": f"--seq-length {request.sequence_length}",
        "ZeRO": zero,
        "checkpointing": recompute if stage.remat else "",
        "precision": precisions.get(request.precision, NOT_OFFERED),
        "LoRA": "" if request.lora_rank is None else NOT_OFFERED,
        "optimizer": _known(request, {"adamw": "--optimizer adam", "sgd": "--optimizer sgd"}),
    }


def _torchtitan(
    plan: Plan, request: FitRequest, stage: StageSummary, batch: BatchDivision
) -> dict[str, str]:
    """Return flags of torchtitan's job configuration, by the row of the table that they belong to:
    "" if none is needed, NOT_OFFERED if there is none.

    Args:
        plan: the plan.
        request: the model and batch.
        stage: how its stages are sharded.
        batch: how its devices divide a micro-batch.
    """
    # FSDP shards among the devices of a group as well.
    shard = batch.data if stage.zero else 1
    replicate = 1 if stage.zero else batch.data
    sharded = f"--parallelism.data_parallel_shard_degree {shard}"
    if stage.zero in (1, 2):
        sharded += " --parallelism.fsdp_reshard_after_forward never"
    precisions = {
        "bf16-mixed": "--training.mixed_precision_param bfloat16",
        "bf16-true": "--training.dtype bfloat16",
        "32-true": "--training.mixed_precision_param float32",
    }
    pipeline = f"--parallelism.pipeline_parallel_degree {len(plan.stages)}"
    if len(plan.stages) > 1:
        pipeline += f" --parallelism.pipeline_parallel_schedule {plan.schedule}"
        pipeline += f" --parallelism.pipeline_parallel_microbatch_size {batch.micro}"
    sequences = request.batch_size // batch.data
    local = sequences if len(plan.stages) > 1 else batch.micro
    return {
        "stages": pipeline,
        "tensor": f"--parallelism.tensor_parallel_degree {stage.tensor}",
        SOME_LAYERS: NOT_OFFERED if stage.partly_tensor > 1 else "",
        "experts": f"--parallelism.expert_parallel_degree {stage.experts}"
        if stage.experts > 1
        else "",
        "context": f"--parallelism.context_parallel_degree {batch.context}"
        if batch.context > 1
        else "",
        "ZeRO": f"--parallelism.data_parallel_replicate_degree {replicate} {sharded}",
        "batch": f"--training.local_batch_size {local}"
        f" --training.global_batch_size {request.batch_size}",
        "length": f"--training.seq_len {request.sequence_length}",
        "checkpointing": f"--activation_checkpoint.mode {'full' if stage.remat else 'none'}",
        "precision": precisions.get(request.precision, NOT_OFFERED),
        "LoRA": "" if request.lora_rank is None else NOT_OFFERED,
        "optimizer": _known(
            request, {"adamw": "--optimizer.name AdamW", "adam": "--optimizer.name Adam"}
        ),
    }


def _deepspeed(
    plan: Plan, request: FitRequest, stage: StageSummary, batch: BatchDivision
) -> dict[str, str]:
    """Return entries of DeepSpeed's configuration file, by the row of the table that they belong
    to: "" if none is needed, NOT_OFFERED if there is none.

    Args:
        plan: the plan.
        request: the model and batch.
        stage: how its stages are sharded.
        batch: how its devices divide a micro-batch.
    """
    num_stages = len(plan.stages)
    tensor = f'"tensor_parallel": {{"autotp_size": {stage.tensor}}}' if stage.tensor > 1 else ""
    pipeline = ""
    if num_stages > 1:
        # PipelineModule has no tensor parallelism of its own, and runs with ZeRO-1 at most.
        is_offered = stage.tensor == 1 and stage.zero < 2
        pipeline = f"PipelineModule(num_stages={num_stages})" if is_offered else NOT_OFFERED
    precisions = {
        "bf16-mixed": '"bf16": {"enabled": true}',
        "16-mixed": '"fp16": {"enabled": true}',
        "32-true": "",
    }
    sizes = f'"train_micro_batch_size_per_gpu": {batch.micro},'
    sizes += f' "gradient_accumulation_steps": {plan.num_microbatches}'
    if batch.context > 1:
        # Any two numbers for whole sequences would be those of another batch.
        sizes = f'"train_batch_size": {request.batch_size}'
    return {
        "stages": pipeline,
        "tensor": tensor,
        SOME_LAYERS: NOT_OFFERED if stage.partly_tensor > 1 else "",
        # `ep_size` is an argument of its MoE layer.
        "experts": NOT_OFFERED if stage.experts > 1 else "",
        "ZeRO": f'"zero_optimization": {{"stage": {stage.zero}}}',
        # Its sequence parallelism is code of the model.
        "parts of sequences": NOT_OFFERED if batch.context > 1 else "",
        "batch": sizes,
        "checkpointing": "model.gradient_checkpointing_enable()" if stage.remat else "",
        "precision": precisions.get(request.precision, NOT_OFFERED),
        "optimizer": _known(
            request,
            {
                "adamw": '"optimizer": {"type": "AdamW"}',
                "adam": '"optimizer": {"type": "Adam"}',
                "muon": '"optimizer": {"type": "Muon"}',
            },
        ),
    }


def _known(request: FitRequest, names: dict[str, str]) -> str:
    """Return the flag of the request's optimizer."""
    return names.get(request.optimizer, NOT_OFFERED)
