"""Optimizers by name, as planning knows them."""

from collections.abc import Callable
from functools import partial

import torch
from torch.optim import Optimizer

from alpa_strategy.errors import check_names
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.planner.optimizer_info import inspect_optimizer

# Of optimizers whose state is quantized in blocks of 256: two moments of a byte, and two scales in
# float32 of each block (bitsandbytes, torchao).
_BYTES_OF_8BIT_STATE = 2 + 2 * 4 / 256

_Parameters = list[torch.nn.Parameter]
OPTIMIZERS: dict[str, Callable[[_Parameters], Optimizer] | OptimizerInfo] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
    "adamw8bit": OptimizerInfo(_BYTES_OF_8BIT_STATE, name="AdamW8bit"),
}


def check_optimizer(name: str) -> None:
    """Raise OptionError if there is no optimizer of that name."""
    check_names([name], OPTIMIZERS, "--optimizer: there is no")


def optimizer_of(name: str, module: torch.nn.Module) -> OptimizerInfo:
    """Return how the named optimizer trains the parameters of `module`.

    Muon trains matrices; the few other parameters are counted as if it trained them, too.

    Raises:
        OptionError: there is no optimizer of this name.
    """
    check_optimizer(name)
    maker = OPTIMIZERS[name]
    if isinstance(maker, OptimizerInfo):
        return maker
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if name == "muon":
        trained = [parameter for parameter in trained if parameter.dim() == 2]
    return inspect_optimizer(maker(trained))
