"""What this process takes of the host's memory beside tensors: Python, libraries and their pages."""

from __future__ import annotations

import psutil
from torch import Tensor, nn
from torch.optim import Optimizer


def process_bytes(module: nn.Module, optimizer: Optimizer) -> int:
    """Resident bytes of a process whose tensors are those of the module and the optimizer, without these."""
    state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    tensors = (*module.parameters(), *module.buffers(), *state)
    return max(0, psutil.Process().memory_info().rss - sum(tensor.untyped_storage().nbytes() for tensor in tensors))
