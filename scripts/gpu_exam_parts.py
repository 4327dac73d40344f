"""The parts of the GPU exam: each examines one property and reports rows by `add`."""

from __future__ import annotations

import importlib.util
import inspect
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from gpu_exam_jobs import Add, Row, each, rows_into, verdict
from gpu_exam_models import (
    Clock,
    Exam,
    Made,
    alpa,
    apart,
    compile_blocks,
    deterministic,
    difference,
    fit,
    gpt,
    large_gpt,
    llama,
    moe,
    to_float8,
    trained,
    wide_resnet,
)
from gpu_exam_programs import hugging_face, programs
from gpu_exam_ranks import PLANS, two_ranks

import alpa_strategy
from alpa_strategy.units import format_bytes, format_seconds

# Relative differences of weights and losses after a few steps; four times as much where two plain
# runs differ as well.
TOLERANCES = {"32-true": 1e-5, "64-true": 1e-9, "bf16-mixed": 5e-3, "16-mixed": 5e-3}


# The parts: each adds rows


def environment(exam: Exam, add: Add) -> None:
    """What is examined, where."""
    figures: Row = {
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "python": sys.version.split()[0],
    }
    if exam.on_gpu:
        figures |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "memory_bytes": torch.cuda.mem_get_info()[1],
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    add(figures.get("device", exam.device), "ok", f"torch {torch.__version__}", **figures)


def equality(exam: Exam, add: Add) -> None:
    """Losses and weights of eight steps: alpa against the plain Trainer, and this against
    itself.
    """
    makers: list[Callable[[Exam], Made]] = [gpt, moe, wide_resnet, llama]
    torch.backends.cudnn.allow_tf32 = False  # as matmuls by default
    precisions = ["32-true", "bf16-mixed", "16-mixed"] if exam.on_gpu else ["32-true", "bf16-mixed"]
    for maker in makers:
        for precision in precisions:
            if maker is llama and importlib.util.find_spec("transformers") is None:
                add(f"llama {precision}", "left out", "needs transformers")
                continue
            with each(add, f"{maker.__name__} {precision}"):
                _as_plain(exam, add, maker, alpa(), precision)


def _as_plain(
    exam: Exam,
    add: Add,
    make: Callable[[Exam], Made],
    strategy: Any,
    precision: str,
    plain_runs: int = 2,
) -> None:
    """A row: losses and weights under `strategy` against the plain Trainer's, and of two plain runs
    this against itself
    as well."""
    with deterministic():
        plain, *again, mine = [
            trained(exam, make, tried, precision) for tried in (*["auto"] * plain_runs, strategy)
        ]
    difference, noise = apart(mine, plain), apart(again[0], plain) if again else (0.0, 0.0)
    allowed = [max(TOLERANCES[precision], 4 * n) for n in noise]
    good = all(a <= limit for a, limit in zip(difference, allowed, strict=True))  # nan is not
    text = f"weights {difference[0]:.1e}, losses {difference[1]:.1e}"
    text += f" (two plain runs: {noise[0]:.1e}, {noise[1]:.1e})" if again else ""
    add(
        None,
        verdict(good),
        text,
        weights=difference[0],
        losses=difference[1],
        noise=noise,
        last_loss=mine[0][-1],
    )


def speed(exam: Exam, add: Add) -> None:
    """Measure a GPT of 350 M parameters, strategies in turns: tokens/s, host and device time, and
    the planner's predictions of both.
    """
    names = ["plain", "alpa", "plain + compile"]
    # older versions of the package have no option `compile`
    if "compile" in inspect.signature(alpa_strategy.AlpaStrategy.__init__).parameters:
        names.append("alpa + compile")
    for precision in ("bf16-mixed", "32-true"):
        compared = names if precision == "bf16-mixed" else names[:2]
        rates: dict[str, list[float]] = {name: [] for name in compared}
        rounds = [list(rates)]
        if not exam.small and precision != "32-true":
            rounds.append(["alpa", "plain"])
        for turn, order in enumerate(rounds):
            for name in order:
                with each(add, f"{name} {precision}, round {turn + 1}"):
                    row = _timed(exam, name, precision)
                    rates[name].append(row["tokens_per_second"])
                    add(None, "ok", _speed_text(row), **row)
        for name, of_rounds in rates.items():
            if name != "plain" and of_rounds and rates["plain"]:
                ratio = statistics.mean(of_rounds) / statistics.mean(rates["plain"])
                is_ours = name == "alpa" and exam.on_gpu
                add(
                    f"{name} / plain, {precision}",
                    verdict(not is_ours or ratio > 0.97),
                    f"{ratio:.3f}",
                    ratio=ratio,
                )


