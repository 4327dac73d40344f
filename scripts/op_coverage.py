"""How much of PyTorch's operator database the sharding rules cover, proved by running shards.
Minutes on one core.

`--write` stores the findings, `--show linear` prints them. `--part 0/4 --write part0.json` covers a
quarter of the database, and `--merge part*.json` stores the findings of all quarters.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from proofs.judge import judge, merged, save, summary
from proofs.samples import NotCaptured, captured_calls, database
from proofs.verdicts import load
from rich.console import Console

from alpa_strategy.display.op_table import STORED, op_rows, op_table


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--part",
        default="0/1",
        metavar="I/N",
        help="every N-th entry of the database from the I-th",
    )
    parser.add_argument("--samples", type=int, default=6, help="samples per entry")
    parser.add_argument(
        "--write",
        nargs="?",
        type=Path,
        const=STORED,
        metavar="FILE",
        help=f"store the findings, by default in {STORED}",
    )
    parser.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="FILE",
        help=f"store what these files hold in {STORED}",
    )
    parser.add_argument(
        "--show", metavar="PATTERN", help="what is stored of ops, such as linear or 'aten.conv*'"
    )
    arguments = parser.parse_args(given)
    if arguments.show:
        Console().print(op_table(op_rows(arguments.show)))
        return 0
    if arguments.merge:
        save(merged(verdict for path in arguments.merge for verdict in load(path)))
        return 0
    index, count = map(int, arguments.part.split("/"))
    if arguments.write == STORED and count > 1:
        parser.error("a part goes into a file of its own: --write FILE")
    started = time.perf_counter()
    captured = list(captured_calls(database()[index::count], arguments.samples))
    calls = [c for c in captured if not isinstance(c, NotCaptured)]
    names = {c.name for c in captured}
    refused = {c.name: c.reason for c in captured if isinstance(c, NotCaptured)}
    never = sorted(names - {c.name for c in calls})
    print(f"{len(names)} entries of the database, {len(names) - len(never)} captured")
    for reason, number in Counter(refused[name] for name in never).most_common():
        print(f"  {number} not captured: {reason}")
    verdicts = judge(calls)
    print(summary(verdicts))
    print(f"{time.perf_counter() - started:.0f} s")
    if arguments.write:
        save(verdicts, arguments.write)
    if any(v.wrong for v in verdicts):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
