"""Other data for a parameter that autograd may know already: a shard in place of the whole, the whole again later."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def replace_data(parameter: nn.Parameter, data: Tensor) -> None:
    """`parameter.data = data`, of any shape, and gradients have that shape from now on.

    A graph that is still alive (a weight that weight normalization computed when the module was built, a loss that
    somebody keeps) holds the node that adds to `parameter.grad`, and that node remembers the shape of the data that it
    was made for. PyTorch makes a new node when the dtype changes, so it is changed there and back.
    """
    other = torch.float32 if parameter.dtype != torch.float32 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = data
