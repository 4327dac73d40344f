"""GradientCheck: where losses or gradients stop to be finite, or differ between ranks that should have the same.

Every rank looks at the gradients that its backward makes, before sums over the ranks spread what is not finite. What
no one device would have can then be told from the training's own: it begins on one rank, or in a sum of finite parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils import _pytree as pytree

from alpa_strategy.comm.collectives import any_rank, of_all_ranks
from alpa_strategy.lightning.digests import CopyCheck

Seen = tuple[bool, str | None, str | None, bool]  # loss is bad, first bad own gradient, first bad sum, batch is bad


class GradientCheck:
    """Looks at each step of the optimizer, when its gradients are complete.

    Args:
        divided: as for `report`.

    Attributes:
        batch: of the step under way.
        copies: compares gradients of what several ranks hold.
    """

    copies: CopyCheck

    def __init__(self, divided: bool) -> None:
        self._divided = divided
        self.batch: Any = None
        self._losses: list[Tensor] = []
        self._own: list[tuple[str, Tensor]] = []  # in the backward's order, each micro-batch's
        self._was_finite = True

    def look(self, name: str, used: Tensor) -> None:
        """A hook of the backward: `used.grad` is this rank's own. Nothing is waited for."""
        assert used.grad is not None
        self._own.append((name, _is_bad(used.grad)))

    def look_at_loss(self, loss: Tensor) -> None:
        """Before its backward."""
        self._losses.append(loss.detach())  # sums over devices may be under way

    def finish(self, gradients: Mapping[str, Tensor | None], step: int) -> None:
        """Report what is not finite, at the first of such steps; else compare. Collective.

        Args:
            gradients: reduced, by the parameters' names.

        Raises:
            RuntimeMismatchError: on all ranks: gradients of which they should hold copies differ.
        """
        summed = [(name, _is_bad(grad)) for name, grad in gradients.items() if grad is not None]
        flags = [list(map(_is_bad, self._losses)), [flag for _, flag in self._own], [flag for _, flag in summed]]
        bad = [bool(torch.stack(each).any()) if each else False for each in flags]
        if any(any_rank(bad)):
            leaves = [x for x in pytree.tree_leaves(self.batch) if isinstance(x, Tensor)]
            bad_batch = any(bool(_is_bad(x)) for x in leaves)
            found = of_all_ranks((bad[0], _first(self._own), _first(summed), bad_batch))
            if self._was_finite:
                rank_zero_warn(f"alpa: step {step}: {report(found, self._divided)}")
            self._was_finite = False
        else:
            self._was_finite = True
            self.copies.now(f"at step {step}")
        self.forget()

    def forget(self) -> None:
        """What the step under way has shown."""
        self._losses.clear()
        self._own.clear()
        self.batch = None


def report(found: Sequence[Seen], divided: bool) -> str:
    """What the ranks have seen in a step in which something is not finite, as a sentence or two.

    Args:
        divided: one step of all ranks, which exchange values within it: one rank's fault may come to all of them.
    """
    ranks = range(len(found))
    losses, own, batches = ([r for r in ranks if found[r][i]] for i in (0, 1, 3))
    where = "; ".join(f"rank {r}: first that of {found[r][1]}" for r in own[:4])
    lost = f"the loss is not finite on ranks {losses}; " if losses else ""
    rows = f" The batch of ranks {batches} holds values that are not finite." if batches else ""
    if len(own) == len(found):
        said = f"every rank's gradients are not finite ({where}): the training's own, as it would be on one device"
        said += ', or came with a value that the plan has the ranks exchange (capture="never" tells)' if divided else ""
    elif own:
        said = (
            f"gradients of ranks {own} alone are not finite before they are summed ({where}): these ranks' rows, or a "
            "device. Their rows in another rank's place tell: it is the rows where it moves with them"
        )
    elif losses:
        said = "all gradients of the ranks' own are finite"
    else:
        name = next(each[2] for each in found if each[2] is not None)
        said = (
            f"every rank's own gradients are finite, that of {name} is not once they are summed: the sum overflows, or "
            "a link or device computes wrongly"
        )
    return lost + said + "." + rows


def _is_bad(x: Tensor) -> Tensor:
    """Whether a value is not finite, `[]` of bool on its device."""
    return ~torch.isfinite(x).all()


def _first(seen: Sequence[tuple[str, Tensor]]) -> str | None:
    return next((name for name, flag in seen if flag), None)
