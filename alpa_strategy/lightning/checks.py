"""What a module, its callbacks and a Trainer must be for the strategy, and which hooks they bring
of their own.
"""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parameter import is_lazy

from alpa_strategy.errors import OptionError, SetupError
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


def check_module(module: Any) -> None:
    """SetupError for modules and callbacks that cannot train under this strategy."""
    if not any(p.requires_grad for p in module.parameters()):
        raise SetupError(
            f"{type(module).__name__} has no trainable parameters",
            "create its layers in __init__ or configure_model, and leave requires_grad on for what"
            " should train",
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise SetupError("training_step takes a dataloader_iter", "let it take (batch, batch_idx)")


def check_shapes(module: Any) -> None:
    """SetupError for lazy layers that have seen no batch."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise SetupError(
                f"{name} has no shape before the first batch, and what the ranks share and plan is"
                " made from shapes",
                "call the lazy layers on an example batch in __init__ or configure_model, or give"
                " them their sizes",
            )


def check_precision(plugin: Any) -> None:
    """SetupError for precision plugins that replace layers, or belong to another strategy."""
    if isinstance(plugin, _OTHER_PRECISIONS):
        raise SetupError(
            f"{type(plugin).__name__} replaces the module's layers or belongs to another strategy",
            'use precision="32-true", "64-true", "16-mixed", "bf16-mixed", "16-true" or'
            ' "bf16-true"',
        )


def check_optimizers(optimizers: Iterable[Any]) -> None:
    """SetupError for optimizers that cut their state between the ranks by themselves."""
    for optimizer in optimizers:
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
            raise SetupError(
                "ZeroRedundancyOptimizer cuts its state between the ranks by itself, beside the"
                " plan",
                'return the optimizer that is inside of it, and set parallel="zero2" (or leave it'
                " to the plan)",
            )


def is_overridden(owner: Any, name: str, base: type) -> bool:
    """Whether `owner` has a hook `name` that is not `base`'s.

    Asked at every step: no bound method is made.
    """
    own = owner.__dict__
    hook = own[name] if name in own else getattr(type(owner), name, None)
    return hook is not None and getattr(hook, "__func__", hook) is not getattr(base, name, None)


def check_replicas(replicas: int | None, batch_scope: str, nodes: int, devices: int) -> None:
    """OptionError where `nodes` of so many devices each cannot be divided into so many replicas."""
    if replicas is None:
        return
    if batch_scope != "replica":
        problem = f"replicas={replicas} means a step of each replica's own batch, batch_scope={batch_scope!r} does not"
        raise OptionError(problem, 'give batch_scope="replica" with it')
    size = nodes * devices // replicas
    if nodes * devices % replicas or max(size, devices) % min(size, devices):
        raise OptionError(
            f"replicas={replicas} does not divide {nodes} nodes of {devices} devices",
            "a replica is whole nodes, or an equal part of one: give another number",
        )


def own_hooks(module: Any, names: Iterable[str]) -> list[tuple[Any, str]]:
    """(owner, name) of those of the hooks `names` that the module and its Trainer's callbacks
    bring.
    """
    owners = [
        (module, LightningModule),
        *((callback, Callback) for callback in module.trainer.callbacks),
    ]
    return [
        (owner, name)
        for owner, base in owners
        for name in names
        if is_overridden(owner, name, base)
    ]


def has_own_hooks(module: Any, trainer: Any, names: Iterable[str]) -> bool:
    """Whether `own_hooks` finds any: what a training asks at every step."""
    for name in names:
        if is_overridden(module, name, LightningModule):
            return True
        for callback in trainer.callbacks:
            if is_overridden(callback, name, Callback):
                return True
    return False


def names_in(hooks: Iterable[tuple[Any, str]]) -> frozenset[str]:
    """What the user's code among hooks, each (owner, name), mentions."""
    own = [hook for owner, name in hooks if is_user_code(hook := getattr(owner, name))]
    return frozenset(name for hook in own for name in mentioned_names(hook))
