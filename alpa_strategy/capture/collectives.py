"""Communication that the user's step does by itself is refused: the captured step has the rows of all ranks already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import fx

from alpa_strategy.capture.blame import user_frame
from alpa_strategy.errors import CaptureError

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_KINDS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "scatter",
    "send",
)


def refuse(what: str, where: str | None = None) -> NoReturn:
    """CaptureError about a call of the user's line, `where` it is if not in the running stack."""
    raise CaptureError(
        f"{what} is called in the step ({where or user_frame()}): the captured step computes on the rows of all ranks "
        "together, as one device would",
        "leave the call out: tensors have all rows, and means and sums are over all of them (in a contrastive loss "
        "`z @ z.T` has every negative, and the labels are `arange(len(z))`); what is for your own eyes can be "
        "communicated in a hook such as on_train_batch_end",
    )


@contextmanager
def collectives_refused() -> Iterator[None]:
    """Calls of torch.distributed by this thread are refused while the block runs."""
    before = [
        (module, name, value)
        for module in (dist, functional)
        for name, value in vars(module).items()
        if type(value) is FunctionType and _communicates(name)
    ]
    for module, name, value in before:
        setattr(module, name, _refusal(name, value, get_ident()))
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _refusal(name: str, function: Callable[..., Any], thread: int) -> Callable[..., Any]:
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if get_ident() == thread:
            refuse(f"torch.distributed's {name}")
        return function(*args, **kwargs)  # a checkpoint that is written in the background

    return refusing


def _communicates(name: str) -> bool:
    """Whether a public function of torch.distributed is a collective or a message: `all_reduce`, `batch_isend_irecv`,
    `monitored_barrier`, `reduce_scatter_tensor`, ..."""
    return not name.startswith("_") and any(kind in name for kind in _KINDS)


def check_no_collectives(graph: fx.Graph, origins: Mapping[fx.Node, tuple[str, str]]) -> None:
    """CaptureError when one was reached under another name (`from torch.distributed import all_reduce`)."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _NAMESPACES:
            refuse(str(node.target), origins.get(node, ("", ""))[1] or "line unknown")
