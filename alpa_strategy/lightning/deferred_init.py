"""A module that was built without memory, from `configure_model` to the first training batch.

The strategy records what builds and fills the module (`runtime/deferred.py`); nothing is made until
the plan says which part of each parameter this rank keeps. Then parameters are made one after the
other, cut, and the rest is freed.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.checkpoint.tensors import Chunk, read_chunks
from alpa_strategy.comm.collectives import (
    all_gather_object,
    broadcast_object,
    on_all_ranks,
    world_size,
)
from alpa_strategy.errors import AlpaError, RuntimeMismatchError
from alpa_strategy.lightning.digests import digest
from alpa_strategy.runtime.deferred import Recorder
from alpa_strategy.runtime.host_memory import keep_freed

RESETS = ("reset_parameters", "_reset_parameters")


class DeferredInit:
    """What a strategy still has to make of a module that was built without memory; most modules
    need nothing.
    """

    def __init__(self) -> None:
        # Whether the module of the running training was built without memory.
        self.was_needed = False
        # This rank's.
        self._device = torch.device("cpu")
        # As long as there is something to make.
        self._recorder: Recorder | None = None
        self._loaded: dict[nn.Parameter, Tensor] = {}
        # Parameter with a placeholder -> its deferred tensor.
        self._waiting: dict[nn.Parameter, Tensor] = {}

    @property
    def is_pending(self) -> bool:
        """Whether there are tensors to make."""
        return self._recorder is not None

    def begin(self, device: torch.device) -> None:
        """Something is built without memory; `device`: this rank's."""
        if self._recorder is None:
            if device.type == "cpu":
                # Random ops are run to move on the generators: kept, their blocks would become as
                # much as the model.
                keep_freed(False)
            self._device, self._recorder = device, Recorder(device)

    def recording(self) -> AbstractContextManager[None]:
        """Big tensors that are made here are deferred, ops on them recorded; nothing special where
        there are none.
        """
        return nullcontext() if self._recorder is None else self._recorder.recording()

    def before_loading(self, module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
        """Give memory to the buffers that a checkpoint is going to fill; parameters wait for their
        shards.
        """
        self._make_others(module)
        for prefix, child in module.named_modules():
            for name, buffer in child._buffers.items():
                if (
                    buffer is not None
                    and buffer.is_meta
                    and f"{prefix}.{name}".removeprefix(".") in state_dict
                ):
                    child._buffers[name] = torch.empty_like(buffer, device=self._device)

    def settle(
        self,
        trainer: Any,
        module: nn.Module,
        loaded: Mapping[str, Tensor],
        fits: Callable[[nn.Module], bool],
    ) -> None:
        """Before a run: values for everything on the meta device, the same on all ranks; buffers
        are made.

        Parameters are made now where no plan will come. Collective.

        Args:
            loaded: name -> tensor of a checkpoint, of parameters that are read when this rank's
                part is known.
            fits: whether the whole module fits into one device: it is not sharded for an evaluation
                then.

        Raises:
            AlpaError: a parameter or buffer on the meta device has no values, and its module no way
                to make them.
        """
        if self._recorder is None:
            return
        self._loaded = {module.get_parameter(name): tensor for name, tensor in loaded.items()}
        on_all_ranks(lambda: self._reset(module), lambda _: None)
        _agree(self._recorder)
        self._make_others(module)
        is_training = trainer.state.fn == TrainerFn.FITTING
        if not is_on_meta(module) or world_size() == 1 or (not is_training and fits(module)):
            self._put_placeholders(module)
            self._finish()
        elif is_training and trainer.num_sanity_val_steps and trainer.enable_validation:
            trainer.num_sanity_val_steps = 0
            rank_zero_info(
                "alpa: no sanity check before training: parameters are made in shards, by the plan"
                " that the first "
                "training batch brings"
            )

    def whole_values(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict with its deferred tensors made."""
        return {
            key: self._whole(value) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }

    @contextmanager
    def sharding(self, module: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
        """Around what shards the module: gives the function that makes all of a parameter or of
        optimizer state.
        """
        if self._recorder is None:
            yield Tensor.detach
            return
        self._put_placeholders(module)
        yield self._whole
        self._finish()
        self.was_needed = True

    def _put_placeholders(self, module: nn.Module) -> None:
        """Give deferred parameters their real device, dtype and shape, still without memory, so
        that `data` may be set.

        The Parameter objects stay the same.
        """
        assert self._recorder is not None
        for name, parameter in module.named_parameters():
            if not parameter.is_meta:
                continue
            if parameter not in self._loaded and not self._recorder.is_unchanged(parameter):
                raise AlpaError(
                    f"{name} was changed in place after it had been built without memory: the"
                    " change is lost",
                    "change parameters in configure_model (or within trainer.init_module())",
                )
            empty = torch.zeros((), dtype=parameter.dtype, device=self._device).expand(
                parameter.shape
            )
            other = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            # Optimizers, callbacks and tied modules hold this very object: only what it points to
            # changes. `data = ...` cannot leave the meta device, and `torch.utils.swap_tensors`
            # refuses what has weak references (nn.LSTM).
            torch._C._swap_tensor_impl(parameter, other)
            self._waiting[parameter] = other.detach()

    def _whole(self, tensor: Tensor) -> Tensor:
        """All of a parameter or state tensor, on this rank's device; made now where it was
        deferred.
        """
        if isinstance(tensor, nn.Parameter):
            # Read into its shard later.
            if tensor in self._loaded:
                return torch.empty((), dtype=tensor.dtype, device=self._device).expand(tensor.shape)
            tensor = self._waiting.get(tensor, tensor)
        if self._recorder is None or not tensor.is_meta:
            return tensor.detach()
        return self._recorder.whole(tensor.detach()).to(self._device)

    def _finish(self) -> None:
        """Make what nobody has taken (no plan, or parameters that the step does not use), and
        forget the record.
        """
        for parameter in self._waiting:
            # A placeholder, or taken whole while it was still to be read (`_whole`): one element
            # that stands for all.
            if any(parameter.stride()):
                continue
            whole = self._whole(parameter)
            if parameter in self._loaded:
                whole = whole.contiguous()
                read_chunks(self._loaded[parameter], [Chunk((0,) * whole.dim(), whole)])
            parameter.data = whole
        self._waiting.clear()
        self._loaded.clear()
        self._recorder = None

    def _reset(self, module: nn.Module) -> None:
        """Let modules on the meta device that nobody recorded initialise themselves, in the tree's
        order.
        """
        missing = set(self._uninitialised(module))
        for prefix, child in module.named_modules():
            own = (
                *child.named_parameters(prefix, recurse=False),
                *child.named_buffers(prefix, recurse=False),
            )
            if missing.isdisjoint(name for name, _ in own):
                continue
            reset = next(
                (getattr(child, name) for name in RESETS if callable(getattr(child, name, None))),
                None,
            )
            if reset is not None:
                with self.recording():
                    reset()
        left = self._uninitialised(module)
        if left:
            owner = module.get_submodule(left[0].rpartition(".")[0])
            raise AlpaError(
                f"{left[0]} was built on the meta device, and nothing says what its values are "
                f"({type(owner).__name__} has no reset_parameters; {len(left)} such tensors)",
                "build the module in configure_model, which is recorded and needs no"
                " `torch.device('meta')`, or give "
                f"{type(owner).__name__} a reset_parameters method",
            )

    def _uninitialised(self, module: nn.Module) -> list[str]:
        """Names of parameters and buffers on the meta device whose values nothing says."""
        assert self._recorder is not None
        said, tensors = (
            self._recorder.is_deferred,
            (*module.named_parameters(), *module.named_buffers()),
        )
        return [name for name, t in tensors if t.is_meta and t not in self._loaded and not said(t)]

    def _make_others(self, module: nn.Module) -> None:
        """Buffers, and tensors that are plain attributes, are whole on every rank."""
        made: dict[int, Tensor] = {}
        recorder = self._recorder
        assert recorder is not None

        def real(tensor: Tensor) -> Tensor:
            if isinstance(tensor, nn.Parameter) or not recorder.is_deferred(tensor):
                return tensor
            if id(tensor) not in made:
                made[id(tensor)] = self._whole(tensor)
            return made[id(tensor)]

        for child in module.modules():
            # Its dict of buffers is one of them.
            for name, value in list(vars(child).items()):
                leaves = (
                    pytree.tree_leaves(value)
                    if isinstance(value, Tensor | list | tuple | dict)
                    else ()
                )
                if any(isinstance(leaf, Tensor) and real(leaf) is not leaf for leaf in leaves):
                    child.__dict__[name] = pytree.tree_map_only(Tensor, real, value)


def is_on_meta(module: nn.Module | None) -> bool:
    """Whether a parameter or buffer of the module has no memory."""
    return module is not None and any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def move_real_tensors(module: nn.Module, device: torch.device) -> None:
    """`module.to(device)`, without what is on the meta device."""
    if is_on_meta(module):
        # What `self.device` gives.
        _update_properties(module, device=device)
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        module.to(device)


def stays_sharded(run: Any) -> bool:
    """Whether the module has to leave a training in shards, because it does not fit whole (with a
    word about it).
    """
    against = run.no_room_for_release()
    if against is not None:
        rank_zero_info(
            f"alpa: the module stays in shards after training: {against}. This trainer saves and"
            " evaluates it as before"
        )
    return against is not None


def _agree(recorder: Recorder) -> None:
    """Every rank takes rank 0's random numbers, as DDP takes its parameters. Collective."""
    if world_size() == 1 or not recorder.lines:
        return
    if len(set(all_gather_object(recorder.digest()))) > 1:
        raise RuntimeMismatchError(
            "the ranks initialise their modules differently", "build the same module on every rank"
        )
    own = recorder.rank_dependent()
    if len(set(all_gather_object(tuple(int(digest(tensor)) for tensor in own)))) > 1:
        first = broadcast_object(own if dist.get_rank() == 0 else None)
        for tensor, of_first in zip(own, first, strict=True):
            tensor.data.copy_(of_first)
