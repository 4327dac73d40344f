"""The Alpa paper's weak-scaling figures: GPT, MoE, Wide-ResNet on 1 to 64 V100, planned, beside what others do.

    python scripts/paper_table.py                                  # every cell that is not in the results yet
    python scripts/paper_table.py --family moe --devices 8 16      # some of them
    python scripts/paper_table.py --report                         # the table and docs/paper_table.md, nothing planned

Every column is priced by the same costs under the same memory limit, with the paper's batch and number of
micro-batches. Results are kept cell by cell (docs/paper_table.json) and stage costs as they come, so an interrupted run
goes on.

PFLOPS are the paper's: the work of a step as its authors count it (alpa/util.py: forward, backward, and one more
forward for recomputation, whether a plan recomputes or not) by the step's seconds: throughput in other words.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "paper_table.json"
REPORT = ROOT / "docs" / "paper_table.md"
COLUMNS = ("solved", "intra", "inter", "megatron", "deepspeed", "pp_dp")
TITLES = {
    "solved": "solved",
    "intra": "intra-op only",
    "inter": "inter-op only",
    "megatron": "Megatron-style",
    "deepspeed": "DeepSpeed-style",
    "pp_dp": "PP-DP",
}


@dataclass(frozen=True)
class Cell:
    """One model on one cluster, with the paper's figures (PFLOPS; 0: out of memory, absent: not given)."""

    family: str
    size: str
    num_devices: int
    rows: int
    num_microbatches: int
    paper: dict[str, float]

    @property
    def recipe(self) -> str:
        return f"{self.family}_{self.size}"

    @property
    def key(self) -> str:
        return f"{self.family} {self.num_devices}"


def _cells() -> Iterator[Cell]:
    """The paper's configurations, and throughputs read off its figure (+-3 %)."""
    sizes = {
        "gpt": ("350m", "1_3b", "2_6b", "6_7b", "15b", "39b"),
        "moe": ("380m", "1_3b", "2_4b", "10b", "27b", "70b"),
        "wide_resnet": ("250m", "1b", "2b", "4b", "6_8b", "13b"),
    }
    microbatches = {
        "gpt": (512, 128, 128, 64, 128, 1024),
        "moe": (512, 32, 32, 16, 128, 64),
        "wide_resnet": (24, 24, 24, 32, 32, 38),
    }
    figure = {
        "gpt": {
            "solved": (0.47, 0.94, 1.89, 3.63),
            "megatron": (0.38, 0.89, 1.84, 3.68),
            "inter": (0.43, 0.93, 1.57, 3.21),
            "intra": (0.38, 0.75, 1.10, 0.11),
        },
        "moe": {
            "solved": (0.35, 0.71, 1.22, 2.32),
            "deepspeed": (0.30, 0.19, 0.11, 0.0),
            "inter": (0.30, 0.48, 0.0, 0.0),
            "intra": (0.35, 0.35, 0.03, None),
        },
        "wide_resnet": {
            "solved": (0.061, 0.106, 0.209, 0.337),
            "pp_dp": (0.059, 0.003, 0.0, 0.0),
            "intra": (0.059, 0.072, 0.060, 0.041),
        },
    }
    for family, names in sizes.items():
        for index, (size, devices) in enumerate(zip(names, (1, 4, 8, 16, 32, 64), strict=True)):
            rows = (1520 if devices == 64 else 1536) if family == "wide_resnet" else 1024
            paper = {k: v[index - 2] for k, v in figure[family].items() if index >= 2 and v[index - 2] is not None}
            yield Cell(family, size, devices, rows, microbatches[family][index], paper)


def model_flops(cell: Cell, model: torch.nn.Module, forward_flops: float) -> float:
    """FLOPs of a step as the paper counts them; `forward_flops`: of the captured step (Wide-ResNet has no formula)."""
    if cell.family == "wide_resnet":
        return 4 * forward_flops
    h = model.hparams
    tokens, D, T, V, L = cell.rows * h.sequence_length, h.hidden, h.sequence_length, h.vocab_size, h.num_layers
    head = 6 * tokens * D * V
    if cell.family == "gpt":
        return 96 * tokens * D**2 * L * (1 + T / (6 * D)) + head
    attention = tokens * (8 * D**2 + 4 * T * D)
    dense = attention + tokens * 4 * h.mlp_factor * D**2
    experts = attention + tokens * (8 * h.mlp_factor * D**2 + 2 * D * h.num_experts)
    experts += tokens * (4 * h.group_size + 8 * D * h.group_size)  # gating; dispatch and combine
    return 4 * (dense + experts) * L / 2 + head


