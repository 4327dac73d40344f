"""Deferral: what a strategy still has to make of a module that was built without memory; most modules need none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from alpa_strategy.comm.collectives import world_size
from alpa_strategy.lightning.meta import is_on_meta, skip_sanity_check
from alpa_strategy.runtime.host_memory import Freed, set_freed

if TYPE_CHECKING:
    from alpa_strategy.lightning.large import LargeModel


class Deferral:
    """A `LargeModel` from the moment that one is needed until its tensors are made.

    Attributes:
        was_needed: whether the module of the running training was built without memory.
    """

    def __init__(self) -> None:
        self._large: LargeModel | None = None
        self.was_needed = False

    @property
    def is_pending(self) -> bool:
        """Whether there are tensors to make."""
        return self._large is not None

    def begin(self, device: torch.device) -> LargeModel:
        """Something is built without memory; `device`: this rank's."""
        if self._large is None:
            from alpa_strategy.lightning.large import LargeModel

            if device.type == "cpu":
                # Random ops are run to move on the generators: kept, their blocks would become as much as the model.
                set_freed(Freed.GIVEN_BACK)
            self._large = LargeModel(device)
        return self._large

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What happens to deferred tensors is recorded; nothing special where there are none."""
        if self._large is None:
            yield
            return
        with self._large.recording():
            yield

    def settle(
        self, trainer: Any, module: nn.Module, loaded: Mapping[str, Tensor], fits: Callable[[nn.Module], bool]
    ) -> None:
        """Values for what was built without memory; it is made now where no plan will come. Collective.

        Args:
            loaded: name -> tensor of a checkpoint, of parameters that are read when this rank's part is known.
            fits: whether the whole module fits into one device: it is not sharded for an evaluation then.
        """
        if self._large is None:
            return
        self._large.settle(module, loaded)
        if not is_on_meta(module):
            self._large = None
        elif world_size() == 1 or (trainer.state.fn != TrainerFn.FITTING and fits(module)):
            self._large.make_whole(module)
            self._large = None
        elif trainer.state.fn == TrainerFn.FITTING:
            skip_sanity_check(trainer)

    def whole_values(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict with its deferred tensors made."""
        return state if self._large is None else self._large.whole_values(state)

    @contextmanager
    def sharding(self, module: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
        """Around what shards the module: gives the function that makes all of a parameter or of optimizer state."""
        if self._large is None:
            yield Tensor.detach
            return
        self._large.put_placeholders(module)
        yield self._large.whole
        self._large.finish()
        self._large, self.was_needed = None, True
