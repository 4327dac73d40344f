#!/usr/bin/env python
"""Send signals to jobs of two ranks: 3 signals x 3 choices of ranks x 6 moments x 2 launchers, a
line each.

A case is good when every rank is gone within the limit, no process is left, checkpoints are whole,
no partial one lies about, and training that resumes from the newest has bit for bit the weights of
an undisturbed one.

    python scripts/signal_matrix.py --match SIGTERM steady --limit 10
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/extras/failure_watch"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from signal_jobs import CASES, EVALUATIONS, OTHER_CASES, Undisturbed, check_resumption, run_case
from worker_pool import WorkerPool


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--match", nargs="*", default=[], help="texts that a case's name has all of"
    )
    parser.add_argument(
        "--limit", type=float, default=10.0, help="seconds until every rank must be gone"
    )
    parser.add_argument(
        "--others",
        action="store_true",
        help="eager runs, manual optimization, evaluations: 36 cases",
    )
    parser.add_argument(
        "--part", default="1/1", help="which part of the cases, as in 2/4 (every fourth)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of the cases")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    cases = []
    for case in OTHER_CASES if arguments.others else CASES:
        if all(text in str(case) for text in arguments.match):
            cases.append(case)
    random.Random(arguments.seed).shuffle(cases)
    cases = cases[part - 1 :: parts]
    pool = WorkerPool()
    num_bad = 0
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Undisturbed(Path(folder), pool)
        for index, case in enumerate(cases):
            root = Path(folder) / str(index)
            root.mkdir()
            try:
                outcome = run_case(case, root, limit=arguments.limit)
                if case.moment not in EVALUATIONS:
                    check_resumption(case, root, pool, undisturbed, outcome)
                seconds = outcome.seconds
                step = outcome.resumed_from
                wrong = outcome.wrong
                text = outcome.output
            except AssertionError as error:  # it did not come so far, or the resumption failed
                seconds = 0.0
                step = None
                wrong = [str(error).strip().splitlines()[-1]]
                text = str(error)
            slowest = max(slowest, seconds)
            num_bad += bool(wrong)
            print(
                f"{'BAD' if wrong else 'ok '} {case}: gone after {seconds:.1f} s, resumed at"
                f" {step}",
                flush=True,
            )
            if wrong:
                print("   ", "; ".join(wrong), *text.splitlines()[-60:], sep="\n    ", flush=True)
    pool.close()
    print(f"{len(cases)} cases, {num_bad} bad, slowest end {slowest:.1f} s")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
