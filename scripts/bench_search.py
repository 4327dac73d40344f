"""Other searches against the stage DP on the same costs, in twelve cells: best step and seconds.

    # all cells, 10 x the DP's time for MCMC
    python scripts/bench_search.py
    # recipe:cluster:nodes:micro-batches
    python scripts/bench_search.py gpt_350m:p3_16xlarge_x8:1:64

Stage costs are made once per cell and shared. The picture (docs/pictures/search.svg) shows, per
search, its step against the solved one. Fails if a search finds stages that are more than 0.1 %
faster than the solved ones, and if no plan of a cell fits.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.inter_op.candidates import TOLERANCE, solve_schedules
from alpa_strategy.inter_op.pins import submeshes
from alpa_strategy.inter_op.stage_costs import StageCostTask, stage_costs
from alpa_strategy.inter_op.subgraph import cluster_layers
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.optimizer_info import optimizer_info_of
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.recipe import build_data, build_model, load_recipe

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "recipes"))

from searches import SEARCHES, Space  # noqa: E402

CELLS = (
    "gpt_350m:p3_16xlarge_x8:1:64",
    "gpt_1_3b:p3_16xlarge_x8:1:128",
    "gpt_2_6b:p3_16xlarge_x8:1:128",
    "gpt_6_7b:p3_16xlarge_x8:2:128",
    "gpt_15b:p3_16xlarge_x8:4:256",
    "gpt_39b:p3_16xlarge_x8:8:512",
    "moe_1_3b:p3_16xlarge_x8:1:32",
    "moe_2_4b:p3_16xlarge_x8:2:64",
    "moe_10b:p3_16xlarge_x8:2:64",
    "wide_resnet_1b:p3_16xlarge_x8:1:32",
    "wide_resnet_4b:p3_16xlarge_x8:2:32",
    "gpt_15b:dgx_h100:8:64",
)
LEAST_SECONDS = 5.0
COLOURS = {
    "mcmc": "#d97706",
    "greedy": "#2563eb",
    "exhaustive": "#6b7280",
    "megatron": "#16a34a",
    "flexflow-like": "#db2777",
}


def space_of(cell: str) -> Space:
    """Return the search space of a cell, with its stage costs."""
    name, cluster, nodes, count = cell.split(":")
    recipe = load_recipe(name)
    devices = ClusterSpec.load(cluster, {"num_nodes": int(nodes)})
    with torch.device("meta"):
        model = build_model(recipe)
    batch = build_data(recipe).example_batch()
    is_mixed = recipe.trainer.get("precision") == "16-mixed"
    context = partial(torch.autocast, "cpu", dtype=torch.float16) if is_mixed else None
    step = capture_step(
        model, batch, world_size=devices.num_devices, batch_scope="global", context=context
    )
    task = PlanTask(step, devices, PlanOptions(batch_scope="global"), optimizer_info_of(model))
    graph = microbatch(step, int(count), devices.num_devices).graph
    job = StageCostTask(
        graph,
        cluster_layers(graph),
        int(count),
        devices,
        task.op_costs,
        task.options,
        task.optimizer,
        task.memory_limit,
    )
    meshes = submeshes(devices)
    return Space(job, meshes, stage_costs(job, meshes))


def picture(ratios_of_cell: dict[str, dict[str, float]]) -> str:
    """Return an SVG with a dot per cell and search: its step as a multiple of the solved one.

    A search without a plan has its dot at the right edge.

    Args:
        ratios_of_cell: cell -> search -> ratio.
    """
    height = 24 * len(ratios_of_cell) + 50
    left = 240
    width = 700
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif">'
    ]
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for i, (name, colour) in enumerate(COLOURS.items()):
        parts.append(
            f'<text x="{left + 100 * i}" y="16" font-size="12" fill="{colour}">{name}</text>'
        )
    for row, (cell, ratios) in enumerate(ratios_of_cell.items()):
        y = 40 + 24 * row
        parts.append(f'<text x="4" y="{y + 4}" font-size="11">{cell}</text>')
        parts.append(f'<line x1="{left}" y1="{y}" x2="{width - 20}" y2="{y}" stroke="#e5e7eb"/>')
        for name, ratio in ratios.items():
            x = left + min(ratio - 1, 1.0) * (width - 20 - left)
            parts.append(
                f'<circle cx="{x:.0f}" cy="{y}" r="5" fill="{COLOURS[name]}" fill-opacity="0.7"/>'
            )
    parts.append(f'<text x="{left}" y="{height - 4}" font-size="11">1.0x the solved step</text>')
    parts.append(
        f'<text x="{width - 20}" y="{height - 4}" font-size="11" text-anchor="end">2.0x or'
        " more</text>"
    )
    return "\n".join([*parts, "</svg>"])


def table(rows: list[str], least: float, better: list[str]) -> str:
    """Return the text of docs/search.md.

    Args:
        rows: a row per cell.
        least: seconds that each search has at least.
        better: searches that are faster than the solved stages.
    """
    return f"""# Other searches on the same costs

