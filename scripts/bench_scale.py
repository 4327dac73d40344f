"""How planning grows from 64 to 4,096 devices, and the large cells of docs; no devices needed.

    # GPT 175B on 8 to 512 nodes of dgx_h100, and cells
    python scripts/bench_scale.py
    # recipe:nodes[:largest CPU-s[:largest GiB]]
    python scripts/bench_scale.py gpt_175b:128:120:2 moe_70b:64
    # every regular plan in addition to the chosen one
    python scripts/bench_scale.py --regular gpt_1_3b:2

Each plan is made by `alpa plan` in a process of its own (CPU seconds, memory at the peak, distance
from the bound); a picture of the growth is written to docs/pictures/scale.svg. Fails over a limit,
where the bound is further than 5 %, and with `--regular` where a regular plan (equal stages, every
p x d x t) is better than the chosen one.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from plan_process import run_plan

ROOT = Path(__file__).resolve().parent.parent
GROWTH = (
    "gpt_175b:8",
    "gpt_175b:16",
    "gpt_175b:32",
    "gpt_175b:64",
    "gpt_175b:128:120:2",
    "gpt_175b:256",
    "gpt_175b:512",
)
CELLS = ("moe_70b:64", "llama_405b:512:300", "gpt_39b:8:35")
BOUND = 0.05
TOLERANCE = 1.005


def plan(recipe: str, nodes: int, cluster: str, pins: tuple[str, ...] = ()) -> dict | None:
    """The plan file of one planning, with `cpu` seconds and `gib` at the peak; None if nothing
    fits.
    """
    planned = run_plan(ROOT, recipe, cluster, f"cluster.num_nodes={nodes}", *pins)
    if planned.plan is None:
        print(
            f"    {recipe} on {nodes} nodes {' '.join(pins)}:"
            f" {planned.output.strip().splitlines()[-1][:150]}"
        )
        return None
    return planned.plan | {"cpu": planned.cpu_seconds, "gib": planned.peak_gib}


def stages_of(figures: dict) -> str:
    """`4x(8x8) + 2x(4x8)`, as runs of equal meshes."""
    runs: list[list] = []
    for mesh in ("x".join(map(str, stage["logical_mesh"])) for stage in figures["stages"]):
        if runs and runs[-1][1] == mesh:
            runs[-1][0] += 1
        else:
            runs.append([1, mesh])
    return " + ".join(f"{n}x({mesh})" for n, mesh in runs)


def worse_than_regular(
    recipe: str, nodes: int, cluster: str, figures: dict, per_node: int = 8
) -> list[str]:
    """Regular plans with the chosen number of micro-batches that are better; prints all of them."""
    better, devices = [], nodes * per_node
    for stages in (p for p in range(2, devices + 1) if devices % p == 0):
        size = devices // stages
        for shape in [(size,), *((d, size // d) for d in range(2, size) if size % d == 0)]:
            pins = (f"plan.num_stages={stages}", f"plan.logical_mesh={list(shape)}")
            pins += (f"plan.num_microbatches={figures['num_microbatches']}",)
            other = plan(recipe, nodes, cluster, pins)
            if other is None:
                continue
            seconds, best = other["predicted"]["step_seconds"], figures["predicted"]["step_seconds"]
            print(
                f"    {stages} stages of {shape}: {seconds:.4g} s, {seconds / best:.3f}x",
                flush=True,
            )
            if best > seconds * TOLERANCE:
                better.append(
                    f"{recipe} on {devices}: {stages} stages of {shape} take {seconds:.4g} s, not"
                    f" {best:.4g}"
                )
    return better


def picture(points: list[tuple[int, float, float]]) -> str:
    """CPU seconds and GiB over devices, both axes in powers of two."""
    width = 640
    height = 320
    left = 60
    top = 30
    low, high = math.log2(points[0][0]), math.log2(points[-1][0])
    most = math.log2(max(max(p[1], p[2]) for p in points))
    least = math.log2(min(min(p[1], p[2]) for p in points))

    def place(devices: int, value: float) -> str:
        x = left + (math.log2(devices) - low) / max(high - low, 1) * (width - 2 * left)
        y = height - top - (math.log2(value) - least) / max(most - least, 1) * (height - 2 * top)
        return f"{x:.0f},{y:.0f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif">'
    ]
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for index, (name, colour) in enumerate(
        (("CPU seconds", "#2563eb"), ("GiB at the peak", "#d97706")), start=1
    ):
        line = [place(p[0], p[index]) for p in points]
        parts.append(
            f'<polyline points="{" ".join(line)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        for p, at in zip(points, line, strict=True):
            x, y = at.split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
            parts.append(
                f'<text x="{x}" y="{int(y) - 8}" font-size="11"'
                f' text-anchor="middle">{p[index]:.3g}</text>'
            )
        parts.append(
            f'<text x="{left}" y="{12 * index + 4}" font-size="12" fill="{colour}">{name}</text>'
        )
    for p in points:
        x = place(p[0], 1.0).split(",")[0]
        parts.append(
            f'<text x="{x}" y="{height - 8}" font-size="11" text-anchor="middle">{p[0]}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", help="recipe:nodes[:most CPU seconds[:most GiB]]")
    parser.add_argument("--cluster", default="dgx_h100")
    parser.add_argument("--regular", action="store_true", help="price every regular plan as well")
    args = parser.parse_args()
    failed: list[str] = []
    growth: list[tuple[int, float, float]] = []
    for cell in args.cells or (*GROWTH, *CELLS):
        recipe, nodes, seconds, gib = (cell + ":::").split(":")[:4]
        cluster = "p3_16xlarge_x8" if recipe == "gpt_39b" else args.cluster
        figures = plan(recipe, int(nodes), cluster)
        if figures is None:
            failed.append(f"{cell}: no plan")
            continue
        print(
            f"{recipe} on {8 * int(nodes)}: {figures['predicted']['step_seconds']:.4g} s a step, "
            f"within {figures['gap']:.2%} of the bound | {figures['cpu']:.1f} CPU-s,"
            f" {figures['gib']:.2f} GiB | {stages_of(figures)},"
            f" {figures['num_microbatches']} micro-batches, {figures['schedule']}",
            flush=True,
        )
        if figures["cpu"] > float(seconds or math.inf) or figures["gib"] > float(gib or math.inf):
            failed.append(f"{cell}: {figures['cpu']:.1f} CPU-s, {figures['gib']:.2f} GiB")
        if figures["gap"] > BOUND:
            failed.append(f"{cell}: {figures['gap']:.2%} from the bound")
        if args.regular:
            failed += worse_than_regular(recipe, int(nodes), cluster, figures)
        if not args.cells and cell in GROWTH:
            growth.append((8 * int(nodes), figures["cpu"], figures["gib"]))
    if len(growth) > 1:
        (ROOT / "docs" / "pictures" / "scale.svg").write_text(picture(growth), encoding="utf-8")
    for line in failed:
        print("not met:", line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
