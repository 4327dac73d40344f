"""What the Alpa paper planned and measured (OSDI 2022, tables 4 to 6 and figure 7): models,
batches, throughputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

NUM_DEVICES = (1, 4, 8, 16, 32, 64)
SIZES = {
    "gpt": ("350m", "1_3b", "2_6b", "6_7b", "15b", "39b"),
    "moe": ("380m", "1_3b", "2_4b", "10b", "27b", "70b"),
    "wide_resnet": ("250m", "1b", "2b", "4b", "6_8b", "13b"),
}
MICROBATCHES = {
    "gpt": (512, 128, 128, 64, 128, 1024),
    "moe": (512, 32, 32, 16, 128, 64),
    "wide_resnet": (24, 24, 24, 32, 32, 38),
}
# PFLOPS at 8, 16, 32 and 64 devices, read off the figure (+-3 %); 0: out of memory, None: not
# given.
FIGURE = {
    "gpt": {
        "solved": (0.47, 0.94, 1.89, 3.63),
        "megatron": (0.38, 0.89, 1.84, 3.68),
        "inter": (0.43, 0.93, 1.57, 3.21),
        "intra": (0.38, 0.75, 1.10, 0.11),
    },
    "moe": {
        "solved": (0.35, 0.71, 1.22, 2.32),
        "deepspeed": (0.30, 0.19, 0.11, 0.0),
        "inter": (0.30, 0.48, 0.0, 0.0),
        "intra": (0.35, 0.35, 0.03, None),
    },
    "wide_resnet": {
        "solved": (0.061, 0.106, 0.209, 0.337),
        "pp_dp": (0.059, 0.003, 0.0, 0.0),
        "intra": (0.059, 0.072, 0.060, 0.041),
    },
}


@dataclass(frozen=True)
class Cell:
    """One model on one cluster, with the paper's figures (PFLOPS; 0: out of memory, absent: not
    given).
    """

    family: str
    size: str
    num_devices: int
    rows: int
    num_microbatches: int
    paper: dict[str, float]

    @property
    def recipe(self) -> str:
        return f"{self.family}_{self.size}"

    @property
    def key(self) -> str:
        return f"{self.family} {self.num_devices}"


def cells() -> Iterator[Cell]:
    """All of them, family by family, ascending in size."""
    for family, names in SIZES.items():
        for index, (size, devices) in enumerate(zip(names, NUM_DEVICES, strict=True)):
            if family == "wide_resnet":
                rows = 1520 if devices == 64 else 1536
            else:
                rows = 1024
            figure = {k: v[index - 2] for k, v in FIGURE[family].items() if index >= 2}
            paper = {k: v for k, v in figure.items() if v is not None}
            yield Cell(family, size, devices, rows, MICROBATCHES[family][index], paper)


def model_flops(cell: Cell, model: torch.nn.Module, forward_flops: float) -> float:
    """FLOPs of a step as the paper counts them; `forward_flops`: of the captured step (Wide-ResNet
    has no formula).
    """
    if cell.family == "wide_resnet":
        return 4 * forward_flops
    h = model.hparams
    tokens = cell.rows * h.sequence_length
    D = h.hidden
    T = h.sequence_length
    V = h.vocab_size
    L = h.num_layers
    head = 6 * tokens * D * V
    if cell.family == "gpt":
        return 96 * tokens * D**2 * L * (1 + T / (6 * D)) + head
    attention = tokens * (8 * D**2 + 4 * T * D)
    dense = attention + tokens * 4 * h.mlp_factor * D**2
    experts = attention + tokens * (8 * h.mlp_factor * D**2 + 2 * D * h.num_experts)
    experts += tokens * (4 * h.group_size + 8 * D * h.group_size)  # gating; dispatch and combine
    return 4 * (dense + experts) * L / 2 + head