def _timed(exam: Exam, name: str, precision: str, recipe: str = "") -> Row:
    pl.seed_everything(0, verbose=False)
    model, rows, batch = large_gpt(exam)
    if recipe:
        to_float8(exam, model, recipe)
    clock = Clock(exam, *((2, 4) if exam.small else (5, 20)))
    options: Row = {"compile": True} if name == "alpa + compile" else {}
    strategy = alpa(cluster=None, **options) if name.startswith("alpa") else "auto"
    if name == "plain + compile":
        compile_blocks(model)
    started = time.perf_counter()
    fit(exam, model, rows, batch, strategy, precision, clock.steps, [clock])
    figures = {**clock.figures, "wall_seconds": time.perf_counter() - started}
    figures["tokens_per_second"] = batch * rows[0].shape[1] / figures["step_seconds"]
    if name.startswith("alpa"):
        predicted = strategy.plan.predicted
        figures |= {
            "predicted_seconds": predicted.step_seconds,
            "predicted_bytes": predicted.peak_bytes,
        }
    return figures


def _speed_text(row: Row) -> str:
    parts = [
        f"{row['tokens_per_second']:,.0f} tokens/s, step {format_seconds(row['step_seconds'])}"
    ]
    if "predicted_seconds" in row:
        ratio = row["step_seconds"] / row["predicted_seconds"]
        parts.append(f"{ratio:.2f} x predicted")
    parts.append(f"host {format_seconds(row['host_seconds'])}")
    if "kernels" in row:
        parts.append(f"{row['kernels']:.0f} kernels of {format_seconds(row['kernel_seconds'])}")
    if "peak_bytes" in row:
        parts.append(format_bytes(row["peak_bytes"]))
        if "predicted_bytes" in row:
            parts.append(f"{row['peak_bytes'] / row['predicted_bytes']:.3f} x planned")
    return ", ".join(parts)


def memory(exam: Exam, add: Add) -> None:
    """Planned bytes against the allocator's peak: all kept, recomputed, in micro-batches, under
    half of the limit.
    """
    cases: list[tuple[str, Row]] = [
        ("kept", {"remat": False}),
        ("recomputed", {"remat": True}),
        ("4 micro-batches", {"num_microbatches": 4, "remat": False}),
        ("4 micro-batches, recomputed", {"num_microbatches": 4, "remat": True}),
        ("state in host memory", {"offload": True, "remat": False}),
    ]
    for precision in ("bf16-mixed", "32-true"):
        for name, options in cases:
            with each(add, f"{name}, {precision}"):
                pl.seed_everything(0, verbose=False)
                model, rows, batch = large_gpt(exam)
                clock = Clock(exam, 2, 3, profiled=False)
                strategy = alpa(**options)
                fit(exam, model, rows, batch, strategy, precision, clock.steps, [clock])
                planned = strategy.plan.predicted.peak_bytes
                figures = {**clock.figures, "planned_bytes": planned}
                peak = figures.get("peak_bytes")
                ratio = None if peak is None else peak / planned
                text = f"planned {format_bytes(planned)}"
                text += "" if ratio is None else f", peak {format_bytes(peak)}, {ratio:.3f} x"
                add(
                    None,
                    verdict(ratio is None or 0.8 <= ratio <= 1.1),
                    text,
                    ratio=ratio,
                    **figures,
                )


def offload(exam: Exam, add: Add) -> None:
    """All state in host memory, on one device: losses and weights as the plain Trainer's, fp16's
    scaler included.
    """
    for precision in (
        ("32-true", "bf16-mixed", "16-mixed") if exam.on_gpu else ("32-true", "bf16-mixed")
    ):
        with each(add, precision):
            _as_plain(exam, add, gpt, alpa(offload=True), precision, plain_runs=1)


