"""Contexts of a sharded module: with full parameters (user code, checkpoints), or shapes (capture).

Hooks of users and callbacks that read parameters or gradients see full ones, as on one device.
Everywhere else in a training the module's parameters are this device's shards. Hooks that read them
are found in advance, by the names in their code, so that all ranks decide alike. Changes that a
hook makes are written back into the shards. The Trainer's precision plugin clips by the norm of the
full gradients, and reaches consensus on overflow, without gathering them.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.capture.python_state import patched
from alpa_strategy.comm.collectives import any_rank, world_size
from alpa_strategy.errors import AlpaError, SetupError
from alpa_strategy.hook_points import GatherOnUse
from alpa_strategy.ir.user_code import functions_of, is_user_code, mentioned_names
from alpa_strategy.lightning.checks import AFTER_BACKWARD, is_overridden, names_in, own_hooks
from alpa_strategy.runtime.parameters import ParameterStore
from alpa_strategy.runtime.sharded_parameter import set_data


class FullParameters:
    """Context in which the module has full parameters; changes to them persist. Reentrant.

    Args:
        store: the module's sharded parameters.
    """

    def __init__(self, store: ParameterStore) -> None:
        self.store = store

        # Parameter, its shard, its gradient's shard, while the parameters are full.
        self._shards: list[tuple[nn.Parameter, Tensor, Tensor | None]] = []

        # Address of the gathered data of each parameter; another address means replaced data.
        self._gathered: dict[nn.Parameter, int] = {}

        # Functions that write replaced data into the shards after the backward.
        self._replaced: list[Callable[[], None]] = []

        self.is_entered = False

        # While one of these is active, accesses of the module's parameters gather them.
        self.on_use: list[GatherOnUse] = []

        # Called before a gather: hooks of a checkpoint may still wait for other ranks.
        self.before_gather: Callable[[], None] = lambda: None

    @property
    def is_active(self) -> bool:
        """Whether the module has full parameters now."""
        if self.is_entered:
            return True

        return any(fully_shard.is_active for fully_shard in self.on_use)

    @contextmanager
    def entered(
        self, with_gradients: bool = False, awaits_backward: bool = False
    ) -> Iterator[None]:
        """Context with full parameters. Collective, unless the module is full already. After an
        exception in it, changes are dropped.

        Args:
            with_gradients: unshard gradients as well, unless the module is full already.
            awaits_backward: the forward is over and the backward is not. The backward still uses
                the forward's values, unless these are changed in place (`p.data = ...` replaces
                them).
        """
        # The outermost context writes the changes back.
        if self.is_active:
            yield
            return
        self._gather(with_gradients)
        self.is_entered = True
        try:
            yield
            self._write_back(with_gradients, awaits_backward)
        finally:
            self.is_entered = False
            _set_tensors(self._shards)
            self._shards = []

    def suspended(self, is_stepping: bool = False) -> AbstractContextManager[None]:
        """Return a context with the shards again, with all changes made so far; enter it at once.

        Args:
            is_stepping: parameters and gradients may change in the context. They are re-gathered
                at its end, which is then collective.
        """
        for fully_shard in self.on_use:
            if fully_shard.is_active:
                return fully_shard.suspended()

        is_idle = not self.is_entered and not self._shards
        return nullcontext() if is_idle else self._suspended(is_stepping)

    @contextmanager
    def _suspended(self, is_stepping: bool) -> Iterator[None]:
        """Context in which parameters are shards again, if they were full.

        Args:
            is_stepping: whether the optimizer steps in it; full parameters are gathered anew after
                it.
        """
        self._write_back(is_stepping)

        was_entered = self.is_entered
        shards = self._shards
        full = [(parameter, parameter.data, parameter.grad) for parameter, _, _ in shards]
        self.is_entered = False
        self._shards = []
        _set_tensors(shards)

        is_gathered = False
        try:
            yield
            if was_entered and is_stepping:
                is_gathered = True
                self._gather(with_gradients=True)
        finally:
            self.is_entered = was_entered
            if not is_gathered:
                self._shards = shards
                _set_tensors(full)

    def _gather(self, with_gradients: bool) -> None:
        """Give every parameter its full data, and its full gradient if `with_gradients`. The shards
        are kept for `_write_back`. Collective.
        """
        self.before_gather()
        store = self.store
        # The training needs the gathered tensors later: they must not be inference tensors if this
        # runs within a validation.
        with torch.inference_mode(False), torch.no_grad():
            shards = [(p, p.data, p.grad) for p in store.sharded_parameters]
            has_gradient = [False] * len(shards)
            if with_gradients:
                has_gradient = any_rank([grad is not None for _, _, grad in shards])

            for (parameter, shard, grad), has_any in zip(shards, has_gradient, strict=True):
                full = store.gather_like(parameter, shard)
                full_grad = None
                if has_any:
                    full_grad = self._full_gradient(parameter, shard, grad)
                elif with_gradients:
                    full_grad = self._gradient_summed_later(parameter, full.shape)

                # A gradient must have the shape of its parameter's data.
                parameter.grad = None
                parameter.data = full
                parameter.grad = full_grad

        self._shards = shards
        self._gathered = {parameter: parameter.data.data_ptr() for parameter, _, _ in shards}

    def _full_gradient(self, parameter: nn.Parameter, shard: Tensor, grad: Tensor | None) -> Tensor:
        """Gather a gradient; ranks without one contribute zeros. Collective."""
        if grad is None:
            grad = torch.zeros_like(shard)
        return self.store.gather_like(parameter, grad)

    def _gradient_summed_later(self, parameter: nn.Parameter, shape: torch.Size) -> Tensor | None:
        """Return this rank's gradient that the ranks have not summed yet, in the full shape; None
        if there is none.
        """
        copy = self.store.summed_later(parameter)
        if copy is None or copy.grad is None:
            return None
        return copy.grad.view(shape)

    def _write_back(self, with_gradients: bool, awaits_backward: bool = False) -> None:
        """Write changes of the full tensors into the shards. No communication.

        With `awaits_backward`, data that replaced a parameter's is written by `end_of_backward`.

        Args: as of `entered`.
        """
        store = self.store
        with torch.inference_mode(False), torch.no_grad():
            for i, (parameter, shard, grad) in enumerate(self._shards):
                if not store.holds(parameter):
                    continue

                write = partial(self._write_parameter, parameter, parameter.data, shard)
                is_replaced = parameter.data.data_ptr() != self._gathered[parameter]
                if awaits_backward and is_replaced:
                    self._replaced.append(write)
                else:
                    write()

                if with_gradients:
                    new_grad = self._shard_of_gradient(parameter, grad)
                    self._shards[i] = (parameter, shard, new_grad)

    def _shard_of_gradient(self, parameter: nn.Parameter, grad: Tensor | None) -> Tensor | None:
        """Return the shard of the full gradient in `parameter.grad`; None if there is none.

        A gradient that the ranks sum later is stored in the copy that collects it; then None.

        Args:
            grad: the shard of the gradient before it was gathered.
        """
        full_grad = parameter.grad
        copy = self.store.summed_later(parameter) if grad is None else None
        if copy is not None:
            copy.grad = None if full_grad is None else full_grad.view(copy.shape)
            return None
        return None if full_grad is None else self.store.shard_like(parameter, full_grad)

    def _write_parameter(self, parameter: nn.Parameter, full: Tensor, shard: Tensor) -> None:
        """Write `full`, the value of a parameter, back into `shard` where it differs."""
        # Unchanged shards are not written: that would count as a change between forward and
        # backward.
        if not torch.equal(self.store.shard_like(parameter, full), shard):
            self.store.load_full(parameter, full, shard)
        for fully_shard in self.on_use:
            fully_shard.load_full(parameter, full)

    def end_of_backward(self) -> None:
        """Write data that replaced parameters before the backward into the shards."""
        if not self._replaced:
            return
        with torch.no_grad():
            for write in self._replaced:
                write()
        self._replaced.clear()


@contextmanager
def shapes_only(store: ParameterStore) -> Iterator[None]:
    """Context in which parameters have their full shapes, sharded ones with memory for one element
    each.

    This is enough for capture.
    """
    shards = [(parameter, parameter.data) for parameter in store.parameters]
    with torch.inference_mode(False), torch.no_grad():
        for parameter, data in shards:
            shape = store.full_shape(parameter)
            if data.shape != shape:
                # Strides of 0.
                parameter.data = data.new_zeros(()).expand(shape)
    try:
        yield
    finally:
        set_data(shards)


def _set_tensors(tensors: list[tuple[nn.Parameter, Tensor, Tensor | None]]) -> None:
    """Set data and gradient of parameters.

    Args:
        tensors: (parameter, its data, its gradient).
    """
    for parameter, _, _ in tensors:
        # The new data may have another shape than the old gradient.
        parameter.grad = None
    set_data((parameter, data) for parameter, data, _ in tensors)
    for parameter, _, grad in tensors:
        parameter.grad = grad


_GRADIENT_HOOKS = (*AFTER_BACKWARD, "on_before_zero_grad")
_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    *_GRADIENT_HOOKS,
    "on_train_batch_end",
)
_HOOKS = (
    *_STEP_HOOKS,
    *(name for name in dir(Callback) if name.startswith(("on_train_epoch_", "on_validation_"))),
    "lr_scheduler_step",
    "on_save_checkpoint",
    "on_train_end",
)
# Lightning's callbacks that read parameters.
_LOOKING = (WeightAveraging, StochasticWeightAveraging)
_PARAMETER_WORDS = re.compile(
    r"(^|_)(param(eter)?s?|weights?|bias(es)?|grads?|gradients?|state_dict|deepcopy)(_|$)"
)
_NOT_PARAMETERS = {
    "param_groups",
    "add_param_group",
    "gradient_clip_val",
    "gradient_clip_algorithm",
}


def unshard_for_hooks(
    module: LightningModule, full_parameters: FullParameters, fits: Callable[[bool], str | None]
) -> AbstractContextManager[None]:
    """Return a context of a running training, in which hooks that read parameters see full ones.
    Rank 0 warns if that is at every step.

    Args:
        module: the training's module.
        full_parameters: its full parameters.
        fits: returns None if full parameters (with argument True: and gradients) fit into memory in
            addition to the training, else the reason.

    Raises:
        AlpaError: they do not fit, and a callback needs them.
    """
    hooks = []
    for owner, name in own_hooks(module, _HOOKS):
        if _reads_parameters(getattr(owner, name), module) and _gets_full(owner, name, fits):
            hooks.append((owner, name))

    every_step = [f"{type(owner).__name__}.{name}" for owner, name in hooks if name in _STEP_HOOKS]
    if every_step:
        rank_zero_warn(
            f"alpa: {', '.join(every_step)} may look at parameters or gradients: they are gathered"
            " for it at every step, which costs time and memory. Hooks that need no full parameters"
            " are faster if they name none"
        )

    patches: list[Any] = [
        (owner, name, _with_full_parameters(owner, name, full_parameters)) for owner, name in hooks
    ]
    for optimizer in module.trainer.optimizers:
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            # Classes that hold other optimizers may have none.
            registry = getattr(optimizer, name, {})
            readers = {i: hook for i, hook in registry.items() if _reads_parameters(hook, module)}
            if not readers or not _gets_full(optimizer, "optimizer_step", fits):
                continue
            for number, hook in readers.items():
                patches.append(
                    (registry, number, full_parameters.entered(with_gradients=True)(hook))
                )
    return patched(patches)


def _with_full_parameters(
    owner: Any, name: str, full_parameters: FullParameters
) -> Callable[..., Any]:
    """Return a function that calls the hook `name` of `owner` with full parameters."""
    hook = getattr(owner, name)
    # The hook may call its closure, which runs the step and its backward on shards.
    if name == "optimizer_step":
        hook = partial(_with_closure, hook, full_parameters)

    sees_gradients = name in _GRADIENT_HOOKS or "grad" in names_in([(owner, name)])
    awaits_backward = name in ("on_before_backward", "on_before_zero_grad")
    return full_parameters.entered(sees_gradients, awaits_backward)(hook)


def _with_closure(
    hook: Callable[..., Any], full_parameters: FullParameters, *args: Any, **kwargs: Any
) -> Any:
    """Call an `optimizer_step`, whose closure (the last argument) runs on shards."""
    *others, closure = args

    @wraps(closure)
    def closure_on_shards() -> Any:
        with full_parameters.suspended(is_stepping=True):
            return closure()

    return hook(*others, closure_on_shards, **kwargs)


def _gets_full(owner: Any, name: str, fits: Callable[[bool], str | None]) -> bool:
    """Whether full parameters fit into memory for the hook `name` of `owner`; else the user is
    warned.

    Args:
        fits: as of `unshard_for_hooks`.

    Raises:
        AlpaError: the hook is a callback's that cannot work without them.
    """
    against = fits(name in _GRADIENT_HOOKS)
    if against is None:
        return True

    if isinstance(owner, _LOOKING):
        raise AlpaError(
            f"{type(owner).__name__} needs full parameters, and {against}",
            "remove the callback, or work on the checkpoints afterwards",
        )
    rank_zero_warn(
        f"alpa: {type(owner).__name__}.{name} may look at parameters or gradients; full ones do not"
        " fit on a device, so it sees its shards"
    )
    return False


def check_backward(module: LightningModule) -> None:
    """Check that the module's own `backward` does not read gradients: they are summed after it.

    Raises:
        SetupError: by the names in its code it may.
    """
    is_own = is_overridden(module, "backward", LightningModule)
    if is_own and _reads_parameters(module.backward, module):
        raise SetupError(
            f"{type(module).__name__}.backward works on gradients, which are complete only after"
            " it",
            "do it in on_after_backward or configure_gradient_clipping",
        )


def _reads_parameters(hook: Callable[..., Any], module: nn.Module) -> bool:
    """Whether a hook, of the module, a callback or an optimizer, may read parameters."""
    owner = getattr(hook, "__self__", None)
    # BaseFinetuning compares parameters by value, and shards of two parameters may be equal.
    if isinstance(owner, (*_LOOKING, BaseFinetuning)):
        return True
    # Most hooks are Lightning's.
    if not is_user_code(hook):
        return False

    names = set(mentioned_names(hook))
    attributes = {**getattr(owner, "__dict__", {}), **getattr(owner, "_modules", {})}
    # Functions of the owner's attributes: `self.ema.update(self.net)`, `self.ema(self.net)`.
    called = {*names, "forward", "__call__"}
    for name in names & attributes.keys():
        for function in functions_of(attributes[name], called):
            names.update(mentioned_names(function))

    # Parameters by their attribute: `self.gamma`.
    parameter_names = {path.rpartition(".")[2] for path, _ in module.named_parameters()}
    for name, value in attributes.items():
        if isinstance(value, nn.Parameter):
            parameter_names.add(name)
    if not parameter_names.isdisjoint(names):
        return True

    return any(_PARAMETER_WORDS.search(name) for name in names - _NOT_PARAMETERS)


# Clipping over shards


def use_whole_norms(plugin: Any, full_parameters: FullParameters) -> AbstractContextManager[None]:
    """Return a context in which `plugin` clips by the norm of the full gradients.

    If it scales gradients, the ranks reach consensus on overflow. A user's own plugin works as
    well: only these two methods are replaced, on the object.
    """

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        parameters = plugin.main_params(optimizer)
        # A hook with full gradients clips them itself.
        if full_parameters.is_entered:
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)
        else:
            clip_by_norm(full_parameters.store, float(clip_val), parameters)

    patches: list[tuple[Any, str, Any]] = [(plugin, "clip_grad_by_norm", clip)]
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        patches.append(
            (scaler, "_unscale_grads_", partial(_unscale_and_agree, scaler._unscale_grads_))
        )
    return patched(patches)


def _unscale_and_agree(
    unscale: Callable[..., dict[torch.device, Tensor]],
    optimizer: Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    """Run a scaler's `unscale`; the overflow of any rank counts on all, so that scales stay equal.
    Collective.

    torch's ShardedGradScaler does the same, but needs gradients on every rank. Also, torch's scaler
    copies its scale to gradients in host memory without waiting for the copy.

    Args:
        unscale: torch's `GradScaler._unscale_grads_`, whose arguments the others are.

    Returns:
        Device -> flag of overflow: 1.0 if any rank's gradients have inf or nan.
    """
    device = found_inf.device
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(p.device == device for p in parameters):
        inv_scale = inv_scale.cpu()
        found_inf = found_inf.cpu()

    flags_by_device = unscale(optimizer, inv_scale, found_inf, allow_fp16)
    flags = [flag.to(device) for flag in (found_inf, *flags_by_device.values())]
    overflow = torch.stack(flags).amax()
    if world_size() > 1:
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
    return {device: overflow}


def clip_by_norm(
    store: ParameterStore, max_norm: float, parameters: Iterable[nn.Parameter]
) -> Tensor:
    """Scale gradients in place so that their norm as one vector is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_` on the full gradients: every element counts once. The norm
    has the same bits on every device, so that all devices clip alike. Collective over the mesh.

    Args:
        store: the module's parameters.
        max_norm: largest norm.
        parameters: parameters with these gradients, the same on all devices (an optimizer's).

    Returns:
        The norm before clipping, in float64.
    """
    clipped = tuple(parameters)
    norm = gradient_norm(store, clipped)
    torch.nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
    return norm


def gradient_norm(
    store: ParameterStore, parameters: Iterable[nn.Parameter], norm_type: float = 2.0
) -> Tensor:
    """Return the norm of the full gradients as one vector, in float64.

    It has the same bits on every device. Collective over the mesh.

    Args:
        store: the module's parameters.
        parameters: parameters with these gradients, the same on all devices.
        norm_type: order of the norm; infinity: the largest absolute value.
    """
    # Collectives need the mesh's device; some gradients may be in host memory.
    device = store.device
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for parameter in parameters:
        grad = parameter.grad
        if grad is None or not grad.numel() or not store.counts_here(parameter):
            continue
        dtype = torch.promote_types(grad.dtype, torch.float32)
        norm = torch.linalg.vector_norm(grad.detach(), norm_type, dtype=dtype)
        norms.append(norm.double().to(device))

    local_norms = torch.stack(norms)
    if math.isinf(norm_type):
        return store.mesh.all_devices.all_reduce(local_norms.amax(), "max")

    total = store.mesh.all_devices.all_reduce(local_norms.pow(norm_type).sum())
    return total.pow(1 / norm_type)
