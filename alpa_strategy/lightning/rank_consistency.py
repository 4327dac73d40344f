"""StepConsensus: all ranks take the same kind of step, or learn who does not.

Where a module changes, the ranks meet in the job's store: ranks on which it did not are in their
step's collectives.
"""

import hashlib
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from alpa_strategy.comm.collectives import RankZero, all_gather_object, all_reduce_max, world_size
from alpa_strategy.errors import RuntimeMismatchError, UnlikeStepsError
from alpa_strategy.ir.user_code import mentioned_names

# How long a rank waits for the others to report a change of the module.
MEET_SECONDS = 60.0

# Number of shapes of batches whose programs are kept.
MAX_SHAPES = 64

SAME_SHAPES = (
    "let every rank load equally many rows (drop_last=True drops a shorter last batch), padded to"
    " one length: the "
    "batches of all ranks are one batch of the step"
)


def _digest(value: Any) -> int:
    """Return a number that is the same on every rank for the same `repr`, at most 2^63 - 1."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 1


class StepConsensus:
    """Compares between ranks what they are about to run.

    Args:
        rank_zero: of all ranks of the job.
        group: process group of the ranks that run a step together; None: all.
    """

    def __init__(self, rank_zero: RankZero, group: Any) -> None:
        self._rank_zero = rank_zero
        self._group = group
        self._is_alone = world_size(group) == 1

        # Changes of the module so far.
        self._num_changes = 0

        # Key of a batch's shape -> its digest.
        self._digests: dict[Any, int] = {}

        # Whether any rank's buffers have changed outside of steps, as of the last `all_have` with
        # other ranks.
        self.buffers_changed = False

    def all_have(
        self,
        key: Any,
        index: int | None,
        batch: Any,
        numbers: Mapping[str, Any],
        buffers_changed: bool = False,
    ) -> bool:
        """Whether every rank has the same program for its batch, and the same numbers.

        Collective over the group, in host memory. Afterwards `self.buffers_changed` is whether any
        rank passed True for `buffers_changed`; it does not change the result. A single rank
        compares nothing and leaves the attribute as it was.

        Args:
            key: of the batch's shape, as of `shape_key`.
            index: of the program for it; None: this rank has none, and the result is False.
            batch: this rank's, for the message.
            numbers: by name, the numbers that the program takes besides the batch.
            buffers_changed: whether this rank's buffers have changed since the last step.

        Raises:
            UnlikeStepsError: the ranks' batches have different keys; on every rank.
        """
        if self._is_alone:
            return index is not None
        if key not in self._digests:
            self._digests[key] = _digest(key)
        of_key = self._digests[key]
        of_program = -1 if index is None else _digest((index, numbers))

        # All ranks have the same number if the largest one is the smallest one.
        largest = all_reduce_max(
            [of_key, -of_key, of_program, -of_program, int(buffers_changed)], self._group
        )
        self.buffers_changed = bool(largest[4])
        if largest[0] != -largest[1]:
            shapes = all_gather_object(shapes_text(batch), self._group)
            shown = "; ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))
            raise UnlikeStepsError(f"batches differ between ranks: {shown}", SAME_SHAPES)
        return index is not None and largest[2] == -largest[3]

    def say_shape(self, batch: Any, number: int) -> None:
        """Log, on rank 0, that a step was captured for another shape of batches.

        Args:
            number: of the shape, counted from 1 over the training.
        """
        text = f"alpa: batch shape number {number}, captured: {shapes_text(batch)}"
        if number > MAX_SHAPES:
            text += (
                f" (the last {MAX_SHAPES} are kept: pad batches to a few lengths,"
                " pad_to_multiple_of)"
            )
        rank_zero_info(text)

    def meet_for_change(self, name: str) -> None:
        """Wait until every rank has seen a change of the module.

        Args:
            name: the change as a text, for the message.

        Raises:
            RuntimeMismatchError: a rank has seen none within `MEET_SECONDS`.
        """
        self._num_changes += 1
        came = self._rank_zero.meet(f"change{self._num_changes}", name, MEET_SECONDS)
        missing = sorted(set(range(world_size())) - set(came))
        if not missing:
            return
        changes = "; ".join(f"rank {rank}: {text}" for rank, text in came.items())
        raise RuntimeMismatchError(
            f"the module changed on some ranks only: {changes}, unchanged on ranks {missing}",
            "change it on every rank, at the same step",
        )


def shapes_text(batch: Any) -> str:
    """Return the shapes of the batch's tensors, for messages."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)


def toggled(module: Any, optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters that an eager step may freeze and unfreeze (as of a GAN's parts).

    All that the optimizers have; none if the step names neither `requires_grad` nor `freeze` or
    `unfreeze`, and does not step optimizers itself.
    """
    freezing = mentioned_names(module.training_step) & {
        "requires_grad",
        "requires_grad_",
        "freeze",
        "unfreeze",
    }
    if not freezing and module.automatic_optimization:
        return []

    parameters = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
    return parameters


class ParameterChangeDetector:
    """Records the parameters of a module and which of them train, and detects later changes.

    Args:
        module: the module.
        toggled: parameters that may be frozen and unfrozen.
    """

    def __init__(self, module: nn.Module, toggled: Iterable[nn.Parameter] = ()) -> None:
        self._module = module
        left_out = {id(parameter) for parameter in toggled}
        self._flags = [
            (name, p, p.requires_grad)
            for name, p in module.named_parameters()
            if id(p) not in left_out
        ]
        # Modules with parameters; with their paths and names of parameters.
        self._owners = []
        for path, child in module.named_modules():
            # Modules of TorchScript have no dict here, but something with keys and values.
            names = tuple(child._parameters.keys())
            self._owners.append((path, child, names, tuple(child._parameters.values())))
        self._members = [
            (child._modules, tuple(child._modules.values())) for child in module.modules()
        ]
        self._all = set(module.parameters())

    def leave_frozen(self) -> None:
        """Ignore parameters that an eager step has frozen from now on; it may unfreeze them."""
        flags = []
        for name, parameter, trains in self._flags:
            if parameter.requires_grad or not trains:
                flags.append((name, parameter, trains))
        self._flags = flags

    def changed(self) -> str | None:
        """Return the first change as a text, None if there is none.

        Takes some microseconds for a hundred parameters.
        """
        for name, parameter, trains in self._flags:
            if parameter.requires_grad is not trains:
                return f"{name} was {'frozen' if trains else 'unfrozen'}"
        for path, child, names, parameters in self._owners:
            now = child._parameters
            if not now and not names:
                continue
            if tuple(now.keys()) == names and all(map(is_, now.values(), parameters)):
                continue
            # Another order of the same ones is no change.
            ids_before = dict(zip(names, map(id, parameters), strict=True))
            if ids_before != {name: id(parameter) for name, parameter in now.items()}:
                return f"the parameters of {path or 'the module'} were replaced"
        for children, before in self._members:
            if tuple(children.values()) == before:
                continue
            # Submodules were replaced, perhaps by ones without parameters.
            is_same = set(self._module.parameters()) == self._all
            return None if is_same else "submodules with parameters were added or replaced"
        return None
