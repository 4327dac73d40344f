"""Checks of modules, precision plugins and optimizers before a training; the users' own hooks."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parameter import is_lazy

from alpa_strategy.errors import OptionError, SetupError
from alpa_strategy.ir.guards import MISSING
from alpa_strategy.ir.user_code import is_user_code, mentioned_names

_OTHER_PRECISIONS = (
    precision.BitsandbytesPrecision,
    precision.DeepSpeedPrecision,
    precision.FSDPPrecision,
    precision.TransformerEnginePrecision,
    precision.XLAPrecision,
)
AFTER_BACKWARD = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)
# Hooks between a step and the update of its weights.
UPDATE_HOOKS = ("on_before_backward", "backward", *AFTER_BACKWARD)


def check_module(module: Any) -> None:
    """Check that a module has something to train and a step that receives batches.

    Raises:
        SetupError: no parameter is trainable, or `training_step` takes the loader's iterator.
    """
    if not any(p.requires_grad for p in module.parameters()):
        raise SetupError(
            f"{type(module).__name__} has no trainable parameters",
            "create its layers in __init__ or configure_model, and leave requires_grad on for the"
            " parameters that should train",
        )

    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise SetupError("training_step takes a dataloader_iter", "let it take (batch, batch_idx)")


def check_shapes(module: Any) -> None:
    """Check that all parameters and buffers have a shape.

    Raises:
        SetupError: a lazy layer has seen no batch yet.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise SetupError(
                f"{name} has no shape before the first batch, and the plan is made from shapes",
                "call the lazy layers on an example batch in __init__ or configure_model, or give"
                " them their sizes",
            )


def check_precision(plugin: Any) -> None:
    """Check that a precision plugin works with this strategy.

    Raises:
        SetupError: the plugin replaces layers, or belongs to another strategy.
    """
    if isinstance(plugin, _OTHER_PRECISIONS):
        raise SetupError(
            f"{type(plugin).__name__} replaces the module's layers or belongs to another strategy",
            'use precision="32-true", "64-true", "16-mixed", "bf16-mixed", "16-true" or'
            ' "bf16-true"',
        )


def check_optimizers(optimizers: Iterable[Any]) -> None:
    """Check that no optimizer shards its state by itself.

    Raises:
        SetupError: an optimizer is a ZeroRedundancyOptimizer.
    """
    for optimizer in optimizers:
        names = {kind.__name__ for kind in type(optimizer).__mro__}
        if "ZeroRedundancyOptimizer" in names:
            raise SetupError(
                "ZeroRedundancyOptimizer shards its state over the ranks by itself, outside of the"
                " plan",
                'return the optimizer that is inside of it, and set parallel="zero2" (or leave it'
                " to the plan)",
            )


def is_overridden(owner: Any, name: str, base: type) -> bool:
    """Whether `owner` has a hook `name` that differs from that of `base`."""
    # Runs at every step, so no bound method is made.
    hook = owner.__dict__.get(name, MISSING)
    if hook is MISSING:
        hook = getattr(type(owner), name, None)
    of_base = getattr(base, name, None)
    return hook is not of_base and hook is not None and _function(hook) is not of_base


def _function(hook: Any) -> Any:
    """Return the function of a method, any other hook unchanged."""
    return getattr(hook, "__func__", hook)


def check_replicas(replicas: int | None, batch_scope: str, nodes: int, devices: int) -> None:
    """Check that the devices can be divided into replicas.

    Args:
        replicas: number of replicas; None: each device is one.
        batch_scope: the option of this name.
        nodes: number of nodes.
        devices: number of devices of each node.

    Raises:
        OptionError: a replica would be neither full nodes nor an equal fraction of one, or they are
            given and `batch_scope` is not `replica`.
    """
    if replicas is None:
        return

    if batch_scope != "replica":
        problem = (
            f"replicas={replicas} means a step of each replica's own batch,"
            f" batch_scope={batch_scope!r} does not"
        )
        raise OptionError(problem, 'give batch_scope="replica" with it')

    num_devices = nodes * devices
    size = num_devices // replicas
    if num_devices % replicas or max(size, devices) % min(size, devices):
        raise OptionError(
            f"replicas={replicas} does not divide {nodes} nodes of {devices} devices",
            "a replica is one or more full nodes, or an equal fraction of one: give another number",
        )


def own_hooks(module: Any, names: Iterable[str]) -> list[tuple[Any, str]]:
    """Return the hooks among `names` that the module or its Trainer's callbacks override.

    Returns:
        Pairs of the owner, the module or a callback, and the hook's name.
    """
    owners: list[tuple[Any, type]] = [(module, LightningModule)]
    for callback in module.trainer.callbacks:
        owners.append((callback, Callback))

    hooks = []
    for owner, base in owners:
        for name in names:
            if is_overridden(owner, name, base):
                hooks.append((owner, name))
    return hooks


def has_own_hooks(module: Any, trainer: Any, names: Iterable[str]) -> bool:
    """Whether the module or a callback overrides one of the hooks `names`; fast, for every step."""
    for name in names:
        if is_overridden(module, name, LightningModule):
            return True
        for callback in trainer.callbacks:
            if is_overridden(callback, name, Callback):
                return True
    return False


def names_in(hooks: Iterable[tuple[Any, str]]) -> frozenset[str]:
    """Return the names that the users' code among `hooks` mentions.

    Args:
        hooks: pairs of owner and name, as of `own_hooks`.
    """
    mentioned: set[str] = set()
    for owner, name in hooks:
        hook = getattr(owner, name)
        if is_user_code(hook):
            mentioned.update(mentioned_names(hook))
    return frozenset(mentioned)
