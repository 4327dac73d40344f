"""What other searches find beside the stage DP, on the same costs, after how many seconds: twelve cells.

    python scripts/bench_search.py                                  # all cells, 10 x the DP's time for MCMC
    python scripts/bench_search.py gpt_350m:p3_16xlarge_x8:1:64     # recipe:cluster:nodes:micro-batches

Stage costs are made once per cell and shared. The picture (docs/pictures/search.svg) shows, per search, its step
against the solved one. Fails where any search finds something better than the solved stages (by more than 0.1 %).
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
from alpa_strategy.inter_op.stage_costs import CostJob, stage_costs
from alpa_strategy.inter_op.subgraph import cluster_layers
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.baseline_search import SEARCHES, Space
from alpa_strategy.planner.optimizer_info import optimizer_info_of
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.recipe import build_data, build_model, load_recipe

ROOT = Path(__file__).resolve().parent.parent
CELLS = (
    "gpt_350m:p3_16xlarge_x8:1:64", "gpt_1_3b:p3_16xlarge_x8:1:128", "gpt_2_6b:p3_16xlarge_x8:1:128",
    "gpt_6_7b:p3_16xlarge_x8:2:128", "gpt_15b:p3_16xlarge_x8:4:256", "gpt_39b:p3_16xlarge_x8:8:512",
    "moe_380m:p3_16xlarge_x8:1:32", "moe_2_4b:p3_16xlarge_x8:2:64", "moe_10b:p3_16xlarge_x8:2:64",
    "wide_resnet_1b:p3_16xlarge_x8:1:32", "wide_resnet_4b:p3_16xlarge_x8:2:32", "gpt_15b:dgx_h100:8:64",
)  # fmt: skip
LEAST_SECONDS = 5.0
COLOURS = {"mcmc": "#d97706", "greedy": "#2563eb", "exhaustive": "#6b7280", "megatron": "#16a34a"}


def space_of(cell: str) -> Space:
    """The stage costs of one cell."""
    name, cluster, nodes, count = cell.split(":")
    recipe, devices = load_recipe(name), ClusterSpec.load(cluster, {"num_nodes": int(nodes)})
    with torch.device("meta"):
        model = build_model(recipe)
    batch = build_data(recipe).example_batch()
    is_mixed = recipe.trainer.get("precision") == "16-mixed"
    context = partial(torch.autocast, "cpu", dtype=torch.float16) if is_mixed else None
    step = capture_step(model, batch, world_size=devices.num_devices, batch_scope="global", context=context)
    task = PlanTask(step, devices, PlanOptions(batch_scope="global"), optimizer_info_of(model))
    graph = microbatch(step, int(count), devices.num_devices).graph
    job = CostJob(
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


def picture(found: dict[str, dict[str, float]]) -> str:
    """A dot per cell and search: its step as a multiple of the solved one; at the right edge where it found nothing."""
    height, left, width = 24 * len(found) + 50, 240, 700
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">']
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for i, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{left + 100 * i}" y="16" font-size="12" fill="{colour}">{name}</text>')
    for row, (cell, ratios) in enumerate(found.items()):
        y = 40 + 24 * row
        parts.append(f'<text x="4" y="{y + 4}" font-size="11">{cell}</text>')
        parts.append(f'<line x1="{left}" y1="{y}" x2="{width - 20}" y2="{y}" stroke="#e5e7eb"/>')
        for name, ratio in ratios.items():
            x = left + min(ratio - 1, 1.0) * (width - 20 - left)
            parts.append(f'<circle cx="{x:.0f}" cy="{y}" r="5" fill="{COLOURS[name]}" fill-opacity="0.7"/>')
    parts.append(f'<text x="{left}" y="{height - 4}" font-size="11">1.0x the solved step</text>')
    parts.append(f'<text x="{width - 20}" y="{height - 4}" font-size="11" text-anchor="end">2.0x or more</text>')
    return "\n".join([*parts, "</svg>"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", help="recipe:cluster:nodes:micro-batches")
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    better = []
    for cell in args.cells or CELLS:
        space = space_of(cell)
        started = time.perf_counter()
        solved = solve_schedules(space.job, space.meshes, space.runs, math.inf)
        took = time.perf_counter() - started
        if not solved:
            print(f"{cell}: nothing fits")
            continue
        best = solved[0].seconds
        print(f"{cell}: solved {best:.4g} s in {took:.2f} s")
        found[cell] = {}
        for name, search in SEARCHES.items():
            fresh = Space(replace(space.job), space.meshes, space.runs)  # nothing is priced already
            trace = search(fresh, max(10 * took, LEAST_SECONDS), 0)
            ratio = trace.best.seconds / best if trace.best else math.inf
            found[cell][name] = ratio
            after = f"after {trace.history[-1][0]:.2f} s" if trace.history else "nothing"
            print(f"    {name:<11}{ratio:8.4f}x {after}, {trace.tried} states", flush=True)
            if ratio < 1 - TOLERANCE:
                better.append(f"{cell}: {name} {ratio:.4f}x")
    if not args.cells:
        (ROOT / "docs" / "pictures" / "search.svg").write_text(picture(found), encoding="utf-8")
    print("better than solved:", ", ".join(better) or "none")
    return 1 if better else 0


if __name__ == "__main__":
    sys.exit(main())
