"""ModuleInit: how the module of a training gets its values, from `configure_model` to the first
training batch. Here they are made at once, full on every rank.

The extra `extras/deferred_init.py` is a subclass, for modules that are built without memory.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from alpa_strategy.hook_points import DEFERRED_INIT
from alpa_strategy.runtime.parameters import ParameterStore


class ModuleInit:
    """The values of a module that is built with memory."""

    # Whether the module of the running training was built without memory.
    was_needed = False

    @property
    def is_pending(self) -> bool:
        """Whether there are tensors without values."""
        return False

    def begin(self, device: torch.device) -> None:
        """Called before a module is built, or found to be without memory; `device`: this rank's."""

    def recording(self) -> AbstractContextManager[None]:
        """Return the context in which modules are built, converted, and given optimizers."""
        return nullcontext()

    def before_loading(self, module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
        """Called before `state_dict` is loaded into a module on the meta device."""

    def settle(
        self,
        trainer: Any,
        module: nn.Module,
        loaded: Mapping[str, Tensor],
        fits: Callable[[nn.Module], bool],
    ) -> None:
        """Determine the values of all tensors, equal on all ranks, before a run. Collective.

        Args:
            trainer: the Trainer.
            module: its module.
            loaded: name -> tensor of a checkpoint, for parameters whose shards are read later.
            fits: whether the full module fits on one device: it is not sharded for an evaluation
                then.

        Raises:
            SetupError: a parameter or buffer on the meta device has no values.
        """
        if is_on_meta(module):
            raise DEFERRED_INIT.missing(f"{type(module).__name__}, on the meta device,")

    def whole_values(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict in which all tensors have values."""
        return state

    @contextmanager
    def sharding(self, module: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
        """Context in which the module is sharded.

        Its value is a function that returns the full tensor of a parameter or of optimizer state.
        """
        yield Tensor.detach

    def read_shards(self, store: ParameterStore) -> None:
        """Called when the module is sharded: read the shards that have no values. Collective.

        Args:
            store: of the parameters.

        Raises:
            CheckpointError: a file cannot be read, on any rank.
        """


def new_module_init() -> ModuleInit:
    """Return the initialisation of a strategy's modules: deferred, if that extra is there."""
    extra = DEFERRED_INIT.extra
    return ModuleInit() if extra is None else extra()


def is_on_meta(module: nn.Module | None) -> bool:
    """Whether a parameter or buffer of the module is on the meta device."""
    if module is None:
        return False

    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def move_real_tensors(module: nn.Module, device: torch.device) -> None:
    """Move the module to `device`, except for tensors on the meta device."""
    if is_on_meta(module):
        # Sets the module's `self.device`.
        _update_properties(module, device=device)

        def move(tensor: Tensor) -> Tensor:
            return tensor if tensor.is_meta else tensor.to(device)

        module._apply(move)
    else:
        module.to(device)


def stays_sharded(run: Any) -> bool:
    """Whether the module stays sharded after a training, as the full one does not fit; logs why."""
    against = run.no_headroom_for_full_module()
    if against is None:
        return False

    rank_zero_info(
        f"alpa: the module stays in shards after training: {against}. This trainer saves and"
        " evaluates it as before"
    )
    return True
