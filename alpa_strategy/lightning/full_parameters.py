"""The module with whole parameters for a while (user code, checkpoints), or with nothing but their
shapes (capture).

Hooks of users and callbacks that look at parameters or gradients see whole ones, as on one device.
Everywhere else in a training the module's parameters are this device's parts. Which hooks look is
decided before, by what their code mentions, so that all ranks decide alike; what a hook changes
goes back into the parts. The Trainer's precision plugin clips by the norm of whole gradients, and
agrees on overflow, without having them whole.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
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
from alpa_strategy.ir.user_code import functions_of, is_user_code, mentioned_names
from alpa_strategy.lightning.checks import AFTER_BACKWARD, is_overridden, names_in, own_hooks
from alpa_strategy.runtime.eager_fully_shard import EagerFullyShard, set_data
from alpa_strategy.runtime.parameters import ParameterStore


class FullParameters:
    """Context in which the module holds whole parameters; changes to them are kept. May be entered
    again inside.
    """

    def __init__(self, store: ParameterStore) -> None:
        self.store = store
        # Parameter, its part, its gradient's part.
        self._parts: list[tuple[nn.Parameter, Tensor, Tensor | None]] = []
        # Where the data lies that a parameter was given.
        self._gathered: dict[nn.Parameter, int] = {}
        # What brings data into the parts, after the backward.
        self._replaced: list[Callable[[], None]] = []
        self.is_entered = False
        # As long as one is active, parameters are as good as whole.
        self.on_use: list[EagerFullyShard] = []
        # Called before the ranks gather, where hooks of a checkpoint may still wait for others.
        self.before_gather: Callable[[], None] = lambda: None

    @property
    def is_active(self) -> bool:
        """Whether the module holds whole parameters now."""
        return self.is_entered or any(each.is_active for each in self.on_use)

    @contextmanager
    def entered(
        self, with_gradients: bool = False, awaits_backward: bool = False
    ) -> Iterator[None]:
        """The context. Collective, unless the module is whole already.

        Args:
            with_gradients: gradients are whole in it as well, unless the module is whole already.
            awaits_backward: of a step whose forward is over: it uses what the forward did, unless
                that is changed in place (`p.data = ...` leaves it alone).
        """
        # The first to enter takes what is changed.
        if self.is_active:
            yield
            return
        self._gather(with_gradients)
        self.is_entered = True
        try:
            yield
            self._take_changes(with_gradients, awaits_backward)
        finally:
            self.is_entered = False
            _put(self._parts)
            self._parts = []

    def suspended(self, is_stepping: bool = False) -> AbstractContextManager[None]:
        """To be entered at once. As outside of this context, what was changed so far included: for a checkpoint that is
        saved inside.

        is_stepping: gradients and values may be others afterwards, which are then whole. Collective
        in the context.
        """
        for each in self.on_use:
            if each.is_active:
                return each.suspended()
        is_idle = not self.is_entered and not self._parts
        return nullcontext() if is_idle else self._suspended(is_stepping)

    @contextmanager
    def _suspended(self, is_stepping: bool) -> Iterator[None]:
        self._take_changes(is_stepping)
        is_entered, parts, is_renewed = self.is_entered, self._parts, False
        whole = [(parameter, parameter.data, parameter.grad) for parameter, _, _ in parts]
        self.is_entered, self._parts = False, []
        _put(parts)
        try:
            yield
            if is_renewed := is_entered and is_stepping:
                self._gather(with_gradients=True)
        finally:
            self.is_entered = is_entered
            if not is_renewed:
                self._parts = parts
                _put(whole)

    def _gather(self, with_gradients: bool) -> None:
        self.before_gather()
        store = self.store
        # Under inference mode (validation) the gathered tensors would be unfit for the training
        # that goes on later.
        with torch.inference_mode(False), torch.no_grad():
            parts = [(p, p.data, p.grad) for p in store.sharded_parameters]
            has_gradient = [grad is not None for _, _, grad in parts]
            has_gradient = any_rank(has_gradient) if with_gradients else [False] * len(parts)
            for (parameter, part, grad), present in zip(parts, has_gradient, strict=True):
                whole, whole_grad = store.gather_like(parameter, part), None
                if present:
                    whole_grad = store.gather_like(
                        parameter, torch.zeros_like(part) if grad is None else grad
                    )
                elif with_gradients and (copy := store.summed_later(parameter)) is not None:
                    whole_grad = None if copy.grad is None else copy.grad.view(whole.shape)
                # A gradient must have its parameter's shape.
                parameter.grad, parameter.data = (
                    None,
                    whole,
                )
                parameter.grad = whole_grad
        self._parts, self._gathered = parts, {p: p.data.data_ptr() for p, _, _ in parts}

    def _take_changes(self, with_gradients: bool, awaits_backward: bool = False) -> None:
        """Bring what was changed in the whole tensors into the parts. No communication."""
        store = self.store
        with torch.inference_mode(False), torch.no_grad():
            for i, (parameter, part, grad) in enumerate(self._parts):
                if not store.holds(parameter):
                    continue
                take = partial(self._take, parameter, parameter.data, part)
                is_replaced = parameter.data.data_ptr() != self._gathered[parameter]
                self._replaced.append(take) if awaits_backward and is_replaced else take()
                if with_gradients:
                    whole = parameter.grad
                    if grad is None and (copy := store.summed_later(parameter)) is not None:
                        copy.grad, whole = None if whole is None else whole.view(copy.shape), None
                    self._parts[i] = (
                        parameter,
                        part,
                        None if whole is None else store.shard_like(parameter, whole),
                    )

    def _take(self, parameter: nn.Parameter, whole: Tensor, part: Tensor) -> None:
        # Only what changed is written: a step between forward and backward must find its parameters
        # untouched.
        if not torch.equal(self.store.shard_like(parameter, whole), part):
            self.store.take_whole(parameter, whole, part)
        for each in self.on_use:
            each.take_whole(parameter, whole)

    @torch.no_grad()
    def end_of_backward(self) -> None:
        """What replaced parameters before it takes their place."""
        for take in self._replaced:
            take()
        self._replaced.clear()


@contextmanager
def shapes_only(store: ParameterStore) -> Iterator[None]:
    """The module with parameters of their whole shapes that hold one element each: enough for
    capture, and free.
    """
    shards = [(parameter, parameter.data) for parameter in store.parameters]
    with torch.inference_mode(False), torch.no_grad():
        for parameter, data in shards:
            shape = store.whole_shape(parameter)
            if data.shape != shape:
                # Strides of 0.
                parameter.data = data.new_zeros(()).expand(shape)
    try:
        yield
    finally:
        set_data(shards)


def _put(tensors: list[tuple[nn.Parameter, Tensor, Tensor | None]]) -> None:
    """Give parameters their data and gradients."""
    for parameter, _, _ in tensors:
        # Of another shape than the data that comes.
        parameter.grad = None
    set_data((parameter, data) for parameter, data, _ in tensors)
    for parameter, _, grad in tensors:
        parameter.grad = grad


_GRADIENT_HOOKS = (*AFTER_BACKWARD, "on_before_zero_grad")
_HOOKS_OF_STEPS = (
    "on_train_batch_start",
    "on_before_backward",
    *_GRADIENT_HOOKS,
    "on_train_batch_end",
)
_HOOKS = (
    *_HOOKS_OF_STEPS,
    *(name for name in dir(Callback) if name.startswith(("on_train_epoch_", "on_validation_"))),
    "lr_scheduler_step",
    "on_save_checkpoint",
    "on_train_end",
)
# Of Lightning's own callbacks.
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
    module: LightningModule, whole: FullParameters, fits: Callable[[bool], str | None]
) -> AbstractContextManager[None]:
    """Context of a running training: its hooks that look at parameters see whole ones.

    Args:
        fits: None where whole parameters (True: and gradients) have room beside the training, else
            why not.
    """
    seeing = [
        hook
        for hook in own_hooks(module, _HOOKS)
        if _looks(getattr(*hook), module) and _has_room(*hook, fits)
    ]
    if every_step := [
        f"{type(owner).__name__}.{name}" for owner, name in seeing if name in _HOOKS_OF_STEPS
    ]:
        rank_zero_warn(
            f"alpa: {', '.join(every_step)} may look at parameters or gradients: they are gathered"
            " for it at every "
            "step, which costs time and memory. Hooks that need no whole parameters are quicker"
            " without naming any"
        )

    def seen_whole(owner: Any, name: str) -> Callable[..., Any]:
        hook = getattr(owner, name)
        # It may call its closure, the step and its backward, by itself.
        if name == "optimizer_step":
            hook = partial(_with_closure, hook, whole.suspended(is_stepping=True))
        sees_gradients = name in _GRADIENT_HOOKS or "grad" in names_in([(owner, name)])
        return whole.entered(sees_gradients, name in ("on_before_backward", "on_before_zero_grad"))(
            hook
        )

    patches: list[Any] = [(owner, name, seen_whole(owner, name)) for owner, name in seeing]
    for optimizer in module.trainer.optimizers:
        for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            looking = {number: hook for number, hook in hooks.items() if _looks(hook, module)}
            if looking and _has_room(optimizer, "optimizer_step", fits):
                patches += [
                    (hooks, n, whole.entered(with_gradients=True)(hook))
                    for n, hook in looking.items()
                ]
    return patched(patches)


def _with_closure(hook: Callable[..., Any], around: Any, *args: Any, **kwargs: Any) -> Any:
    *before, closure = args
    return hook(*before, around(closure), **kwargs)


def _has_room(owner: Any, name: str, fits: Callable[[bool], str | None]) -> bool:
    """Whether whole parameters have room for a hook; AlpaError where it can do nothing without
    them.
    """
    against = fits(name in _GRADIENT_HOOKS)
    if against is not None and isinstance(owner, _LOOKING):
        raise AlpaError(
            f"{type(owner).__name__} looks at whole parameters, and {against}",
            "remove the callback, or work on the checkpoints afterwards",
        )
    if against is not None:
        rank_zero_warn(
            f"alpa: {type(owner).__name__}.{name} may look at parameters or gradients; whole ones"
            " have no room on "
            "a device, so it sees the parts that are there"
        )
    return against is None


def check_backward(module: LightningModule) -> None:
    """SetupError where the module's own `backward` works on gradients: the ranks' are summed after
    it.
    """
    if is_overridden(module, "backward", LightningModule) and _looks(module.backward, module):
        raise SetupError(
            f"{type(module).__name__}.backward works on gradients, which are complete only after"
            " it",
            "do it in on_after_backward or configure_gradient_clipping",
        )


def _looks(hook: Callable[..., Any], module: nn.Module) -> bool:
    """Whether a hook, of the module or another's own, may look at parameters."""
    owner = getattr(hook, "__self__", None)
    # Which compares values: parts of two parameters may be equal.
    if isinstance(owner, (*_LOOKING, BaseFinetuning)):
        return True
    # Most are Lightning's.
    if not is_user_code(hook):
        return False
    names, held = (
        mentioned_names(hook),
        {**getattr(owner, "__dict__", {}), **getattr(owner, "_modules", {})},
    )
    # `self.ema.update(self.net)`, `self.ema(self.net)`.
    called = {*names, "forward", "__call__"}
    names = names.union(
        *(
            mentioned_names(f)
            for name in names & held.keys()
            for f in functions_of(held[name], called)
        )
    )
    # `self.gamma`.
    own = {path.rpartition(".")[2] for path, _ in module.named_parameters()}
    own |= {name for name, value in held.items() if isinstance(value, nn.Parameter)}
    return not own.isdisjoint(names) or any(map(_PARAMETER_WORDS.search, names - _NOT_PARAMETERS))


