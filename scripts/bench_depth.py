"""How planning grows with depth: capture and planning of equal layers, of layers that all differ,
and of a library's.

    # every family at 2, 8, 32 and 64 layers, on 8 devices
    python scripts/bench_depth.py
    python scripts/bench_depth.py gpt,tapered 8,16,32

CPU seconds, each plan in a process of its own (what one plan made is no help to the next). No
devices are needed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.nn import functional as F

from alpa_strategy import ClusterSpec, PlanOptions, make_plan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))
from gpt import GPT
from wide_resnet import Bottleneck

ROWS = 8
LENGTH = 512
VOCAB = 8192


class Tapered(lightning.LightningModule):
    """Residual blocks of which no two have the same width, on images."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        widths = [64 + 8 * layer for layer in range(depth)]
        blocks = [Bottleneck(4 * a, b, 1, 1) for a, b in zip([16, *widths], widths, strict=False)]
        self.net = nn.Sequential(
            nn.Conv2d(3, 64, 4, 4), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(4 * widths[-1], 100)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.head(self.net(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Llama(lightning.LightningModule):
    """Hugging Face's."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        }
        self.model = LlamaForCausalLM(
            LlamaConfig(vocab_size=VOCAB, num_hidden_layers=depth, **sizes)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(
            self.model(input_ids=batch[0]).logits.flatten(0, 1), batch[1].flatten()
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def gpt(depth: int) -> GPT:
    return GPT(
        num_layers=depth, hidden=1024, num_heads=16, vocab_size=VOCAB, sequence_length=LENGTH
    )


FAMILIES = {"gpt": gpt, "tapered": Tapered, "llama": Llama}


def line(family: str, depth: int, options: PlanOptions) -> str:
    """One planning, as a line of the table."""
    if family == "tapered":
        batch = torch.zeros(ROWS, 3, 64, 64), torch.zeros(ROWS, dtype=torch.long)
    else:
        batch = (torch.zeros(ROWS, LENGTH, dtype=torch.long),) * 2
    with torch.device("meta"):
        model = FAMILIES[family](depth)
    started = time.process_time()
    plan = make_plan(
        model, batch, replace(ClusterSpec.load("p3_16xlarge_x8"), num_nodes=1), options
    )
    seconds = time.process_time() - started
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    parts = sorted(plan.solver_seconds.items(), key=lambda item: -item[1])
    spent = ", ".join(f"{name} {s:.1f}" for name, s in parts[:6])
    head = f"{family:>8} {depth:>4} {seconds:>8.1f} {1e3 * seconds / depth:>12.0f} {gib:>5.1f}"
    return f"{head} {len(plan.stages):>7}  {spent}"


def show(family: str, depth: int, options: PlanOptions) -> None:
    print(line(family, depth, options), flush=True)


def known(text: str) -> list[str]:
    """The families of an argument."""
    names = text.split(",")
    if unknown := set(names) - set(FAMILIES):
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)}: the families are {', '.join(FAMILIES)}"
        )
    return names


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "families", nargs="?", type=known, default=list(FAMILIES), help="such as gpt,tapered"
    )
    parser.add_argument(
        "depths", nargs="?", default="2,8,32,64", help="numbers of layers, such as 8,16,32"
    )
    args = parser.parse_args()
    failed = 0
    print(
        f"{'':>8} {'depth':>4} {'CPU s':>7} {'ms a layer':>12} {'GiB':>5} {'stages':>7}  where"
        " (wall seconds)"
    )
    for options in (PlanOptions(), PlanOptions(num_microbatches=8)):
        print(
            "pipelines of 8 micro-batches" if options.num_microbatches else "as by default",
            flush=True,
        )
        for family in args.families:
            for depth in map(int, args.depths.split(",")):
                process = multiprocessing.get_context("fork").Process(
                    target=show, args=(family, depth, options)
                )
                process.start()
                process.join()
                failed += process.exitcode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
