"""CPU seconds of `alpa plan hf:...` for configurations of 0.5 B to 405 B parameters: the table of
docs/will_it_fit.md.

    python scripts/bench_fit.py llama-3-8b mixtral-8x7b

Each case is a process of its own; its CPU seconds include Python's imports and the nearest changes.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
from pathlib import Path

# Exit code of the command if nothing fits.
DOES_NOT_FIT = 2
CONFIGS = Path(__file__).parent.parent / "tests" / "fit" / "configs"

# Configuration -> nodes of 8 H100, tokens of a sequence, sequences of a step, precision. After
# "@": another cluster for the same configuration.
CASES = {
    "qwen2-0.5b": (1, 4096, 64, "bf16-mixed"),
    "gpt2-xl": (1, 1024, 128, "bf16-mixed"),
    "llama-3-8b": (1, 8192, 32, "bf16-mixed"),
    "gemma-2-9b": (2, 4096, 64, "bf16-mixed"),
    "qwen3-30b-a3b": (4, 4096, 128, "bf16-true"),
    "mixtral-8x7b": (8, 4096, 128, "bf16-true"),
    "llama-3-70b": (16, 8192, 256, "bf16-mixed"),
    "llama-3.1-405b": (64, 8192, 512, "bf16-mixed"),
    "llama-3.1-405b@4096": (512, 8192, 2048, "bf16-mixed"),
}


def measured(name: str, changes: int) -> list[str]:
    """Return the cells of a row: model, nodes, CPU seconds, and the answer."""
    nodes, length, batch, precision = CASES[name]
    command = [sys.executable, "-m", "alpa_strategy", "plan", f"hf:{CONFIGS / name.split('@')[0]}"]
    command += ["--cluster", "dgx_h100", f"cluster.num_nodes={nodes}", "--precision", precision]
    command += ["--seq", str(length), "--batch", str(batch), "--changes", str(changes)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    answer = "does not fit"
    if done.returncode not in (0, DOES_NOT_FIT):
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    if done.returncode == 0:
        speed = re.search(r"^speed +(.*?) *$", done.stdout, re.MULTILINE)
        plan = re.search(r"^plan +(.*?) *$", done.stdout, re.MULTILINE)
        assert speed is not None
        assert plan is not None
        answer = f"{speed[1]}: {plan[1]}"
    return [name, str(nodes), f"{seconds:.0f}", answer]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--changes", type=int, default=0, help="nearest changes to plan")
    arguments = parser.parse_args()
    print("| model | nodes of 8 H100 | CPU seconds | answer |\n|---|---|---|---|")
    for name in arguments.names:
        print(f"| {' | '.join(measured(name, arguments.changes))} |", flush=True)


if __name__ == "__main__":
    main()
