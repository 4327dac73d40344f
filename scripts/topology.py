#!/usr/bin/env python
"""Does it matter which devices are neighbours? Plans with the searched device order against the
order of the numbers.

    python scripts/topology.py                          # all cells; takes minutes
    python scripts/topology.py gpt_350m:p3_16xlarge_cube:1 gpt_1_3b:two_racks:8:4x8:data,tensor:16

A cell is recipe:cluster:nodes, then a logical mesh, what its axes are for and micro-batches where
these are pinned.
`two_racks` is a100_40gb with four devices a node, whose nodes a scheduler has numbered by turns
over two racks that are joined by what one node sends (oversubscribed 4 : 1). Prints first the rates
of mesh axes in both orders, to be checked by hand on the links; then the predicted step of the best
plan of each. Fails if the searched order is slower by more than 1 % (what the search over stages
leaves open: no mesh of it has slower links).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.ir.plan import Plan, job_ranks
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.planner import make_plan
from alpa_strategy.recipe import build_data, build_model, load_recipe

CELLS = (
    "gpt_1_3b:p3_16xlarge_cube:1",
    "gpt_2_6b:p3_16xlarge_cube:1",
    "moe_380m:p3_16xlarge_cube:1",
    "gpt_350m:p3_16xlarge_cube:1:4x2:data,tensor:32",
    "gpt_1_3b:p3_16xlarge_cube:1:4x2:zero3,tensor:32",
    "gpt_1_3b:two_racks:4",
    "gpt_2_6b:two_racks:8",
    "gpt_2_6b:two_racks:4:2x8:data,zero3:16",
    "gpt_2_6b:two_racks:4:2x8:data,tensor:16",
)


def cluster_of(name: str, num_nodes: int) -> ClusterSpec:
    if name != "two_racks":
        return ClusterSpec.load(name, {"num_nodes": num_nodes})
    base = ClusterSpec.load("a100_40gb", {"num_nodes": num_nodes, "devices_per_node": 4})
    racks = []
    for rack in (0, 1):
        racks.append([n for n in range(num_nodes) if n % 2 == rack])
    up = {"name": "rack", "nodes": racks, "latency": 20e-6, "bandwidth": base.inter_node.bandwidth}
    return ClusterSpec.from_dict({**base.to_dict(), "name": name, "levels": [up]})


def plan_on(recipe_name: str, cluster: ClusterSpec, options: PlanOptions) -> Plan:
    recipe = load_recipe(recipe_name)
    with torch.device("meta"):
        model = build_model(recipe)
    is_mixed = recipe.trainer.get("precision") == "16-mixed"
    context = partial(torch.autocast, "cpu", dtype=torch.float16) if is_mixed else None
    return make_plan(model, build_data(recipe).example_batch(), cluster, options, context=context)


def rates(cluster: ClusterSpec) -> Table:
    """A row a logical mesh of all devices: GB/s of its axes in every order that is planned in, and
    as numbered.

    Then a row a size of meshes: GB/s of messages between the first of that size and the next one.
    """
    orders = [*cluster.orders(), replace(cluster, order="numbered")]
    heads = []
    for order in orders:
        heads.append(", ".join(map(str, order.ranks_of(0, 8))) or "as numbered")
    table = Table("logical mesh", *(f"{head}, GB/s" for head in heads))
    table.title = f"{cluster.name}, {cluster.num_nodes} x {cluster.devices_per_node}"
    for shape in cluster.logical_shapes():
        cells = []
        for found in orders:
            axes = found.logical_mesh(shape).axes
            cells.append(
                "  ".join(f"{axis.size}: {axis.link.bandwidth / 1e9:.1f}" for axis in axes)
            )
        table.add_row(" x ".join(map(str, shape)), *cells)
    for size in (n for n in range(1, cluster.num_devices // 2 + 1) if cluster.num_devices % n == 0):
        links = [found.between((0, size), (size, size)) for found in orders]
        table.add_row(f"{size} to {size}", *(f"{link.bandwidth / 1e9:.1f}" for link in links))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", default=CELLS)
    console, slower = Console(), 0
    arguments = parser.parse_args()
    found = Table("cell", "searched", "numbered", "gain", "order")
    shown: set[str] = set()
    for cell in arguments.cells:
        recipe, name, nodes, *pins = cell.split(":")
        cluster = cluster_of(name, int(nodes))
        if f"{name}:{nodes}" not in shown:
            shown.add(f"{name}:{nodes}")
            console.print(rates(cluster))
        options = PlanOptions(batch_scope="global", baselines=False)
        if pins:
            mesh = tuple(map(int, pins[0].split("x")))
            parallel, parts = tuple(pins[1].split(",")), int(pins[2])
            options = replace(
                options, logical_mesh=mesh, parallel=parallel, num_stages=1, num_microbatches=parts
            )
        plan = plan_on(recipe, cluster, options)
        numbered = plan_on(recipe, replace(cluster, order="numbered"), options)
        seconds, other = plan.predicted.step_seconds, numbered.predicted.step_seconds
        slower += seconds > other * 1.01
        order = ", ".join(map(str, job_ranks(plan.stages)[:8]))
        found.add_row(cell, f"{seconds:.4g} s", f"{other:.4g} s", f"{other / seconds:.3f} x", order)
        console.print(
            f"{cell}: {seconds:.4g} s searched, {other:.4g} s numbered, {other / seconds:.3f} x",
            highlight=False,
        )
    console.print(found)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
