"""Plans of the recipes on 8 and 64 GPUs: the table of docs/recipes.md, from real `alpa plan` runs.

    # compare with the stored plans
    python scripts/recipe_plans.py
    # plan these anew, store them, and write the table
    python scripts/recipe_plans.py --write llama_8b vit_l16
    # the table alone, from the stored plans
    python scripts/recipe_plans.py --write --no-planning

Rows are stored by recipe in recipe_plans.json, so one recipe can be planned at a time. Without
`--write` the exit code is 1 if a plan differs from the stored one. No devices are needed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from page_tables import write_marked
from plan_process import Planning, run_plan

from alpa_strategy.display.plan_words import plan_words
from alpa_strategy.ir.plan import Plan
from alpa_strategy.units import format_bytes, format_count, format_seconds

ROOT = Path(__file__).resolve().parent.parent
STORED = Path(__file__).with_name("recipe_plans.json")
PAGE = ROOT / "docs" / "recipes.md"
PAGE_MARKS = ("<!-- plans of recipes: scripts/recipe_plans.py -->", "<!-- end -->")

CLUSTER = "dgx_h100"
DEVICES_PER_NODE = 8
NODES = (1, 8)
RECIPES = (
    "gpt_1_3b",
    "llama_1b",
    "llama_8b",
    "llama_70b",
    "lora_8b",
    "moe_10b",
    "mixtral_8x7b",
    "deepseek_16b",
    "vit_b16",
    "vit_l16",
    "clip_b16",
    "ddpm_36m",
    "wide_resnet_2b",
)
# A plan is another one if its step is predicted to differ by more than this share.
MOST_DIFFERENCE = 1e-3
# Values of the command line for plans of a table with one precision.
OVERRIDES = ("trainer.precision=bf16-mixed",)


@dataclass(frozen=True)
class Row:
    """One recipe on one number of devices.

    Attributes:
        words: the plan in words; empty if there is none.
        step_seconds, peak_bytes: predicted.
        mfu: share of the devices' peak FLOP/s, as `alpa plan` prints it, such as `41.2%`.
        cpu_seconds: of planning, on the machine that wrote it.
        error: the first line of the reason why there is no plan.
    """

    words: str
    step_seconds: float
    peak_bytes: float
    mfu: str
    cpu_seconds: float
    error: str = ""


def plan_row(recipe: str, num_nodes: int) -> Row:
    """Plan one recipe on `num_nodes` nodes with this checkout."""
    planned = run_plan(ROOT, recipe, CLUSTER, f"cluster.num_nodes={num_nodes}", *OVERRIDES)
    if planned.plan is None:
        return Row("", 0.0, 0.0, "", round(planned.cpu_seconds, 1), _error(planned))
    plan = Plan.from_dict(planned.plan)
    mfu = re.search(r"MFU ([\d.]+%)", planned.output)
    return Row(
        words=plan_words(plan),
        step_seconds=plan.predicted.step_seconds,
        peak_bytes=plan.predicted.peak_bytes,
        mfu="" if mfu is None else mfu[1],
        cpu_seconds=round(planned.cpu_seconds, 1),
    )


def _error(planned: Planning) -> str:
    """The line of the output that names the error."""
    lines = [line for line in planned.output.splitlines() if "Error: " in line]
    return lines[-1] if lines else planned.output.strip().splitlines()[-1]


def read_stored() -> dict[str, dict[str, Row]]:
    """The stored rows, by recipe and number of nodes."""
    rows: dict[str, dict[str, Row]] = {}
    for recipe, of_nodes in json.loads(STORED.read_text()).items():
        rows[recipe] = {nodes: Row(**fields) for nodes, fields in of_nodes.items()}
    return rows


def write_stored(rows: dict[str, dict[str, Row]]) -> None:
    """Store the rows in the order of `RECIPES`."""
    stored: dict[str, dict[str, Any]] = {}
    for recipe in RECIPES:
        if recipe in rows:
            stored[recipe] = {nodes: asdict(row) for nodes, row in rows[recipe].items()}
    STORED.write_text(json.dumps(stored, indent=1) + "\n")


def differences(stored: Row, now: Row) -> list[str]:
    """How a plan differs from the stored one."""
    problems = []
    if now.words != stored.words:
        outcome = now.words or now.error
        stored_outcome = stored.words or stored.error
        problems.append(f"{outcome}, stored is {stored_outcome}")
    elif abs(now.step_seconds - stored.step_seconds) > MOST_DIFFERENCE * stored.step_seconds:
        problems.append(f"{now.step_seconds:.6f} s, stored are {stored.step_seconds:.6f} s")
    return problems


def page_table(rows: dict[str, dict[str, Row]]) -> str:
    """The page's table, with its marks."""
    head = "| recipe | a step | GPUs | plan | predicted step | per second | MFU | memory |"
    lines = [PAGE_MARKS[0], "", head, "|" + "---|" * 8]
    for recipe in RECIPES:
        if recipe in rows:
            lines += _lines(recipe, rows[recipe])
    return "\n".join([*lines, "", PAGE_MARKS[1]])


def _lines(recipe: str, rows: dict[str, Row]) -> Iterator[str]:
    """A recipe's lines of the table, one for each number of nodes."""
    count, unit = samples_of(recipe)
    name, step = f"`{recipe}`", f"{format_count(count)} {unit}"
    for num_nodes in NODES:
        row = rows.get(str(num_nodes))
        if row is None:
            continue
        gpus = num_nodes * DEVICES_PER_NODE
        if row.words:
            rate = f"{format_count(count / row.step_seconds)} {unit}"
            seconds, memory = format_seconds(row.step_seconds), format_bytes(row.peak_bytes)
            cells = (row.words, seconds, rate, row.mfu, memory)
        else:
            cells = ("does not fit", "", "", "", "")
        yield f"| {name} | {step} | {gpus} | " + " | ".join(cells) + " |"
        name, step = "", ""


def samples_of(recipe: str) -> tuple[int, str]:
    """Tokens of a step of a recipe, or its samples, and the word for them."""
    content = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text())
    samples = content["data"]["batch_size"] * content["trainer"].get("accumulate_grad_batches", 1)
    length = content["data"].get("sequence_length")
    if length is None:
        return samples, "samples"
    return samples * length, "tokens"


def plan_all(recipes: Sequence[str], writes: bool) -> int:
    """Plan `recipes`, print each beside what is stored, and store it if `writes`."""
    rows = read_stored() if STORED.exists() else {}
    num_different = 0
    for recipe in recipes:
        for num_nodes in NODES:
            now = plan_row(recipe, num_nodes)
            stored = rows.get(recipe, {}).get(str(num_nodes))
            problems = ["not stored"] if stored is None else differences(stored, now)
            num_different += bool(problems)
            print(f"{recipe} on {num_nodes} nodes: {now} {'; '.join(problems)}", flush=True)
            rows.setdefault(recipe, {})[str(num_nodes)] = now
            if writes:
                write_stored(rows)
    if writes:
        write_marked(PAGE, PAGE_MARKS, page_table(rows))
        return 0
    return 1 if num_different else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="store the plans, write the table")
    parser.add_argument("--no-planning", action="store_true", help="with --write: the table alone")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="all of the table")
    args = parser.parse_args()
    if args.no_planning:
        write_marked(PAGE, PAGE_MARKS, page_table(read_stored()))
        return 0
    return plan_all(args.recipes or RECIPES, args.write)


if __name__ == "__main__":
    sys.exit(main())
