"""Bytes planned for a device against those of the storages that are alive in a step, followed op by
op on a CPU.

    # a table; exit 1 if a ratio is out of bounds
    python scripts/planned_memory.py
    python scripts/planned_memory.py --models gpt --out planned_memory.json

One process, plans for a GPU's costs: what autograd keeps is then flash attention's, as it is on
this CPU. What neither plans nor storages know (a library's workspaces, blocks that an allocator
holds free) is in `gpu_exam.py`'s memory part for GPUs, and in bench_memory.py for processes on
CPUs.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from gpu_exam_models import Exam, Made, alpa, fit, tokens_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BOUNDS = 0.8, 1.02
PLANS: dict[str, dict[str, Any]] = {
    "kept": {"remat": False},
    "recomputed": {"remat": True},
    "selective": {"remat": "selective"},
    "4 micro-batches": {"num_microbatches": 4, "remat": False},
    "4 micro-batches, recomputed": {"num_microbatches": 4, "remat": True},
}


class AliveBytes(TorchDispatchMode):
    """The most bytes that were alive at once: of `held`, and of what ops read or made since; each
    storage once.
    """

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._now = 0
        self.most = 0
        self.at = ""
        for tensor in held:
            self._add(tensor)

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive:
            reference, num_bytes = self._alive[storage._cdata]
            if not reference.expired():
                return
            self._now -= num_bytes
        self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._now += storage.nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, out)):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._add(leaf)
        if self._now > self.most:
            for key in [key for key, (reference, _) in self._alive.items() if reference.expired()]:
                self._now -= self._alive.pop(key)[1]
            if self._now > self.most:
                self.most, self.at = self._now, str(func)
        return out


class Follow(pl.Callback):
    """The fourth step, with parameters, gradients and the optimizer's state; nothing that holds
    itself is collected.
    """

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 3:
            gc.collect()
            gc.disable()
            (optimizer,) = trainer.optimizers
            held = [
                t for p in module.parameters() for t in (p, p.grad, *optimizer.state[p].values())
            ]
            self.alive = AliveBytes([tensor for tensor in held if isinstance(tensor, torch.Tensor)])
            self.alive.__enter__()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == 3:
            self.alive.__exit__(None, None, None)
            gc.enable()


def _gpt(exam: Exam) -> Made:
    from gpt import GPT

    return GPT(6, 128, 4, 4096, 128), tokens_of(64, 128, 4096), 8


def _deep_gpt(exam: Exam) -> Made:
    from gpt import GPT

    return GPT(12, 128, 4, 256, 128), tokens_of(64, 128, 256), 8


def _wide_resnet(exam: Exam) -> Made:
    from wide_resnet import WideResNet

    model = WideResNet((2, 2, 2), 32, 2, 10, 3, small_images=True, lr=0.01)
    return model, (torch.randn(128, 3, 32, 32), torch.randint(10, (128,))), 16


MODELS = {"gpt": _gpt, "deep gpt": _deep_gpt, "wide resnet": _wide_resnet}


def found(model: str, precision: str, plan: str) -> dict[str, Any]:
    """One case: bytes planned, bytes that were alive, and in which op."""
    exam = Exam("cpu", small=True)
    pl.seed_everything(0, verbose=False)
    module, rows, batch_size = MODELS[model](exam)
    strategy, follow = alpa(**PLANS[plan]), Follow()
    fit(exam, module, rows, batch_size, strategy, precision, 5, [follow])
    planned = strategy.plan.predicted.peak_bytes
    ratio = follow.alive.most / planned
    case = {"model": model, "precision": precision, "plan": plan}
    return {
        **case,
        "planned": planned,
        "alive": follow.alive.most,
        "ratio": ratio,
        "at": follow.alive.at,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--precisions", nargs="*", default=["32-true", "bf16-mixed"])
    parser.add_argument("--plans", nargs="*", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = [(m, p, plan) for m in args.models for p in args.precisions for plan in args.plans]
    rows = []
    for case in cases:
        rows.append(row := found(*case))
        sizes = f"planned {row['planned'] / 2**20:7.2f} MiB, alive {row['alive'] / 2**20:7.2f}"
        print(
            f"{case[0]:12s} {case[1]:10s} {case[2]:28s} {sizes}, {row['ratio']:.3f} at {row['at']}",
            flush=True,
        )
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if all(BOUNDS[0] <= row["ratio"] <= BOUNDS[1] for row in rows):
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
