"""Plans of two checkouts, side by side: predicted seconds, bytes, and what planning took. No
devices.

    python scripts/compare_plans.py ../before .                                    # thirteen pairs
    python scripts/compare_plans.py ../before . gpt_2_6b:p3_16xlarge_x8:2 moe_1_3b #
    recipe[:cluster[:nodes]]

Every plan is made by `alpa plan` of its checkout, in a process and an empty folder of its own, at
the rates of the first checkout's cluster files: a fitted rate makes a plan neither better nor
worse. What a checkout gave once is kept in `--kept` (a JSON file) by its commit, so that only the
new side need run again. Fails where the second checkout has no plan, or one that is predicted to be
slower by more than 0.1 %, or where planning took more than 5 % more CPU seconds in all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from plan_process import run_plan

PAIRS = (
    "gpt_350m:p3_16xlarge_x8:1", "gpt_1_3b:p3_16xlarge_x8:1", "gpt_1_3b:dgx_h100:1", "gpt_2_6b:p3_16xlarge_x8:1",
    "gpt_6_7b:p3_16xlarge_x8:2", "gpt_tiny:p3_16xlarge_x8:1", "moe_380m:p3_16xlarge_x8:1", "moe_1_3b:dgx_h100:1",
    "moe_2_4b:p3_16xlarge_x8:2", "wide_resnet_250m:p3_16xlarge_x8:1", "wide_resnet_1b:dgx_h100:1",
    "wide_resnet_2b:p3_16xlarge_x8:1", "wide_resnet_tiny:p3_16xlarge_x8:1",
)  # fmt: skip
MOST_SECONDS, MOST_CPU = 1.001, 1.05


@dataclass(frozen=True)
class Made:
    """One planning. `stages`: what was chosen, for people; `error` where nothing fits."""

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
    made = run_plan(checkout, path, rates, f"cluster.num_nodes={nodes or 1}")
    data, cpu, rss = made.plan, made.cpu_seconds, made.peak_gib
    if data is None:
        return Made(float("inf"), 0.0, cpu, rss, error=made.output[-2000:])
    stages = " + ".join("x".join(map(str, stage["logical_mesh"])) for stage in data["stages"])
    chosen = f"{stages}, {data['num_microbatches']} micro-batches, {data['schedule']}"
    return Made(
        data["predicted"]["step_seconds"], data["predicted"]["peak_bytes"], cpu, rss, chosen
    )


def commit_of(checkout: Path) -> str | None:
    """The commit of a clean checkout; None where its files differ from it."""
    git = ["git", "-C", str(checkout)]
    changed = subprocess.run(
        [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
    ).stdout.strip()
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return None if changed else head


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("pairs", nargs="*", help="recipe[:cluster[:nodes]]")
    parser.add_argument("--kept", type=Path, help="JSON file of what clean checkouts gave")
    args = parser.parse_intermixed_args()
    kept: dict[str, dict] = (
        json.loads(args.kept.read_text()) if args.kept and args.kept.exists() else {}
    )
    commits = {checkout: commit_of(checkout) for checkout in (args.before, args.after)}
    clusters = (args.before / "configs" / "clusters").resolve()
    slower, total = [], [0.0, 0.0]
    for pair in args.pairs or PAIRS:
        made: list[Made] = []
        for checkout in (args.before, args.after):
            key = f"{commits[checkout]} {pair} {commits[args.before]}"
            is_kept = args.kept and None not in (
                commits[checkout],
                commits[args.before],
            )  # whose files are the rates
            if not is_kept or key not in kept:
                made.append(plan(checkout.resolve(), pair, clusters))
                if is_kept:
                    kept[key] = asdict(made[-1])
                    args.kept.write_text(json.dumps(kept, indent=1))
            else:
                made.append(Made(**kept[key]))
        before, after = made
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
    return 1 if slower or total[1] > MOST_CPU * total[0] else 0


if __name__ == "__main__":
    sys.exit(main())
