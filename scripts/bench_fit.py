"""CPU seconds of `alpa plan hf:...` for configurations of 0.5 B to 405 B parameters: the table of
docs/will_it_fit.md.

    # against fit_reference.json
    python scripts/bench_fit.py
    python scripts/bench_fit.py llama-3-8b mixtral-8x7b
    # the same, and store the figures as the reference and in the page
    python scripts/bench_fit.py --write

Each case is a process of its own; its CPU seconds include Python's imports and the nearest changes.
They are also stored in units of a calibration loop, which runs in that process: so the reference
holds on other machines. Fails if an answer is another one, or takes 25 % more CPU work.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from page_tables import write_marked
from plan_process import run_alpa

# Exit code of the command if nothing fits.
DOES_NOT_FIT = 2
ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "tests" / "fit" / "configs"

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

REFERENCE = Path(__file__).with_name("fit_reference.json")
# CPU work of one process differs by so much from run to run.
MOST_RELATIVE_CPU = 1.25
PAGE = ROOT / "docs" / "will_it_fit.md"
PAGE_MARKS = ("<!-- seconds of an answer: scripts/bench_fit.py -->", "<!-- end -->")


@dataclass(frozen=True)
class Answer:
    """What one command printed, and what it took.

    Attributes:
        step: its seconds, or "does not fit".
        speed: tokens/s and MFU.
        plan: in words.
        changes: flags of the nearest changes.
        cpu_units: CPU seconds, in calibration loops.
        cpu_seconds: the same on the machine that wrote the reference.
    """

    step: str
    speed: str
    plan: str
    changes: tuple[str, ...]
    cpu_units: float
    cpu_seconds: float


def command_of(name: str) -> list[str]:
    """Arguments of `alpa` for a case."""
    nodes, length, batch, precision = CASES[name]
    command = ["plan", f"hf:{CONFIGS / name.split('@')[0]}", "--cluster", "dgx_h100"]
    command += [f"cluster.num_nodes={nodes}", "--precision", precision]
    return [*command, "--seq", str(length), "--batch", str(batch)]


def measured(name: str, more: Sequence[str] = ()) -> Answer:
    """The answer for a case.

    Args:
        name: of `CASES`.
        more: arguments of the command.

    Raises:
        RuntimeError: the command failed; the message is its output.
    """
    command = [*command_of(name), *more]
    process = run_alpa(ROOT, *command, columns=200)
    if process.code not in (0, DOES_NOT_FIT):
        raise RuntimeError(f"alpa {' '.join(command)}\n{process.output}")
    return Answer(
        step=_line_of(process.output, r"^speed +a step ([^,]*),") or "does not fit",
        speed=_line_of(process.output, r"(\S+ \w* ?tokens/s.*MFU \S+%)"),
        plan=_line_of(process.output, r"^plan +(.*)$"),
        changes=_changes_of(process.output),
        cpu_units=process.cpu_seconds / process.calibration_seconds,
        cpu_seconds=process.cpu_seconds,
    )


def _line_of(output: str, pattern: str) -> str:
    """The first group of a pattern in an output, "" if it is not there."""
    match = re.search(pattern, output, re.MULTILINE)
    return match[1].strip() if match else ""


def _changes_of(output: str) -> tuple[str, ...]:
    """Flags of the nearest changes, and what each brings."""
    pattern = r"^ *((?:--\S+ |cluster\.|plan\.)\S+) +(fits|\d\S*x the tokens/s)"
    return tuple(f"{flags}: {gain}" for flags, gain in re.findall(pattern, output, re.MULTILINE))


def read_reference() -> dict[str, Answer]:
    """The stored answers, by case."""
    stored = json.loads(REFERENCE.read_text())
    answers = {}
    for name, fields in stored.items():
        answers[name] = Answer(**{**fields, "changes": tuple(fields["changes"])})
    return answers


def differs_from(reference: Answer, now: Answer) -> list[str]:
    """What of an answer is another one, or takes more than differs by chance."""
    problems = []
    for field in ("step", "speed", "plan", "changes"):
        before, after = getattr(reference, field), getattr(now, field)
        if before != after:
            problems.append(f"{field} is {after!r}, {before!r} stored")
    if now.cpu_units > MOST_RELATIVE_CPU * reference.cpu_units:
        ratio = now.cpu_units / reference.cpu_units
        problems.append(f"it takes {ratio:.2f} x the stored CPU work")
    return problems


def page_table(answers: Mapping[str, Answer]) -> str:
    """The page's table, with its marks."""
    lines = [
        PAGE_MARKS[0],
        "",
        "| model | nodes of 8 H100 | step | CPU seconds | answer |",
        "|---|---|---|---|---|",
    ]
    for name in CASES:
        nodes, length, batch, precision = CASES[name]
        if name in answers:
            answer = answers[name]
            step = f"{batch} x {length}, {precision}"
            cells = (name.split("@")[0], nodes, step, f"{answer.cpu_seconds:.0f}", answer.speed)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", PAGE_MARKS[1]])


def main() -> int:
    """Ask for each case, and print its answer beside the reference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--write", action="store_true", help="store the answers")
    arguments = parser.parse_args()
    reference = read_reference() if REFERENCE.exists() else {}
    num_different = 0
    for name in arguments.names:
        now = measured(name)
        problems = differs_from(reference[name], now) if name in reference else []
        num_different += bool(problems)
        print(
            f"{name}: {now.cpu_seconds:.1f} CPU-s ({now.cpu_units:.0f} calibration loops),"
            f" a step {now.step}, {now.speed}: {now.plan} {'; '.join(problems)}",
            flush=True,
        )
        reference[name] = now
        if arguments.write:
            stored = {known: asdict(reference[known]) for known in CASES if known in reference}
            REFERENCE.write_text(json.dumps(stored, indent=1) + "\n")
    if arguments.write:
        write_marked(PAGE, PAGE_MARKS, page_table(reference))
        return 0
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
