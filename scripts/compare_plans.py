"""Plans of two checkouts, side by side: predicted seconds, bytes, and what planning took. No
devices.

    # thirteen pairs
    python scripts/compare_plans.py ../before .
    python scripts/compare_plans.py ../before . gpt_2_6b:p3_16xlarge_x8:2 moe_1_3b
    # large plans against plan_reference.json
    python scripts/compare_plans.py --reference
    # the same, and store this checkout's plans as the reference
    python scripts/compare_plans.py --reference --write

A pair is `recipe[:cluster[:nodes]]`.

Every plan is made by `alpa plan` of its checkout, in a process and an empty folder of its own, with
the rates of the first checkout's cluster files: a fitted rate makes a plan neither better nor
worse. The plans of a checkout are stored in `--kept` (a JSON file) by its commit, so that only the
changed side is planned anew. Fails if the second checkout has no plan, if its plan is predicted to
be slower by more than 0.1 %, or if planning took more than 5 % more CPU seconds in all.

The reference holds the plans that take longest to make. Their CPU seconds are stored in units of a
calibration loop, which runs in the process that plans: the reference holds on other machines, too.
The figures of docs/how_planning_works.md are written from it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from page_tables import write_marked
from plan_process import run_plan

PAIRS = (
    "gpt_350m:p3_16xlarge_x8:1",
    "gpt_1_3b:p3_16xlarge_x8:1",
    "gpt_1_3b:dgx_h100:1",
    "gpt_2_6b:p3_16xlarge_x8:1",
    "gpt_6_7b:p3_16xlarge_x8:2",
    "gpt_tiny:p3_16xlarge_x8:1",
    "moe_380m:p3_16xlarge_x8:1",
    "moe_1_3b:dgx_h100:1",
    "moe_2_4b:p3_16xlarge_x8:2",
    "wide_resnet_250m:p3_16xlarge_x8:1",
    "wide_resnet_1b:dgx_h100:1",
    "wide_resnet_2b:p3_16xlarge_x8:1",
    "wide_resnet_tiny:p3_16xlarge_x8:1",
)
MOST_SECONDS, MOST_CPU = 1.001, 1.05

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = Path(__file__).with_name("plan_reference.json")
LARGE_PAIRS = (
    "gpt_39b:p3_16xlarge_x8:8",
    "gpt_175b:dgx_h100:128",
    "moe_70b:p3_16xlarge_x8:8",
    "llama_405b:dgx_h100:512",
)
# Against the reference: CPU work of one process differs by so much from run to run.
MOST_RELATIVE_CPU = 1.25
MOST_GAP_ADDED = 0.005
PAGE = ROOT / "docs" / "how_planning_works.md"
PAGE_MARKS = ("<!-- planning figures: scripts/compare_plans.py -->", "<!-- end -->")


@dataclass(frozen=True)
class Made:
    """One planning. `stages`: what was chosen, for users; `error` where nothing fits."""

    step_seconds: float
    peak_bytes: float
    cpu_seconds: float
    rss_gib: float
    stages: str = ""
    error: str = ""


def plan(checkout: Path, pair: str, clusters: Path) -> Made:
    """`alpa plan` of one recipe on one cluster's file in `clusters`, by the code of `checkout`."""
    recipe, cluster, nodes = (pair + "::").split(":")[:3]
    path = str(checkout / "recipes" / f"{recipe}.yaml")
    rates = str(clusters / f"{cluster or 'p3_16xlarge_x8'}.yaml")
    planned = run_plan(checkout, path, rates, f"cluster.num_nodes={nodes or 1}")
    data = planned.plan
    cpu = planned.cpu_seconds
    rss = planned.peak_gib
    if data is None:
        return Made(float("inf"), 0.0, cpu, rss, error=planned.output[-2000:])
    stages = " + ".join("x".join(map(str, stage["logical_mesh"])) for stage in data["stages"])
    chosen = f"{stages}, {data['num_microbatches']} micro-batches, {data['schedule']}"
    return Made(
        data["predicted"]["step_seconds"], data["predicted"]["peak_bytes"], cpu, rss, chosen
    )