def float8(exam: Exam, add: Add) -> None:
    """Blocks with torchao's float8 linears: as in the plain Trainer, and tokens/s against bf16,
    both compiled.
    """
    if importlib.util.find_spec("torchao") is None:
        add("float8", "left out", "needs torchao")
        return

    def rowwise(exam: Exam) -> Made:
        model, rows, batch = gpt(exam)
        to_float8(exam, model, "rowwise")
        return model, rows, batch

    with each(add, "equality, rowwise"):
        _as_plain(exam, add, rowwise, alpa(), "bf16-mixed")
    for recipe in ("", "tensorwise") if exam.on_gpu else ():  # emulated it says nothing of speed
        with each(add, f"alpa + compile, {recipe or 'bf16'}"):
            row = _timed(exam, "alpa + compile", "bf16-mixed", recipe)
            add(None, "ok", _speed_text(row), **row)


def checkpoint(exam: Exam, add: Add) -> None:
    """Saved in the middle and resumed: dropout and optimizer go on to the same weights."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    for kind in ("sharded", "single"):
        with each(add, f"{kind}, one rank"), deterministic():
            results = []
            for path in (None, f"{kind}/step=3.ckpt"):
                saving = ModelCheckpoint(kind, "{step}", every_n_train_steps=3, save_top_k=-1)
                arguments = {"callbacks": [saving], "enable_checkpointing": True, "ckpt_path": path}
                results.append(
                    trained(
                        exam, partial(gpt, dropout=0.1), alpa(checkpoint=kind), steps=6, **arguments
                    )[1]
                )
            weights = difference(results[1], results[0])
            add(
                None,
                verdict(weights == 0.0),
                f"weights {weights:.1e} after the resumed run",
                weights=weights,
            )


def ranks(exam: Exam, add: Add) -> None:
    """Two ranks on the one device over gloo, in float64: equal to one process; sharded checkpoints,
    resumed.
    """
    jobs = [{"plan": name, "steps": 5, "precision": "64-true", "resume": False} for name in PLANS]
    # In float32: Lightning reads a checkpoint into float32 parameters before it makes them float64.
    again = {"precision": "32-true", "resume": True}
    jobs += [
        {**job, **again} for job in jobs if job["plan"] in ("zero3", "zero3, offloaded", "pipeline")
    ]
    reference = trained(exam, gpt, "auto", "64-true", 5)
    for job, outcome in two_ranks(exam, jobs):
        with each(add, f"{job['plan']}, saved and resumed" if job["resume"] else str(job["plan"])):
            if isinstance(outcome, str):
                raise RuntimeError(outcome)
            mine, (losses, after) = outcome["run"], outcome["first"] if job["resume"] else reference
            weights, loss = apart(mine, (losses[-len(mine[0]) :], after))
            allowed = 0.0 if job["resume"] else TOLERANCES["64-true"]
            good = weights <= allowed and loss <= allowed
            whose = "the first run's" if job["resume"] else "one process's"
            text = (
                f"weights {weights:.1e}, losses {loss:.1e} from {whose}, {outcome['seconds']:.0f} s"
            )
            add(None, verdict(good), text, weights=weights, losses=loss)


def streams(exam: Exam, add: Add) -> None:
    """Twenty steps with every asynchronous path in use, with and without CUDA_LAUNCH_BLOCKING: the
    same numbers.
    """
    names = (
        "data",
        "zero2",
        "zero3",
        "pipeline",
        "eager, zero3",
        "zero2, offloaded",
        "zero3, offloaded",
    )
    jobs = [{"plan": name, "steps": 20, "precision": "32-true", "resume": False} for name in names]
    free = [outcome for _, outcome in two_ranks(exam, jobs, {"CUDA_LAUNCH_BLOCKING": "0"})]
    blocking = [outcome for _, outcome in two_ranks(exam, jobs, {"CUDA_LAUNCH_BLOCKING": "1"})]
    for name, mine, theirs in zip(names, free, blocking, strict=True):
        with each(add, name):
            if isinstance(mine, str) or isinstance(theirs, str):
                raise RuntimeError(mine if isinstance(mine, str) else theirs)
            weights, loss = apart(mine["run"], theirs["run"])
            text = f"weights {weights:.1e}, losses {loss:.1e} apart"
            add(None, verdict(weights <= 1e-6 and loss <= 1e-6), text, weights=weights, losses=loss)


def nccl(exam: Exam, add: Add) -> None:
    """Each collective of the communication layer on NCCL with one rank, and a training beside its
    group.
    """
    if not exam.on_gpu:
        add("nccl", "left out", "needs a GPU")
        return
    import torch.distributed as dist

    from alpa_strategy.comm.collectives import broadcast_object
    from alpa_strategy.comm.mesh import select_backend

    here = torch.device("cuda", 0)
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=here)
    library = select_backend("torch", "cuda")
    x = torch.arange(2**20, device=here, dtype=torch.float32)
    out = torch.empty_like(x)
    as_bytes = x.view(torch.uint8), out.view(torch.uint8)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: library.all_reduce(out.copy_(x), library.ReduceOp.SUM, None, True),
        "all_gather": lambda: library.all_gather_into_tensor(as_bytes[1], as_bytes[0], None, True),
        "reduce_scatter": lambda: library.reduce_scatter_tensor(
            out, x, library.ReduceOp.SUM, None, True
        ),
        "all_to_all": lambda: library.all_to_all_single(
            as_bytes[1], as_bytes[0], [x.nbytes], [x.nbytes], None, True
        ),
    }
    for name, call in calls.items():
        with each(add, name):
            out.zero_()
            call().wait()
            same = torch.equal(out, x)
            started = time.perf_counter()
            for _ in range(100):
                call().wait()
            host = (time.perf_counter() - started) / 100
            torch.cuda.synchronize()
            add(None, verdict(same), f"host {format_seconds(host)} a call", host_seconds=host)
    with each(add, "objects and barrier"):
        dist.barrier(device_ids=[0])
        add(None, verdict(broadcast_object({"a": 1}) == {"a": 1}), "broadcast")
    with each(add, "training beside it"):
        _as_plain(exam, add, gpt, alpa(), "32-true", plain_runs=1)
    dist.destroy_process_group()


def roofline(exam: Exam, add: Add) -> None:
    """What the device reaches (scripts/gpu_roofline.py), as figures for the costs."""
    from gpu_roofline import measure

    best: dict[str, tuple[float, str]] = {}
    for row in measure(torch.device(exam.device), exam.small):
        failed = "error" in row
        if failed:
            add(row["kind"], "failed", str(row["error"]), **row)
            continue
        add(row["kind"], "", "", **row)  # in the JSON alone
        if row["kind"] == "launch":
            key, text = f"launch: {row['what']}", f"host {format_seconds(row['host_seconds'])}"
            best[key] = (0.0, text)
            continue
        key = " ".join(str(row[part]) for part in ("kind", "dtype") if part in row)
        rate = row.get("flops_per_second") or row["bytes_per_second"]
        unit = "TFLOP/s" if "flops_per_second" in row else "TB/s"
        if key not in best or rate > best[key][0]:
            best[key] = (rate, f"{rate / 1e12:.3g} {unit}")
    for key, (_, text) in best.items():
        add(f"best {key}", "ok", text)


# Name -> (part, its limit in seconds); what matters most comes first, should time run out.
PARTS: dict[str, tuple[Callable[[Exam, Add], None], int]] = {
    "environment": (environment, 60),
    "equality": (equality, 150),
    "ranks": (ranks, 180),
    "speed": (speed, 180),
    "memory": (memory, 120),
    "programs": (programs, 150),
    "hugging_face": (hugging_face, 60),
    "roofline": (roofline, 90),
    "checkpoint": (checkpoint, 60),
    "offload": (offload, 60),
    "float8": (float8, 90),
    "streams": (streams, 150),
    "nccl": (nccl, 60),
}


def run_part(exam: Exam, name: str, out: Path) -> None:
    """Run one part in this process, and append its rows to `out` one by one."""
    examine, _ = PARTS[name]
    with out.open("a", encoding="utf-8") as file:
        examine(exam, rows_into(file, name))
