"""What this process takes of the host's memory beside tensors: Python, libraries and their pages."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.runtime.host_memory import resident_bytes


def process_bytes(module: nn.Module, optimizer: Optimizer) -> int:
    """Resident bytes of a process whose tensors are those of the module and the optimizer, without these; 0 where the
    system does not tell."""
    state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    tensors = (*module.parameters(), *module.buffers(), *state)
    return max(0, resident_bytes() - sum(tensor.untyped_storage().nbytes() for tensor in tensors))
