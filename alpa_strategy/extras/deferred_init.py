"""A module that was built without memory, from `configure_model` to the first training batch.

The strategy records the ops that build and fill the module (`recording/recorder.py`). No tensor is
made until there is a plan, which decides the shards of each parameter. Then parameters are made one
after the other, sharded, and the rest is freed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from alpa_strategy.checkpoint.tensors import Chunk, read_chunks
from alpa_strategy.comm.collectives import (
    all_gather_object,
    any_rank,
    broadcast_object,
    on_all_ranks,
    world_size,
)
from alpa_strategy.errors import AlpaError, RuntimeMismatchError
from alpa_strategy.hook_points import HOST_ALLOCATOR
from alpa_strategy.lightning.digests import digest
from alpa_strategy.lightning.module_init import ModuleInit, is_on_meta
from alpa_strategy.recording.boxes import read_into
from alpa_strategy.recording.recorder import Recorder
from alpa_strategy.runtime.parameters import ParameterStore

RESETS = ("reset_parameters", "_reset_parameters")


class DeferredInit(ModuleInit):
    """The deferred tensors of a module that was built without memory. Most modules have none."""

    def __init__(self) -> None:
        # Whether the module of the running training was built without memory.
        self.was_needed = False

        # This rank's device.
        self._device = torch.device("cpu")

        # Records ops, as long as tensors are deferred.
        self._recorder: Recorder | None = None

        # Parameter -> its tensor in a checkpoint, from which the shard is read.
        self._loaded: dict[nn.Parameter, Tensor] = {}

        # Parameter with a placeholder -> its deferred tensor.
        self._waiting: dict[nn.Parameter, Tensor] = {}

        # Sharded parameter without values -> its deferred tensor, which files have. Its shards are
        # read with `read_shards`.
        self._unread: dict[nn.Parameter, Tensor] = {}

    @property
    @override
    def is_pending(self) -> bool:
        """Whether there are deferred tensors."""
        return self._recorder is not None

    @override
    def begin(self, device: torch.device) -> None:
        """Start to record the ops that build a module; `device`: this rank's. Does nothing while it
        records.
        """
        if self._recorder is not None:
            return

        allocator = HOST_ALLOCATOR.extra
        if allocator is not None and device.type == "cpu":
            # Random ops run, to advance the generators. Their freed blocks must go back to the
            # system: together they are as large as the model.
            allocator.keep_freed(False)
        self._device = device
        self._recorder = Recorder(device)

    @override
    def recording(self) -> AbstractContextManager[None]:
        """Return a context that defers large tensors and records ops on them.

        It does nothing unless `begin` was called.
        """
        return nullcontext() if self._recorder is None else self._recorder.recording()

    @override
    def before_loading(self, module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
        """Make deferred buffers and plain tensors, and allocate the other buffers on the meta
        device that a checkpoint will fill; parameters stay deferred.
        """
        self._make_others(module)
        for prefix, child in module.named_modules():
            for name, buffer in child._buffers.items():
                path = f"{prefix}.{name}".removeprefix(".")
                if buffer is not None and buffer.is_meta and path in state_dict:
                    child._buffers[name] = torch.empty_like(buffer, device=self._device)

    @override
    def settle(
        self,
        trainer: Any,
        module: nn.Module,
        loaded: Mapping[str, Tensor],
        fits: Callable[[nn.Module], bool],
    ) -> None:
        """Determine the values of all deferred tensors, equal on all ranks, before a run.

        Buffers are made now, and parameters as well if the module will not be sharded. Does nothing
        if no ops were recorded. Collective.

        If parameters are to be made in shards, the Trainer's sanity check is switched off
        (`num_sanity_val_steps = 0`), and rank 0 logs that.

        Args:
            trainer, module: of the run.
            loaded: name -> tensor of a checkpoint, for parameters whose shards are read later.
            fits: whether the full module fits on one device; then it is sharded for training alone.

        Raises:
            AlpaError: a parameter or buffer on the meta device has no values, and its module no
                method to make them; or a parameter was changed in place after it was recorded.
            RuntimeMismatchError: the ranks have recorded different ops.
        """
        if self._recorder is None:
            return

        self._loaded = {module.get_parameter(name): tensor for name, tensor in loaded.items()}
        # No rank needs the others' results, only their errors.
        on_all_ranks(partial(self._reset, module), lambda _: None)
        self._leave_files(module)
        self._recorder.draw((*module.parameters(), *module.buffers()))
        _synchronize(self._recorder)
        self._make_others(module)

        is_training = trainer.state.fn == TrainerFn.FITTING
        if not is_on_meta(module) or world_size() == 1:
            stays_full = True
        else:
            stays_full = not is_training and fits(module)
        if stays_full:
            self._put_placeholders(module)
            self._finish()
        elif is_training and trainer.num_sanity_val_steps and trainer.enable_validation:
            trainer.num_sanity_val_steps = 0
            rank_zero_info(
                "alpa: no sanity check before training: parameters are made in shards, and the plan"
                " for them is made with the first training batch"
            )

    @override
    def whole_values(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict in which the deferred tensors are made."""
        values = {}
        for key, value in state.items():
            values[key] = self._full(value) if isinstance(value, Tensor) else value
        return values

    @override
    @contextmanager
    def sharding(self, module: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
        """Context in which the module is sharded.

        Its value is a function that returns the full tensor of a parameter or of optimizer state;
        `Tensor.detach` if nothing is deferred. AlpaError if a parameter was changed in place
        before.
        """
        if self._recorder is None:
            yield Tensor.detach
            return

        self._put_placeholders(module)
        yield self._full
        self._finish()
        self.was_needed = True

    def _put_placeholders(self, module: nn.Module) -> None:
        """Give deferred parameters their real device, dtype and shape, still without memory.

        After this, `data` may be set. The Parameter objects stay the same.

        Raises:
            AlpaError: a parameter was changed in place after it was built without memory.
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

            zero = torch.zeros((), dtype=parameter.dtype, device=self._device)
            placeholder = zero.expand(parameter.shape)
            other = nn.Parameter(placeholder, requires_grad=parameter.requires_grad)
            # Optimizers, callbacks and tied modules refer to this Parameter object, so only its
            # implementation is swapped. `data = ...` cannot leave the meta device, and
            # `torch.utils.swap_tensors` refuses tensors with weak references (nn.LSTM).
            torch._C._swap_tensor_impl(parameter, other)
            self._waiting[parameter] = other.detach()

    def _full(self, tensor: Tensor) -> Tensor:
        """Return the full parameter or state tensor on this rank's device; make it if deferred.

        A parameter whose shard will be read from a file is returned without values.
        """
        if isinstance(tensor, nn.Parameter):
            if tensor in self._loaded or self._is_in_files(tensor):
                return torch.empty((), dtype=tensor.dtype, device=self._device).expand(tensor.shape)
            tensor = self._waiting.get(tensor, tensor)
        if self._recorder is None or not tensor.is_meta:
            return tensor.detach()
        return self._recorder.materialize(tensor.detach()).to(self._device)

    def _is_in_files(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's values are read from mapped files, at least in part."""
        deferred = self._waiting.get(parameter)
        if self._recorder is None or deferred is None:
            return False
        return bool(self._recorder.sources_of(deferred))

    def _finish(self) -> None:
        """Make the parameters that were not sharded (no plan, or unused), and drop the record
        unless shards are read later. CheckpointError if a file cannot be read.
        """
        for parameter, deferred in self._waiting.items():
            # Strides of 0: a placeholder, or a parameter that `_full` returned without values.
            if any(parameter.stride()):
                if parameter not in self._loaded and self._is_in_files(parameter):
                    self._unread[parameter] = deferred
                continue

            full = self._full(parameter)
            if parameter in self._loaded:
                full = full.contiguous()
                read_chunks(self._loaded[parameter], [Chunk((0,) * full.dim(), full)])
            elif self._is_in_files(parameter):
                full = full.contiguous()
                self._read(deferred, [Chunk((0,) * full.dim(), full)])
            parameter.data = full
        self._waiting.clear()
        self._loaded.clear()
        if not self._unread:
            self._recorder = None

    @override
    def read_shards(self, store: ParameterStore) -> None:
        """Read the shards of parameters whose values are in files. Does nothing if no rank has any.
        Collective.

        Args:
            store: of the parameters, which are sharded.

        Raises:
            CheckpointError: a file cannot be read, on any rank.
        """
        # Shards of a stage may need no file while those of another do.
        if not any_rank([self._recorder is not None])[0]:
            return

        def read() -> None:
            for parameter, deferred in self._unread.items():
                self._read(deferred, store.chunks(parameter, parameter.detach()))

        on_all_ranks(read, lambda _: None)
        # Copies that were gathered before have other values.
        store.after_optimizer_step()
        self._unread.clear()
        self._recorder = None

    def _read(self, deferred: Tensor, chunks: Sequence[Chunk]) -> None:
        """Read boxes of a deferred tensor into the chunks' memory."""
        assert self._recorder is not None
        for chunk in chunks:
            read_into(self._recorder, deferred, chunk.offsets, chunk.tensor)

    def _reset(self, module: nn.Module) -> None:
        """Reset the modules on the meta device whose initialisation was not recorded.

        They are reset in the order of the module tree.

        Raises:
            AlpaError: a module has no method for it.
        """
        missing = set(self._uninitialised(module))
        for prefix, child in module.named_modules():
            names = {
                *dict(child.named_parameters(prefix, recurse=False)),
                *dict(child.named_buffers(prefix, recurse=False)),
            }
            if missing.isdisjoint(names):
                continue
            resets = [getattr(child, name, None) for name in RESETS]
            callables = [reset for reset in resets if callable(reset)]
            if callables:
                with self.recording():
                    callables[0]()

        remaining = self._uninitialised(module)
        if remaining:
            first = remaining[0]
            owner = type(module.get_submodule(first.rpartition(".")[0])).__name__
            raise AlpaError(
                f"{first} was built on the meta device and has no values ({owner} has no"
                f" reset_parameters; {len(remaining)} such tensors)",
                "build the module in configure_model, which is recorded and needs no"
                f" `torch.device('meta')`, or give {owner} a reset_parameters method",
            )

    def _uninitialised(self, module: nn.Module) -> list[str]:
        """Return the names of parameters and buffers on the meta device without recorded values,
        other than those that a checkpoint has.
        """
        assert self._recorder is not None
        names = []
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not tensor.is_meta or tensor in self._loaded:
                continue
            if not self._recorder.is_deferred(tensor):
                names.append(name)
        return names

    def _leave_files(self, module: nn.Module) -> None:
        """Copy small tensors that are views of mapped files, which may change later."""
        assert self._recorder is not None
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta and self._recorder.files.of(tensor) is not None:
                tensor.data = tensor.data.clone()

    def _make_others(self, module: nn.Module) -> None:
        """Make deferred buffers, and deferred tensors in plain attributes and their lists, tuples
        and dicts: these are full on every rank.
        """
        full_tensors: dict[int, Tensor] = {}
        recorder = self._recorder
        assert recorder is not None

        def real(tensor: Tensor) -> Tensor:
            if isinstance(tensor, nn.Parameter) or not recorder.is_deferred(tensor):
                return tensor
            if id(tensor) not in full_tensors:
                full_tensors[id(tensor)] = self._full(tensor)
            return full_tensors[id(tensor)]

        for child in module.modules():
            # The dict of buffers is one of these attributes.
            for name, value in list(vars(child).items()):
                if not isinstance(value, Tensor | list | tuple | dict):
                    continue
                tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
                if any(real(tensor) is not tensor for tensor in tensors):
                    child.__dict__[name] = pytree.tree_map_only(Tensor, real, value)


def _synchronize(recorder: Recorder) -> None:
    """Set the random numbers of all ranks to rank 0's, as DDP does with parameters. Collective.

    Raises:
        RuntimeMismatchError: the ranks have recorded different ops.
    """
    if world_size() == 1 or not recorder.lines:
        return

    if len(set(all_gather_object(recorder.digest()))) > 1:
        raise RuntimeMismatchError(
            "the ranks initialise their modules differently", "build the same module on every rank"
        )

    random_tensors = recorder.rank_dependent()
    digests = tuple(int(digest(tensor)) for tensor in random_tensors)
    if len(set(all_gather_object(digests))) > 1:
        of_rank_zero = broadcast_object(random_tensors if dist.get_rank() == 0 else None)
        for tensor, source in zip(random_tensors, of_rank_zero, strict=True):
            tensor.data.copy_(source)
