#!/usr/bin/env python
"""The generated programs of two checkouts, side by side: of tiny recipes under several plans, all
devices. No devices are needed.

    python scripts/compare_programs.py ../before .
    python scripts/compare_programs.py ../before . "gpt_tiny num_stages=2 num_microbatches=4"

A case is a recipe and options of its strategy. Each checkout plans the case with the cluster file
of the first one, and lowers its plan. A program's text counts, and so do the reshardings and
matmuls that its names stand for. Fails with the first lines that differ.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alpa_strategy.lower.lowered_step import LoweredStep

CASES = (
    "gpt_tiny parallel=data",
    "gpt_tiny parallel=zero3",
    "gpt_tiny parallel=tensor",
    "gpt_tiny num_stages=2 num_microbatches=4",
    "gpt_tiny num_stages=2 num_microbatches=4 remat=true precision=bf16-mixed",
    "moe_tiny parallel=data",
    "moe_tiny parallel=auto precision=bf16-mixed",
    "moe_tiny num_stages=2 num_microbatches=4",
    "llama_tiny parallel=data",
    "llama_tiny parallel=tensor",
    "llama_tiny parallel=tensor precision=bf16-true fp32_reduction=true",
    "llama_tiny num_stages=2 num_microbatches=4 precision=bf16-mixed",
    "wide_resnet_tiny parallel=data",
    "wide_resnet_tiny batch_scope=global parallel=data compile=true",
    "wide_resnet_tiny batch_scope=global num_stages=2 num_microbatches=2 compile=true",
    "gpt_tiny parallel=tensor compile=true",
)
# One node of it; its `overlap` makes matmuls overlap with collectives.
CLUSTER = "dgx_h100"
NUM_DEVICES = 4
# Of those that differ.
MAX_LINES = 40
ROOT = Path(__file__).resolve().parent.parent


def programs(case: str, cluster_file: str) -> Iterator[str]:
    """Yield the programs of a case on all devices, by the package that is imported."""
    sys.path.insert(0, str(ROOT / "tests"))
    from proofs.thread_mesh import run_on_threads

    from alpa_strategy.cluster.spec import ClusterSpec
    from alpa_strategy.commands.recipe_task import planned_recipe
    from alpa_strategy.display.progress import Progress
    from alpa_strategy.microbatch.transform import microbatch

    recipe, *options = case.split()
    cluster = ClusterSpec.load(cluster_file, {"num_nodes": 1, "devices_per_node": NUM_DEVICES})
    overrides = [_override(option) for option in options]
    plan, task = planned_recipe(recipe, cluster, overrides, Progress(enabled=False))
    graph = task.step
    if plan.is_pipelined:
        graph = microbatch(graph, plan.num_microbatches, NUM_DEVICES).graph
    for index, stage in enumerate(plan.stages):
        texts = run_on_threads(
            stage.logical_mesh,
            lambda mesh, stage=stage: _lowered_text(
                graph, stage, mesh, plan.is_pipelined, task.options.compile
            ),
        )
        for device, text in enumerate(texts):
            yield f"# {case}: stage {index}, device {device}\n{text}"


def _override(option: str) -> str:
    """Return an option of a case as an override of the recipe."""
    section = "trainer" if option.startswith("precision=") else "strategy"
    return f"{section}.{option}"


def _lowered_text(graph: Any, stage: Any, mesh: Any, is_pipelined: bool, is_compiled: bool) -> str:
    """Return the programs of a stage on one device."""
    import torch

    from alpa_strategy.comm.random import ShardedRandom
    from alpa_strategy.lower.codegen import lower, lower_stage
    from alpa_strategy.lower.segments import Compiler

    # The recipe's model is on the meta device.
    device = torch.device("meta")
    random = ShardedRandom(mesh, 0)
    compiler = Compiler({"backend": "eager"}) if is_compiled else None
    if not is_pipelined:
        return _text(lower(graph, stage, mesh, device, random, compiler))
    lowered = lower_stage(graph, stage, mesh, device, random, compiler)
    programs = [*lowered.per_step_programs, *(program for _, program in lowered.spans)]
    return "\n".join(map(_text, programs))


def _text(program: LoweredStep) -> str:
    """Return the text of a program, and what its names stand for where that is a decision."""
    lines = [program.source]
    for name, value in program.function.__globals__.items():
        if name.startswith("reshard_"):
            lines.append(f"{name} = {value}")
        elif name.startswith("products_"):
            into, specs = value.args
            lines.append(f"{name} = {into}, {specs}")
        elif name.startswith("segment_"):
            lines.append(f"{name} = {value.source}")
    return "\n".join(lines) + "\n"


def written(checkout: Path, case: str, cluster_file: Path) -> list[str]:
    """Return the lines of a case's programs by the code of `checkout`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "programs"
        command = [sys.executable, str(Path(__file__).resolve()), str(cluster_file), case]
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
        subprocess.run([*command, "--write", str(out)], cwd=folder, env=environment, check=True)
        # Lines of the recipes are quoted with their paths.
        text = out.read_text().replace(f"{checkout.resolve()}/", "")
        return text.splitlines()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="a checkout")
    parser.add_argument("after", help="a checkout, or the case that --write writes")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--write", type=Path, help="write one case here; `before` is a cluster")
    chosen = parser.parse_args(arguments)
    if chosen.write:
        chosen.write.write_text("\n".join(programs(chosen.after, chosen.before)))
        return 0

    before = Path(chosen.before)
    cluster_file = before.resolve() / "configs" / "clusters" / f"{CLUSTER}.yaml"
    num_different = 0
    for case in chosen.cases:
        old, new = (
            written(checkout, case, cluster_file) for checkout in (before, Path(chosen.after))
        )
        difference = list(islice(difflib.unified_diff(old, new, "before", "after"), MAX_LINES))
        num_different += bool(difference)
        print(f"{case}: {len(new)} lines, {'different' if difference else 'equal'}", flush=True)
        print(*difference, sep="\n", end="\n" if difference else "")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