# Clipping over parts


def use_whole_norms(plugin: Any, whole: FullParameters) -> AbstractContextManager[None]:
    """Context: `plugin` clips by the norm of all parts, and agrees on overflow where it scales.

    Any plugin does, the user's own too: only what it knows of norms and of overflow is replaced, on
    the object.
    """

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        parameters = plugin.main_params(optimizer)
        # For a hook that sees gradients so.
        if whole.is_entered:
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)
        else:
            clip_by_norm(whole.store, float(clip_val), parameters)

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
    """A scaler's `unscale`, which skips a step when any rank's gradients overflow, so that all
    ranks keep one scale.

    torch's ShardedGradScaler does the same for gradients that every rank has; here a rank may have
    none. And torch's scaler copies its scale to gradients in host memory without waiting for the
    copy.
    """
    device = found_inf.device
    if not all(p.device == device for group in optimizer.param_groups for p in group["params"]):
        inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
    found = unscale(optimizer, inv_scale, found_inf, allow_fp16)
    overflow = torch.stack([flag.to(device) for flag in (found_inf, *found.values())]).amax()
    if world_size() > 1:
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
    return {device: overflow}


def clip_by_norm(
    store: ParameterStore, max_norm: float, parameters: Iterable[nn.Parameter]
) -> Tensor:
    """Scale gradients in place so that their norm, taken as one vector, is at most `max_norm` (as
    `torch.nn.utils.clip_grad_norm_`). Every element of the whole gradient is counted once, and the
    norm has the same bits on every device, so that all clip alike. Collective over the mesh.

    Args:
        parameters: whose gradients, the same on all devices (an optimizer's).

    Returns the norm before clipping.
    """
    given = tuple(parameters)
    norm = gradient_norm(store, given)
    torch.nn.utils.clip_grads_with_norm_(given, max_norm, norm)
    return norm


def gradient_norm(
    store: ParameterStore, parameters: Iterable[nn.Parameter], norm_type: float = 2.0
) -> Tensor:
    """Of the whole gradients as one vector (float64), with the same bits on every device.
    Collective over the mesh.
    """
    counted = [
        p.grad.detach()
        for p in parameters
        if p.grad is not None and p.grad.numel() and store.counts_here(p)
    ]
    precise = [(grad, torch.promote_types(grad.dtype, torch.float32)) for grad in counted]
    norms = [
        torch.linalg.vector_norm(grad, norm_type, dtype=dtype).double() for grad, dtype in precise
    ]
    # Where collectives are; some gradients may lie in host memory.
    device = store.device
    own = torch.stack(
        [torch.zeros((), dtype=torch.float64, device=device), *(norm.to(device) for norm in norms)]
    )
    if math.isinf(norm_type):
        return store.mesh.whole.all_reduce(own.amax(), "max")
    return store.mesh.whole.all_reduce(own.pow(norm_type).sum()).pow(1 / norm_type)
