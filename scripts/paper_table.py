"""The Alpa paper's weak-scaling figures: GPT, MoE, Wide-ResNet on 1 to 64 V100, planned, beside
what others do.

    # every cell that is not in the results yet
    python scripts/paper_table.py
    # some of them
    python scripts/paper_table.py --family moe --devices 8 16
    # the table and docs/paper_table.md; nothing is planned
    python scripts/paper_table.py --report

Every column is priced by the same costs under the same memory limit, with the paper's batch and
number of micro-batches. Everything is recomputed, as the suites of its authors set `use_remat`
for all models. Stages are solved exactly and timed on the simulated clock. Results are kept cell
by cell (docs/paper_table.json), so an interrupted run goes on.

PFLOPS are the paper's: the work of a step as its authors count it, by the step's seconds. They
count forward, backward, and one more forward for recomputation, whether a plan recomputes or not
(alpa/util.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import textwrap
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from paper_cells import Cell, cells, model_flops
from paper_notes import REMARKS, sentence

if TYPE_CHECKING:
    from alpa_strategy.cluster.spec import ClusterSpec
    from alpa_strategy.inter_op.stage_costs import LayerRangeCosts, StageCostTask
    from alpa_strategy.ir.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "paper_table.json"
TITLES = {
    "solved": "solved",
    "intra": "intra-op only",
    "inter": "inter-op only",
    "megatron": "Megatron-style",
    "deepspeed": "DeepSpeed-style",
    "pp_dp": "PP-DP",
}
COLUMNS = tuple(TITLES)
WHENCE = (
    "More than a quarter off, or fitting where the paper does not (or the reverse). Reasons are"
    " derived from the "
    "plans' parts, counts of bytes and the paper's other columns; they were not measured on V100s."
)


def plan_job(
    job: StageCostTask,
    meshes: Sequence[tuple[int, int]],
    known: dict[Hashable, LayerRangeCosts],
    schedules: Sequence[str] | None = None,
    allowed: np.ndarray | None = None,
) -> Plan:
    """The best plan of one job: what the planner's search does for each number of micro-batches.

    Args:
        schedules: see `candidates.solve_schedules`. allowed: see `candidates.StageSpace`.

    Raises:
        PlanError: nothing fits.
    """
    from alpa_strategy.errors import PlanError
    from alpa_strategy.inter_op.bound import step_bound
    from alpa_strategy.inter_op.candidates import solve_schedules
    from alpa_strategy.inter_op.stage_costs import stage_costs
    from alpa_strategy.inter_op.stage_space import StageSpace
    from alpa_strategy.planner.assembly import best_solved, solved_plan
    from alpa_strategy.planner.task import PlanTask

    space = StageSpace(job, meshes, stage_costs(job, meshes, known), allowed)
    fingerprint = PlanTask(job.graph, job.cluster, job.options, job.optimizer).fingerprint
    best, failures = best_solved(
        solve_schedules(space, math.inf, schedules),
        lambda candidate: solved_plan(candidate, meshes, fingerprint),
    )
    if best is None:
        raise (
            failures[-1][1]
            if failures
            else PlanError("no stages fit", "use more devices, or raise memory_limit")
        )
    return replace(best, gap=max(0.0, 1 - step_bound(space) / best.predicted.step_seconds))


def cluster_of(cell: Cell) -> ClusterSpec:
    """The paper's cluster, or the part of it that a cell has."""
    from alpa_strategy.cluster.spec import ClusterSpec

    nodes, per_node = max(1, cell.num_devices // 8), min(8, cell.num_devices)
    return ClusterSpec.load("p3_16xlarge_x8", {"num_nodes": nodes, "devices_per_node": per_node})


class Planner:
    """Plans of one cell: the solved one, and the others by restricting what may be chosen."""

    def __init__(self, cell: Cell, num_microbatches: int, store_dir: Path) -> None:
        from alpa_strategy.capture.capture import capture_step
        from alpa_strategy.commands.recipe_task import precision_plugin
        from alpa_strategy.cost.flops import op_flops
        from alpa_strategy.cost.model import RooflineCosts
        from alpa_strategy.inter_op.pins import submeshes
        from alpa_strategy.inter_op.stage_costs import StageCostTask
        from alpa_strategy.inter_op.subgraph import cluster_layers
        from alpa_strategy.microbatch.transform import microbatch
        from alpa_strategy.options import PlanOptions
        from alpa_strategy.planner.optimizer_info import optimizer_info_of
        from alpa_strategy.recipe import build_data, build_model, load_recipe

        overrides = [f"data.batch_size={cell.rows}"]
        recipe = load_recipe(ROOT / "recipes" / f"{cell.recipe}.yaml", overrides)
        with torch.device("meta"):
            self.model = build_model(recipe)
        batch = build_data(recipe).example_batch()
        self.cluster = cluster_of(cell)
        options = PlanOptions(batch_scope="global", num_microbatches=num_microbatches, remat=True)
        precision = precision_plugin(recipe)
        precision.convert_module(self.model)
        context = precision.train_step_context
        step = capture_step(
            self.model, batch, world_size=cell.num_devices, batch_scope="global", context=context
        )
        self.flops = model_flops(cell, self.model, sum(op_flops(op.call) for op in step.ops))
        graph = microbatch(step, num_microbatches).graph
        costs, optimizer = RooflineCosts(self.cluster.device), optimizer_info_of(self.model)
        limit = options.usable_bytes(self.cluster.device.memory_bytes)
        cuts = cluster_layers(graph)
        self.job = StageCostTask(
            graph, cuts, num_microbatches, self.cluster, costs, options, optimizer, limit, True
        )
        self.meshes = submeshes(self.cluster)
        self.plan_dir = store_dir / "plans"
        self.runs: dict[Hashable, LayerRangeCosts] = {}

    def solved(self) -> Plan:
        """Everything but recomputation and the number of micro-batches is open."""
        return plan_job(self.job, self.meshes, self.runs)

    def stages(
        self, wanted: Callable[[int, int, int], bool], num_layers: int = 0, **options: object
    ) -> Plan:
        """The best stages under 1F1B of those that `wanted(submesh index, first layer, last)`
        allows.

        `num_layers`: the smallest number of layers to make stages of.
        """
        from alpa_strategy.errors import PlanError
        from alpa_strategy.inter_op.subgraph import cluster_layers

        job = replace(self.job, options=replace(self.job.options, **options))
        if job.num_layers < num_layers:
            job = replace(job, cuts=cluster_layers(job.graph, num_layers))
        L = job.num_layers
        allowed = np.zeros((L, L + 1, len(self.meshes)), dtype=bool)
        for a, b in itertools.combinations(range(L + 1), 2):
            for mesh in range(len(self.meshes)):
                allowed[a, b, mesh] = wanted(mesh, a, b)
        used = np.flatnonzero(allowed.any(axis=(0, 1)))
        if not used.size:
            raise PlanError("there are no such stages")
        return plan_job(
            job, [self.meshes[m] for m in used], self.runs, ("1F1B",), allowed[:, :, used]
        )

    def intra(self) -> Plan:
        """Plan one stage over all devices."""
        L = self.job.num_layers
        all_devices = len(self.meshes) - 1
        return self.stages(lambda m, a, b: (m, a, b) == (all_devices, 0, L))

    def inter(self) -> Plan:
        """Stages of one device each."""
        return self.stages(lambda m, a, b: math.prod(self.meshes[m]) == 1, self.cluster.num_devices)

    def pp_dp(self) -> Plan:
        """Any stages, data parallelism inside them."""
        return self.stages(lambda m, a, b: True, parallel="data")

    def megatron(self) -> Plan:
        """As many layers (or one more) on each of equal meshes: the best data x tensor grid, tensor
        within a node.
        """
        results = []
        L, D = self.job.num_layers, self.cluster.num_devices
        for m, mesh in enumerate(self.meshes):
            devices = math.prod(mesh)
            count = D // devices
            if D % devices or count > L:
                continue
            sizes = {L // count, -(-L // count)}  # ends of the model may be a layer of their own

            def equal(i: int, a: int, b: int, m: int = m, sizes: set[int] = sizes) -> bool:
                return i == m and b - a in sizes

            for tensor in [t for t in (1, 2, 4, 8) if devices % t == 0]:
                data = devices // tensor
                if min(data, tensor) == 1:
                    choice = {
                        "parallel": "data" if tensor == 1 else "tensor",
                        "logical_mesh": (devices,),
                    }
                else:
                    choice = {"parallel": ("data", "tensor"), "logical_mesh": (data, tensor)}
                results.append(lambda equal=equal, choice=choice: self.stages(equal, **choice))
        return fastest(results)

    def deepspeed(self) -> Plan:
        """One stage on the flat mesh: experts over all devices, ZeRO for the rest (the best of its
        stages 2 and 3).
        """
        L = self.job.num_layers
        whole = len(self.meshes) - 1
        D = self.cluster.num_devices
        experts = {}
        for name, parameter in self.model.named_parameters():
            if parameter.ndim == 3 and parameter.shape[0] % D == 0:
                experts[name] = "S0"
        results = []
        for parallel in ("zero2", "zero3"):
            options = {
                "parallel": parallel,
                "logical_mesh": (D,),
                "placements": tuple(experts.items()),
            }
            results.append(
                lambda options=options: self.stages(
                    lambda m, a, b: m == whole and (a, b) == (0, L), **options
                )
            )
        return fastest(results)


def fastest(plans: list[Callable[[], Plan]]) -> Plan:
    """The fastest of those that fit."""
    from alpa_strategy.errors import PlanError

    results = []
    for make in plans:
        try:
            results.append(make())
        except PlanError:
            continue
    if not results:
        raise PlanError("none of these plans fits")
    return min(results, key=lambda plan: plan.predicted.step_seconds)


def plan_text(plan: Plan) -> str:
    """`1F1B 2x(1x4:2x2r)`: equal stages counted, nodes x devices : logical mesh; `r` recomputes."""
    texts: list[list] = []
    for s in plan.stages:
        mesh = f"{'x'.join(map(str, s.submesh))}:{'x'.join(map(str, s.logical_mesh))}" + (
            "r" if s.remat else ""
        )
        if texts and texts[-1][1] == mesh:
            texts[-1][0] += 1
        else:
            texts.append([1, mesh])
    groups = []
    for count, mesh in texts:
        groups.append(mesh if count == 1 else f"{count}x({mesh})")
    stages = " ".join(groups)
    return stages if plan.schedule == "none" else f"{plan.schedule} {stages}"


def plan_cell(cell: Cell, columns: tuple[str, ...], store_dir: Path, known: dict) -> Iterator[dict]:
    """{column: its entry, or None if nothing fits}, after each column; one device has only
    solved.

    All columns have the same number of micro-batches: the paper's, or, where nothing at all fits
    with that, twice, four or eight times as many.
    """
    found: dict = dict(known)
    counts = [
        cell.num_microbatches * k
        for k in (1, 2, 4, 8)
        if cell.rows % (cell.num_microbatches * k) == 0
    ]
    for count in [known["num_microbatches"]] if "num_microbatches" in known else counts:
        planner = Planner(cell, count, store_dir)
        found |= {
            "flops": planner.flops,
            "num_microbatches": count,
            "cluster": planner.cluster.digest(),
        }
        if "solved" not in columns:
            break
        found["solved"] = _column(cell, planner, "solved")
        if found["solved"] is not None:
            break
    yield at_least_as_good(found)
    for column in columns:
        if column != "solved":
            found[column] = _column(cell, planner, column)
            yield at_least_as_good(found)


def at_least_as_good(entry: dict) -> dict:
    """What the search can express, it may take: where a restricted plan is faster, it is the solved
    plan (`from`).
    """
    entry = dict(entry)
    if "solved" in entry:
        for other in COLUMNS[1:]:
            value, best = entry.get(other), entry["solved"]
            if value is not None and (best is None or value["seconds"] < best["seconds"]):
                entry["solved"] = value | {"from": other}
    return entry


def _column(cell: Cell, planner: Planner, column: str) -> dict | None:
    from alpa_strategy.errors import PlanError

    started = time.perf_counter()
    entry, shown = None, ""
    try:
        plan = getattr(planner, column)()
        plan.save(
            planner.plan_dir / f"{cell.family}_{cell.num_devices}_{column}.json"
        )  # for `alpa show`
        p = plan.predicted
        entry = {
            "seconds": p.step_seconds,
            "pflops": planner.flops / p.step_seconds / 1e15,
            "plan": plan_text(plan),
            "compute": p.compute_seconds,  # of the busiest stage, as the next two
            "communication": p.communication_seconds,
            "optimizer": p.optimizer_seconds,
            "peak_bytes": p.peak_bytes,
            "gap": plan.gap,
        }
        shown = f"{entry['pflops']:.4f} PFLOPS  {entry['plan']}"
    except PlanError as error:  # an answer of its own
        shown = f"out of memory: {error.problem}"
    spent = time.perf_counter() - started
    count = planner.job.num_microbatches
    print(f"{cell.key:16} {TITLES[column]:16} B={count}: {shown}  ({spent:.0f} s)", flush=True)
    return entry


def rows_of(results: dict) -> Iterator[list[str]]:
    """The table's rows, PFLOPS of every column with the paper's in brackets."""
    for cell in cells():
        entry = results.get(cell.key)
        if entry is None:
            continue
        stale = "" if entry.get("cluster") == cluster_of(cell).digest() else " *"
        row = [
            cell.family,
            str(cell.num_devices) + stale,
            cell.size.replace("_", ".").upper(),
            str(entry["num_microbatches"]),
        ]
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
    """Cells more than a quarter off the paper's figure, each with its reason, and baselines that
    the search missed.
    """
    for cell in cells():
        entry = results.get(cell.key, {})
        solved = entry.get("solved")
        if solved is not None and "from" in solved:
            yield f"{cell.key}: the search itself found less than {TITLES[solved['from']]}"
        for column, paper in cell.paper.items():
            if column not in entry:
                continue
            text = sentence(
                cell.family, column, max(1, cell.num_devices // 8), entry[column], paper
            )
            if text is not None:
                yield f"{cell.key}, {TITLES[column]}: {text}"


def wrapped(paragraph: str) -> str:
    """Return a paragraph of Markdown in lines of at most 120 columns."""
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def table_of(entries: Iterable[str]) -> Iterator[str]:
    """Yield a Markdown table of `what: why` entries."""
    yield "| what | why |"
    yield "|---|---|"
    for entry in entries:
        what, _, why = entry.replace("|", "/").partition(": ")
        yield f"| {what} | {why} |"


def report(results: dict, file: Path) -> None:
    """The rich table on the terminal, the same as Markdown in `file`."""
    from rich.console import Console
    from rich.table import Table

    header = ["model", "V100", "size", "micro-batches", *TITLES.values(), "solved plan"]
    table = Table(title="PFLOPS (the paper's in brackets)")
    for name in header:
        table.add_column(name)
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows_of(results):
        table.add_row(*row)
        lines.append("| " + " | ".join(row) + " |")
    Console(width=240).print(table)
    differences = list(complaints(results))
    for line in differences:
        print("check:", line)
    intro = (__doc__ or "").split("\n\n")
    text = [
        "# The paper's table",
        "",
        "Generated by `scripts/paper_table.py`; edit that.",
        "",
        *intro[2:],
        *lines,
        "",
    ]
    legend = (
        "Stages are written nodes x devices : logical mesh; `r` recomputes its activations. *"
        " priced with an earlier description of the cluster, and to be planned again (`--again`)."
    )
    text += [wrapped(legend), ""]
    if differences:
        text += ["## Where it differs from the paper", "", wrapped(WHENCE), ""]
        text += [*table_of(differences), ""]
    text += ["## Plans that are not the paper's", ""]
    text += [*table_of(REMARKS), ""]
    file.write_text("\n".join(text), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="*", choices=("gpt", "moe", "wide_resnet"))
    parser.add_argument("--devices", nargs="*", type=int, choices=(1, 4, 8, 16, 32, 64))
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--again", action="store_true", help="plan cells that have results, too")
    parser.add_argument("--report", action="store_true", help="only show what there is")
    parser.add_argument(
        "--store", type=Path, default=ROOT / ".alpa" / "paper_table", help="plans as they come"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="what is known, kept cell by cell"
    )
    args = parser.parse_args()
    results = json.loads(args.results.read_text(encoding="utf-8")) if args.results.exists() else {}
    for cell in cells():
        if args.report or (args.family and cell.family not in args.family):
            continue
        if args.devices and cell.num_devices not in args.devices:
            continue
        known = {} if args.again else results.get(cell.key, {})
        columns = tuple(c for c in args.columns if c not in known)
        if cell.num_devices == 1:
            columns = tuple(c for c in columns if c == "solved")
        if not columns:
            continue
        for entry in plan_cell(cell, columns, args.store, known):
            results[cell.key] = entry
            args.results.write_text(json.dumps(results, indent=1), encoding="utf-8")
    report(results, args.results.with_suffix(".md"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
