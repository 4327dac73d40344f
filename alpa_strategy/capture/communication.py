"""The step's own communication, which a captured step cannot repeat: how it is noticed.

What planning takes of torch.distributed is here (but for the names of placements).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import fx

from alpa_strategy.capture.python_state import patched
from alpa_strategy.capture.side_effects import checked
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.user_code import user_frame

# Namespaces of collective ops.
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")

# Parts of the names of collectives and messages: `all_reduce`, `batch_isend_irecv`,
# `monitored_barrier`, `reduce_scatter_tensor`.
_KINDS = ("all_to_all", "barrier", "broadcast", "gather", "recv", "reduce", "scatter", "send")


def is_of_all_ranks(group: Any) -> bool:
    """Whether a module's process group is that of all ranks."""
    return group in (None, dist.group.WORLD)


def refuse_collective(collective: str, where: str | None = None) -> NoReturn:
    """Raise CaptureError about a collective.

    Args:
        collective: its name.
        where: the user's line, if it is not in the running stack.
    """
    raise CaptureError(
        f"{collective} is called in the step ({where or user_frame()}): a captured step cannot"
        " repeat the communication of its own code",
        "communicate what is for your own eyes in a hook such as on_train_batch_end. Under"
        ' batch_scope="global" leave the call out: tensors have all samples (in a contrastive loss'
        " `z @ z.T` has every negative, and the labels are `arange(len(z))`)",
    )


def collectives_refused() -> AbstractContextManager[None]:
    """Return the context in which this thread's calls of torch.distributed's public collectives,
    messages and barriers raise CaptureError.
    """
    patches = []
    for module in (dist, functional):
        for name, function in vars(module).items():
            is_public = type(function) is FunctionType and name[0] != "_"
            if is_public and any(kind in name for kind in _KINDS):
                refusal = partial(_refuse, f"torch.distributed's {name}")
                patches.append((module, name, checked(function, refusal)))
    return patched(patches)


def _refuse(collective: str, *_: Any, **__: Any) -> NoReturn:
    refuse_collective(collective)


def check_no_collectives(graph: fx.Graph, origins: Mapping[fx.Node, tuple[str, str]]) -> None:
    """Raise CaptureError if the graph has a collective.

    It was called by another name (`from torch.distributed import all_reduce`).
    """
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _NAMESPACES:
            refuse_collective(str(node.target), origins.get(node, ("", ""))[1] or "line unknown")
