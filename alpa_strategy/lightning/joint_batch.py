"""The batch of a replica's ranks, for eager steps with planned submodules.

Such a step runs the user's Python alike on all ranks of a replica, so these have one batch: the
one that all load, or their samples one after the other.
"""

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from alpa_strategy.capture.non_tensor_inputs import value_text
from alpa_strategy.capture.trace import have_common_size
from alpa_strategy.comm.collectives import all_gather_object
from alpa_strategy.comm.mesh import AxisComm
from alpa_strategy.errors import UnlikeStepsError
from alpa_strategy.lightning.digests import digest
from alpa_strategy.lightning.rank_consistency import SAME_SHAPES


def joint_batch(batch: Any, axis: AxisComm, joins: bool) -> Any:
    """Return the batch of all ranks on `axis`. Collective.

    Tensors with the most frequent size(0), and lists of as many items, are joined. Everything else
    must be the same on all ranks.

    Args:
        batch: this rank's.
        joins: whether each rank loads samples of its own; else all have the same batch.

    Raises:
        UnlikeStepsError: the ranks' batches cannot be joined.
    """
    leaves, spec = pytree.tree_flatten(batch, is_leaf=_is_list)
    is_joined = _joined_leaves(leaves) if joins else [False] * len(leaves)

    common = []
    lists: list[Any] = []
    for leaf, joined in zip(leaves, is_joined, strict=True):
        common.append(_common_part(leaf, joined))
        is_joined_list = joined and _is_list(leaf)
        lists.append(leaf if is_joined_list else ())

    of_ranks = all_gather_object((common, lists), axis.group)
    if any(of_rank != common for of_rank, _ in of_ranks):
        texts = [of_rank for of_rank, _ in of_ranks]
        raise UnlikeStepsError(f"batches differ between ranks: {texts}", SAME_SHAPES)

    for index, leaf in enumerate(leaves):
        if not is_joined[index]:
            continue
        if isinstance(leaf, Tensor):
            leaves[index] = axis.all_gather(leaf, 0, len(leaf) * axis.size)
        else:
            items = [item for _, of_rank in of_ranks for item in of_rank[index]]
            leaves[index] = type(leaf)(items)
    return pytree.tree_unflatten(leaves, spec)


def _joined_leaves(leaves: list[Any]) -> list[bool]:
    """Return for every leaf whether it has an item for each sample."""
    flags = iter(have_common_size(leaves))
    num_samples = None
    has_samples = []
    for leaf in leaves:
        is_batched = False
        if isinstance(leaf, Tensor):
            is_batched = next(flags)
        if is_batched:
            num_samples = len(leaf)
        has_samples.append(is_batched)

    for index, leaf in enumerate(leaves):
        if _is_list(leaf):
            has_samples[index] = len(leaf) == num_samples
    return has_samples


def _common_part(leaf: Any, is_joined: bool) -> Any:
    """Return what the ranks must have in common of a leaf."""
    if isinstance(leaf, Tensor):
        content = None if is_joined else int(digest(leaf))
        return tuple(leaf.shape), leaf.dtype, content
    return len(leaf) if is_joined else value_text(leaf)


def _is_list(value: Any) -> bool:
    """Whether `value` may hold an item for each sample."""
    if type(value) not in (list, tuple):
        return False
    return all(isinstance(item, str | int | float) for item in value)