def commit_of(checkout: Path) -> str | None:
    """The commit of a clean checkout; None if its files differ from it."""
    git = ["git", "-C", str(checkout)]
    changed = subprocess.run(
        [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
    ).stdout.strip()
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return None if changed else head


@dataclass(frozen=True)
class LargePlan:
    """What is stored of one large planning.

    Attributes:
        gap: how far the plan may be from the planner's bound, as a share of its step.
        cpu_units: CPU seconds of planning, in calibration loops.
        cpu_seconds: the same on the machine that wrote the reference.
    """

    step_seconds: float
    gap: float
    cpu_units: float
    cpu_seconds: float


def large_plan(pair: str) -> LargePlan:
    """Plan one pair with this checkout. RuntimeError with the output where there is no plan."""
    recipe, cluster, nodes = pair.split(":")
    planned = run_plan(ROOT, recipe, cluster, f"cluster.num_nodes={nodes}")
    if planned.plan is None:
        raise RuntimeError(f"{pair}: no plan\n{planned.output[-2000:]}")
    return LargePlan(
        planned.plan["predicted"]["step_seconds"],
        planned.plan["gap"],
        planned.cpu_seconds / planned.calibration_seconds,
        planned.cpu_seconds,
    )


def read_reference() -> dict[str, LargePlan]:
    """The stored plans, by pair."""
    stored = json.loads(REFERENCE.read_text())
    return {pair: LargePlan(**fields) for pair, fields in stored.items()}


def worse_than(reference: LargePlan, now: LargePlan) -> list[str]:
    """What of a plan, or of planning, is worse than the reference beyond what differs by chance."""
    problems = []
    if now.step_seconds > MOST_SECONDS * reference.step_seconds:
        ratio = now.step_seconds / reference.step_seconds
        problems.append(f"predicted {ratio:.4f} x the stored seconds")
    if now.gap > reference.gap + MOST_GAP_ADDED:
        problems.append(f"{now.gap:.2%} from its bound, {reference.gap:.2%} stored")
    if now.cpu_units > MOST_RELATIVE_CPU * reference.cpu_units:
        ratio = now.cpu_units / reference.cpu_units
        problems.append(f"planning takes {ratio:.2f} x the stored CPU work")
    return problems


def page_figures(reference: dict[str, LargePlan]) -> str:
    """The page's table of how long planning takes, with its marks."""
    lines = [PAGE_MARKS[0], "", "| recipe | cluster | nodes | CPU seconds |", "|---|---|---|---|"]
    for pair, figures in reference.items():
        recipe, cluster, nodes = pair.split(":")
        lines.append(f"| `{recipe}` | `{cluster}` | {nodes} | {figures.cpu_seconds:.0f} |")
    return "\n".join([*lines, "", PAGE_MARKS[1]])


def compare_with_reference(pairs: Sequence[str], write: bool) -> int:
    """Plan `pairs`, print each beside the reference, and store them with `write`."""
    reference = read_reference() if REFERENCE.exists() else {}
    num_worse = 0
    for pair in pairs:
        now = large_plan(pair)
        problems = worse_than(reference[pair], now) if pair in reference else []
        num_worse += bool(problems)
        print(
            f"{pair}: {now.step_seconds:.4f} s, {now.gap:.2%} from its bound,"
            f" {now.cpu_seconds:.1f} CPU-s ({now.cpu_units:.0f} calibration loops)"
            f" {'; '.join(problems)}",
            flush=True,
        )
        reference[pair] = now
        if write:
            stored = {name: asdict(plan) for name, plan in sorted(reference.items())}
            REFERENCE.write_text(json.dumps(stored, indent=1) + "\n")
    if write:
        write_marked(PAGE, PAGE_MARKS, page_figures(reference))
    if num_worse and not write:
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reference", action="store_true", help="compare large plans with it")
    parser.add_argument("--write", action="store_true", help="store what --reference plans")
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("after", type=Path, nargs="?")
    parser.add_argument("pairs", nargs="*", help="recipe[:cluster[:nodes]]")
    parser.add_argument("--kept", type=Path, help="JSON file of what clean checkouts gave")
    args = parser.parse_args()
    if args.reference:
        named = [str(name) for name in (args.before, args.after) if name is not None]
        return compare_with_reference([*named, *args.pairs] or LARGE_PAIRS, args.write)
    if args.before is None or args.after is None:
        parser.error("name two checkouts, or use --reference")
    stored_results: dict[str, dict] = (
        json.loads(args.kept.read_text()) if args.kept and args.kept.exists() else {}
    )
    commits = {checkout: commit_of(checkout) for checkout in (args.before, args.after)}
    clusters = (args.before / "configs" / "clusters").resolve()
    slower, total = [], [0.0, 0.0]
    for pair in args.pairs or PAIRS:
        results: list[Made] = []
        for checkout in (args.before, args.after):
            key = f"{commits[checkout]} {pair} {commits[args.before]}"
            is_kept = args.kept and None not in (
                commits[checkout],
                commits[args.before],
            )  # whose files are the rates
            if not is_kept or key not in stored_results:
                results.append(plan(checkout.resolve(), pair, clusters))
                if is_kept:
                    stored_results[key] = asdict(results[-1])
                    args.kept.write_text(json.dumps(stored_results, indent=1))
            else:
                results.append(Made(**stored_results[key]))
        before, after = results
        total = [total[0] + before.cpu_seconds, total[1] + after.cpu_seconds]
        print(
            f"{pair}: {after.step_seconds / before.step_seconds:.4f}x"
            if not after.error
            else f"{pair}: no plan"
        )
        for name, m in (("before", before), ("after", after)):
            print(
                f"    {name:<7}{m.step_seconds * 1e3:10.3f} ms {m.peak_bytes / 2**30:7.2f} GiB"
                f" | {m.cpu_seconds:6.1f} CPU-s {m.rss_gib:5.2f} GiB | {m.stages}{m.error}",
                flush=True,
            )
        if after.error or after.step_seconds > before.step_seconds * MOST_SECONDS:
            slower.append(pair)
    print(
        f"planning: {total[0]:.1f} -> {total[1]:.1f} CPU-s ({total[1] / total[0]:.3f}x); slower:"
        f" {slower or 'none'}"
    )
    if slower or total[1] > MOST_CPU * total[0]:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
