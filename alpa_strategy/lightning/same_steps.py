"""SameSteps: all ranks take the same kind of step, or learn who does not.

Where every rank sees that something is new, the ranks meet in the job's store, not in a collective: ranks that see
nothing new are already in the collectives of their step.
"""

from __future__ import annotations

import hashlib
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.capture.non_tensor_inputs import may_be_unread, register_batch_types
from alpa_strategy.comm.collectives import RankZero, all_largest, of_all_ranks, world_size
from alpa_strategy.errors import RuntimeMismatchError, UnlikeStepsError

MEET_SECONDS = 60.0
MANY_CHANGES = 5
SAME_SHAPES = (
    "let every rank load equally many rows (drop_last=True drops a shorter last batch), padded to one length: the "
    "batches of all ranks are one batch of the step"
)


class SameSteps:
    """What a training's ranks have seen together.

    Args:
        max_shapes: batch shapes of which programs are kept.
    """

    def __init__(self, rank_zero: RankZero, max_shapes: int) -> None:
        self._rank_zero, self._max_shapes = rank_zero, max_shapes
        self._num_shapes = 1
        self._num_changes = 0
        self._digests: dict[Any, int] = {}

    def all_have(self, key: Any, index: int | None, batch: Any) -> bool:
        """Whether every rank has the same program for its batch. Collective, one small sum over the hosts.

        Args:
            key: of the batch's shape.
            index: of the program, None where this rank has none.

        Raises:
            UnlikeStepsError: the ranks' batches are of different kinds.
        """
        if world_size() == 1:
            return index is not None
        if key not in self._digests:
            # The same on every rank, as large as an int64 holds with either sign.
            self._digests[key] = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1
        own = self._digests[key], -1 if index is None else index
        largest = all_largest([own[0], -own[0], own[1], -own[1]])
        if largest[0] != -largest[1]:
            shapes = of_all_ranks(shapes_text(batch))
            shown = "; ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))
            raise UnlikeStepsError(f"batches differ between ranks: {shown}", SAME_SHAPES)
        return largest[2] == -largest[3] == index

    def meet_for_shape(self, batch: Any) -> None:
        """Wait until every rank has a batch of a new shape; RuntimeMismatchError when some go on with the old one."""
        came, missing = self._meet(f"shape{self._num_shapes}", shapes_text(batch))
        if missing:
            raise RuntimeMismatchError(
                f"batches differ between ranks: {_said(came)}, ranks {missing} go on with the shape of before",
                SAME_SHAPES,
            )
        self._num_shapes += 1
        many = self._num_shapes > self._max_shapes
        rank_zero_info(
            f"alpa: batch shape number {self._num_shapes}, captured and planned: {shapes_text(batch)}"
            + many * f" (the last {self._max_shapes} are kept: pad batches to a few lengths, pad_to_multiple_of)"
        )

    def meet_for_change(self, name: str) -> None:
        """The same for something that the step reads, such as an attribute; a word of warning when it happens often."""
        self._num_changes += 1
        came, missing = self._meet(f"attribute{self._num_changes}", name)
        if missing:
            raise RuntimeMismatchError(
                f"attributes of the module that the step reads changed on some ranks only: {_said(came)}, unchanged on "
                f"ranks {missing}",
                "change them on every rank, at the same step",
            )
        if self._num_changes == MANY_CHANGES:
            rank_zero_warn(
                f"alpa: attributes of the module that the step reads, the last one {name}, changed {MANY_CHANGES} "
                "times; each change captures the step again. A number that changes often is better a buffer: "
                f"`self.register_buffer(name, torch.tensor(value))`, changed by `fill_`"
            )

    def _meet(self, name: str, text: str) -> tuple[dict[int, str], list[int]]:
        """What the ranks that came say, by rank, and the ranks that did not come."""
        came = self._rank_zero.meet(name, text, MEET_SECONDS)
        return came, sorted(set(range(world_size())) - set(came))


def _said(came: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in came.items())


def shape_key(batch: Any) -> tuple[Any, ...]:
    """Equal for batches that one program may serve."""
    register_batch_types(batch)
    leaves, spec = pytree.tree_flatten(batch)
    return (spec, *map(_described, leaves))


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return type(leaf).__qualname__ if may_be_unread(leaf) else leaf


def shapes_text(batch: Any) -> str:
    """The shapes of the batch's tensors, for people."""
    return ", ".join(str(list(leaf.shape)) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))


class ParametersAsTheyWere:
    """Which parameters `module` has and which of them train, to be compared with later."""

    def __init__(self, module: nn.Module) -> None:
        self._flags = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
        self._owners = [(path, child, tuple(child._parameters.items())) for path, child in module.named_modules()]

    def changed(self) -> str | None:
        """The first change in words, None when there is none. Some microseconds for a hundred parameters."""
        for name, parameter, trains in self._flags:
            if parameter.requires_grad is not trains:
                return f"{name} was {'frozen' if trains else 'unfrozen'}"
        for path, child, before in self._owners:
            now = child._parameters
            if len(now) != len(before) or any(now.get(name) is not p for name, p in before):
                return f"the parameters of {path or 'the module'} were replaced"
        return None