Generated by `scripts/bench_search.py`; edit that. Stage costs are made once a cell and shared.
Every search has 10 times the seconds of the stage DP, and at least {least:g} s. A column has its
best step as a multiple of the solved one, the seconds after which it was found, and the number of
priced states. Cells are recipe:cluster:nodes:micro-batches.

`mcmc` changes a layer, a split or the schedule at a time. `flexflow-like` is FlexFlow's search
(arXiv 1807.05358, section 6) without stages, on all devices. It starts from data parallelism and
changes the sharding of one op at a time, on each logical mesh and with recomputation and without
for an equal share of the time. *nothing*: no state fitted into memory.

| cell | solved | {" | ".join(SEARCHES)} |
|---|---|{"---|" * len(SEARCHES)}
{chr(10).join(rows)}

Better than solved: {", ".join(better) or "none"}.

![The best step of every search as a multiple of the solved one](pictures/search.svg)
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", help="recipe:cluster:nodes:micro-batches")
    parser.add_argument(
        "--least", type=float, default=LEAST_SECONDS, help="seconds that each search has at least"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write docs/search.md and the picture of some cells, too",
    )
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    better: list[str] = []
    empty: list[str] = []
    rows: list[str] = []
    for cell in args.cells or CELLS:
        space = space_of(cell)
        started = time.perf_counter()
        solved = solve_schedules(space, math.inf)
        took = time.perf_counter() - started
        if not solved:
            print(f"{cell}: nothing fits")
            empty.append(cell)
            continue
        best = solved[0].seconds
        rows.append(f"| {cell} | {best:.4g} s in {took:.2f} s |")
        print(f"{cell}: solved {best:.4g} s in {took:.2f} s")
        results[cell] = {}
        for name, search in SEARCHES.items():
            # a space of its own, so that no state is priced already
            fresh = Space(replace(space.job), space.meshes, space.runs)
            trace = search(fresh, max(10 * took, args.least), 0)
            ratio = trace.best.seconds / best if trace.best else math.inf
            results[cell][name] = ratio
            if trace.history:
                result = f"{ratio:.4f}x, after {trace.history[-1][0]:.2f} s"
            else:
                result = "*nothing*"
            rows[-1] += f" {result}, {trace.tried} |"
            print(f"    {name:<14}{result}, {trace.tried} states", flush=True)
            if ratio < 1 - TOLERANCE:
                better.append(f"{cell}: {name} {ratio:.4f}x")
    if args.write or not args.cells:
        (ROOT / "docs" / "search.md").write_text(table(rows, args.least, better), encoding="utf-8")
        (ROOT / "docs" / "pictures" / "search.svg").write_text(picture(results), encoding="utf-8")
    print("better than solved:", ", ".join(better) or "none")
    if better or empty:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
