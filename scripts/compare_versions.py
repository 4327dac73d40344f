"""Two checkouts side by side: seconds to plan, to the first step and of a step, and memory, as
ratios of one run.

    # rounds take turns; ratios are new / old, of medians
    python scripts/compare_versions.py ../before .
    # exit 1 if one is larger
    python scripts/compare_versions.py ../before . --most 1.05

The job is a GPT of 4 x 512 in float32 (4 rows of 256 tokens a rank), on one rank and on two. `plan`
is the CPU seconds of the first start, from the first batch to the first step's end, with ops that
were measured before; `first step` the seconds of a later start, with that plan stored, from the
process's start; `memory` the most that rank 0 held.
"""

from __future__ import annotations

import argparse
import inspect
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench_jobs import compile_package, run_job

STEPS, WARM = 14, 4
FIGURES = ("plan", "first step", "step", "memory")


def worker(devices: int, out: str, began: float) -> None:
    """One rank; rank 0 writes what it saw. `began`: when the job's process was started."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import alpa_strategy

    sys.path.insert(0, str(Path(alpa_strategy.__file__).parents[1] / "recipes"))
    import gpt

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_epoch_start(self, *unused: object) -> None:
            self.cpu = time.process_time()

        def on_train_batch_end(self, trainer: pl.Trainer, *unused: object) -> None:
            if not self.ends:
                self.plan = time.process_time() - self.cpu
            self.ends.append(time.time())

    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    tokens = torch.randint(1024, (4 * devices * STEPS, 257))
    loader = DataLoader(TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), 4)
    sizes = {
        "num_layers": 4,
        "hidden": 512,
        "num_heads": 8,
        "vocab_size": 1024,
        "sequence_length": 256,
    }
    clock = Clock()
    options = {"capture": "require", "verbose": False}
    known = inspect.signature(
        alpa_strategy.AlpaStrategy
    ).parameters  # an old one captures, or fails
    strategy = alpa_strategy.AlpaStrategy(
        **{name: value for name, value in options.items() if name in known}
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(Path(out).parent),
    )
    trainer.fit(gpt.GPT(**sizes), loader)
    if trainer.is_global_zero:
        steps = [b - a for a, b in zip(clock.ends[WARM:], clock.ends[WARM + 1 :], strict=False)]
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        results = [clock.plan, clock.ends[0] - began, statistics.median(steps), most]
        Path(out).write_text(json.dumps(dict(zip(FIGURES, results, strict=True))))


def run(checkout: Path, devices: int, folder: Path) -> dict[str, float]:
    """One job of a checkout's; `folder` keeps its plans and measured ops."""
    out = folder / "found.json"
    command = [sys.executable, __file__, "--worker", str(devices), str(out), str(time.time())]
    run_job(command, f"{checkout} on {devices} ranks", folder, {"PYTHONPATH": str(checkout)})
    return json.loads(out.read_text())


def compare(checkouts: list[Path], devices: int, rounds: int, root: Path) -> dict[str, float]:
    """Ratios new / old. The first start of each measures ops, the next plans with them, later ones
    have the plan.
    """
    rows: dict[str, dict[Path, list[float]]] = {
        name: {checkout: [] for checkout in checkouts} for name in FIGURES
    }
    folders = {checkout: root / f"{index}_{devices}" for index, checkout in enumerate(checkouts)}
    for checkout in checkouts:
        compile_package(checkout)
        folders[checkout].mkdir()
        run(checkout, devices, folders[checkout])
    for number in range(2 * rounds):
        plans_anew = number % 2 == 0
        for checkout in checkouts:
            for path in folders[checkout].glob(".alpa/plans/*" if plans_anew else "no such"):
                path.unlink()
            figures = run(checkout, devices, folders[checkout])
            for name in FIGURES:
                if plans_anew == (name == "plan"):
                    rows[name][checkout].append(figures[name])
    for name, row in rows.items():
        shown = "  ".join(
            f"{min(row[checkout]):.4g}-{max(row[checkout]):.4g}" for checkout in checkouts
        )
        print(f"{devices} ranks  {name:12} old and new: {shown}", flush=True)
    old, new = checkouts
    return {
        name: statistics.median(row[new]) / statistics.median(row[old])
        for name, row in rows.items()
    }


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--most", type=float, help="exit 1 where a ratio is larger")
    args = parser.parse_args()
    if args.old.resolve() == args.new.resolve():
        parser.error(f"{args.old} and {args.new} are one checkout: give two")
    missed = False
    for devices in args.devices:
        with tempfile.TemporaryDirectory() as root:
            ratios = compare(
                [args.old.resolve(), args.new.resolve()], devices, args.rounds, Path(root)
            )
        for name, ratio in ratios.items():
            print(f"{devices} ranks  {name:12} {ratio:.3f} x")
            missed |= args.most is not None and ratio > args.most
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