class Planner:
    """Plans of one cell: the solved one, and the others by restricting what may be chosen."""

    def __init__(self, cell: Cell, num_microbatches: int, store_dir: Path) -> None:
        from alpa_strategy.capture.capture import capture_step
        from alpa_strategy.cli import _apply_precision
        from alpa_strategy.cluster.spec import ClusterSpec
        from alpa_strategy.cost.flops import op_flops
        from alpa_strategy.cost.roofline import RooflineCosts
        from alpa_strategy.inter_op.layers import cluster_layers
        from alpa_strategy.inter_op.microbatch import microbatch
        from alpa_strategy.inter_op.stage_costs import CostJob, CostStore
        from alpa_strategy.inter_op.submeshes import submeshes
        from alpa_strategy.optimizer_info import optimizer_info_of
        from alpa_strategy.options import PlanOptions
        from alpa_strategy.recipe import build_data, build_model, load_recipe

        overrides = [f"data.batch_size={cell.rows}"]
        recipe = load_recipe(ROOT / "recipes" / f"{cell.recipe}.yaml", overrides)
        with torch.device("meta"):
            self.model = build_model(recipe)
        batch = build_data(recipe).example_batch()
        nodes, per_node = max(1, cell.num_devices // 8), min(8, cell.num_devices)
        self.cluster = ClusterSpec.load("p3_16xlarge_x8", {"num_nodes": nodes, "devices_per_node": per_node})
        options = PlanOptions(batch_scope="global", num_microbatches=num_microbatches)
        context = _apply_precision(recipe, self.model)
        step = capture_step(self.model, batch, world_size=cell.num_devices, batch_scope="global", context=context)
        self.flops = model_flops(cell, self.model, sum(op_flops(op.call) for op in step.ops))
        graph = microbatch(step, num_microbatches).graph
        costs, optimizer = RooflineCosts(self.cluster.device), optimizer_info_of(self.model)
        limit = options.usable_bytes(self.cluster.device.memory_bytes)
        cuts = cluster_layers(graph)
        self.job = CostJob(graph, cuts, num_microbatches, self.cluster, costs, options, optimizer, limit)
        self.meshes = submeshes(self.cluster)
        self.store = CostStore(store_dir / f"{cell.family}_{cell.num_devices}.jsonl")

    def solved(self) -> tuple[float, str]:
        """Seconds of a step: the exact costs of the chosen stages, as `alpa plan` gives them."""
        from alpa_strategy.inter_op.make import plan_job

        plan = plan_job(self.job, self.meshes, self.store)
        stages = " ".join(_mesh_text(s.submesh, s.logical_mesh) + ("r" if s.remat else "") for s in plan.stages)
        return plan.predicted.step_seconds, f"{plan.schedule} {stages}"

    def stages(self, wanted: Callable[[int, int, int], bool], **options: object) -> tuple[float, str] | None:
        """The best stages under 1F1B of those that `wanted(submesh index, first layer, last)` allows."""
        from alpa_strategy.inter_op.dp import solve_stages
        from alpa_strategy.inter_op.make import stage_tables
        from alpa_strategy.inter_op.schedules import in_flight, terms
        from alpa_strategy.inter_op.stage_costs import stage_costs

        job = replace(self.job, options=replace(self.job.options, **options))
        L, B, D = job.num_layers, job.num_microbatches, self.cluster.num_devices
        used = [
            m for m in range(len(self.meshes)) if any(wanted(m, a, b) for a in range(L) for b in range(a + 1, L + 1))
        ]
        if not used:
            return None
        meshes = [self.meshes[m] for m in used]
        runs = stage_costs(job, meshes, self.store)
        tables = stage_tables(job, meshes, runs)
        seconds = tables.seconds.copy()
        for i, m in enumerate(used):
            for a in range(L):
                for b in range(a + 1, L + 1):
                    if not wanted(m, a, b):
                        seconds[a, b, i] = np.inf
        most = min(L, D)
        alive = in_flight("1F1B", most, B)[::-1]
        choice = solve_stages(replace(tables, seconds=seconds), D, terms("1F1B", most, B), alive, job.memory_limit)
        if choice is None:
            return None
        shapes = [
            runs[s.submesh].shapes[int(runs[s.submesh].shape[s.first, s.last, s.candidate])] for s in choice.stages
        ]
        text = " ".join(_mesh_text(meshes[s.submesh], shape) for s, shape in zip(choice.stages, shapes, strict=True))
        return choice.seconds, text

    def intra(self) -> tuple[float, str] | None:
        """One stage over all devices."""
        L, whole = self.job.num_layers, len(self.meshes) - 1
        return self.stages(lambda m, a, b: m == whole and (a, b) == (0, L))

    def inter(self) -> tuple[float, str] | None:
        """Stages of one device each."""
        return self.stages(lambda m, a, b: math.prod(self.meshes[m]) == 1)

    def pp_dp(self) -> tuple[float, str] | None:
        """Any stages, data parallelism inside them."""
        return self.stages(lambda m, a, b: True, parallel="data")

    def megatron(self) -> tuple[float, str] | None:
        """Equal layers on equal meshes, the best of data x tensor grids with tensor parallelism within a node."""
        best: tuple[float, str] | None = None
        L, D = self.job.num_layers, self.cluster.num_devices
        for m, mesh in enumerate(self.meshes):
            devices = math.prod(mesh)
            count = D // devices
            if D % devices or L % count:
                continue
            size = L // count

            def equal(i: int, a: int, b: int, m: int = m, size: int = size) -> bool:
                return i == m and a % size == 0 and b == a + size

            for tensor in [t for t in (1, 2, 4, 8) if devices % t == 0]:
                data = devices // tensor
                if min(data, tensor) == 1:
                    choice = {"parallel": "data" if tensor == 1 else "tensor", "logical_mesh": (devices,)}
                else:
                    choice = {"parallel": ("data", "tensor"), "logical_mesh": (data, tensor)}
                found = self.stages(equal, **choice)
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
        return best

    def deepspeed(self) -> tuple[float, str] | None:
        """One stage on the flat mesh: experts over all devices, ZeRO for the rest (the best of its stages 2 and 3)."""
        L, whole, D = self.job.num_layers, len(self.meshes) - 1, self.cluster.num_devices
        experts = {}
        for name, parameter in self.model.named_parameters():
            if parameter.ndim == 3 and parameter.shape[0] % D == 0:
                experts[name] = "S0"
        found = []
        for parallel in ("zero2", "zero3"):
            options = {"parallel": parallel, "logical_mesh": (D,), "placements": tuple(experts.items())}
            found.append(self.stages(lambda m, a, b: m == whole and (a, b) == (0, L), **options))
        return min((f for f in found if f is not None), default=None)


def _mesh_text(submesh: tuple[int, int], shape: tuple[int, ...]) -> str:
    return f"{submesh[0]}x{submesh[1]}:{'x'.join(map(str, shape))}"


def plan_cell(cell: Cell, columns: tuple[str, ...], store_dir: Path, known: dict) -> dict:
    """{column: {"seconds", "pflops", "plan"} or None where nothing fits}; one device has only one column.

    All columns have the same number of micro-batches: the paper's, or, where nothing at all fits with that, twice,
    four or eight times as many (the paper recomputes layer by layer, our stages recompute as a whole).
    """
    found: dict = dict(known)
    counts = [cell.num_microbatches * k for k in (1, 2, 4, 8) if cell.rows % (cell.num_microbatches * k) == 0]
    for count in [known["num_microbatches"]] if "num_microbatches" in known else counts:
        planner = Planner(cell, count, store_dir)
        found |= {"flops": planner.flops, "num_microbatches": count}
        if "solved" not in columns:
            break
        found["solved"] = _column(cell, planner, "solved")
        if found["solved"] is not None:
            break
    for column in columns if cell.num_devices > 1 else ():
        if column != "solved":
            found[column] = _column(cell, planner, column)
    return found


def _column(cell: Cell, planner: Planner, column: str) -> dict | None:
    from alpa_strategy.errors import PlanError

    started = time.perf_counter()
    try:
        result = getattr(planner, column)()
    except PlanError:
        result = None
    entry = None
    if result is not None:
        entry = {"seconds": result[0], "pflops": planner.flops / result[0] / 1e15, "plan": result[1]}
    shown = "out of memory" if entry is None else f"{entry['pflops']:.4f} PFLOPS  {entry['plan']}"
    count = planner.job.num_microbatches
    print(f"{cell.key:16} {TITLES[column]:16} B={count}: {shown}  ({time.perf_counter() - started:.0f} s)", flush=True)
    return entry


def rows_of(results: dict) -> Iterator[list[str]]:
    """The table's rows, PFLOPS of every column with the paper's in brackets."""
    for cell in _cells():
        entry = results.get(cell.key)
        if entry is None:
            continue
        row = [cell.family, str(cell.num_devices), cell.size.replace("_", ".").upper(), str(entry["num_microbatches"])]
        for column in COLUMNS:
            if column not in entry:
                row.append("")
                continue
            value = entry[column]
            text = "OOM" if value is None else f"{value['pflops']:.3g}"
            if column in cell.paper:
                text += f" ({cell.paper[column]:.3g})" if cell.paper[column] else " (OOM)"
            row.append(text)
        row.append((entry.get("solved") or {}).get("plan", ""))
        yield row


def complaints(results: dict) -> Iterator[str]:
    """Cells where a baseline is faster than the solved plan, or the paper's figure is more than a quarter off."""
    for cell in _cells():
        entry = results.get(cell.key, {})
        solved = entry.get("solved")
        if solved is None:
            continue
        for column in COLUMNS[1:]:
            other = entry.get(column)
            if other is not None and other["seconds"] < solved["seconds"] * (1 - 1e-3):
                yield f"{cell.key}: {TITLES[column]} is {solved['seconds'] / other['seconds']:.3f} x as fast as solved"
        for column, paper in cell.paper.items():
            value = entry.get(column)
            if column not in entry:
                continue
            if (value is None) != (paper == 0):
                yield f"{cell.key}: {TITLES[column]}: {'out of memory' if value is None else 'fits'}, unlike the paper"
            elif value is not None and not 0.75 <= value["pflops"] / paper <= 1.25:
                yield f"{cell.key}: {TITLES[column]}: {value['pflops'] / paper:.2f} x the paper's figure"


def report(results: dict) -> None:
    """The rich table on the terminal, the same in docs/paper_table.md."""
    from rich.console import Console
    from rich.table import Table

    header = ["model", "V100", "size", "micro-batches", *(TITLES[c] for c in COLUMNS), "solved plan"]
    table = Table(title="PFLOPS (the paper's in brackets)")
    for name in header:
        table.add_column(name)
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows_of(results):
        table.add_row(*row)
        lines.append("| " + " | ".join(row) + " |")
    console = Console(width=200)
    console.print(table)
    found = list(complaints(results))
    for line in found:
        console.print("check:", line)
    intro = (__doc__ or "").split("\n\n")
    text = ["# The paper's table", "", "Generated by `scripts/paper_table.py`; edit that.", "", *intro[2:], *lines, ""]
    text += ["Stages are written nodes x devices : logical mesh; `r` recomputes its activations.", ""]
    text += ["## Where it differs from the paper", "", *(f"- {line}" for line in found), ""] if found else []
    REPORT.write_text("\n".join(text), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", choices=("gpt", "moe", "wide_resnet"))
    parser.add_argument("--devices", nargs="*", type=int, choices=(1, 4, 8, 16, 32, 64))
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--again", action="store_true", help="plan cells that have results, too")
    parser.add_argument("--report", action="store_true", help="only show what there is")
    parser.add_argument("--store", type=Path, default=ROOT / ".alpa" / "paper_table", help="stage costs as they come")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for cell in _cells():
        if args.report or (args.family and cell.family not in args.family):
            continue
        if args.devices and cell.num_devices not in args.devices:
            continue
        known = {} if args.again else results.get(cell.key, {})
        columns = tuple(c for c in args.columns if c not in known)
        if not columns or (cell.num_devices == 1 and known):
            continue
        results[cell.key] = plan_cell(cell, columns, args.store, known)
        RESULTS.write_text(json.dumps(results, indent=1), encoding="utf-8")
    report(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
