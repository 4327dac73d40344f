"""Which hooks of Lightning's a module or a callback brings of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule


def is_overridden(owner: Any, name: str, base: type) -> bool:
    """Whether `owner` has a hook `name` that is not `base`'s."""
    hook = getattr(owner, name, None)
    return hook is not None and getattr(hook, "__func__", hook) is not getattr(base, name, None)


def hook_owners(module: Any, callbacks: Iterable[Callback]) -> list[tuple[Any, type]]:
    """(whoever may bring hooks, the class whose hooks do nothing)."""
    return [(module, LightningModule), *((callback, Callback) for callback in callbacks)]


def any_overridden(trainer: Any, module: Any, names: tuple[str, ...]) -> bool:
    """Whether the module or one of the Trainer's callbacks has one of the hooks."""
    return any(
        is_overridden(owner, name, base) for owner, base in hook_owners(module, trainer.callbacks) for name in names
    )


def clears_gradients_unseen(trainer: Any, module: Any) -> bool:
    """Whether the Trainer clears all gradients at the first batch of an optimizer step, and nobody looks before."""
    return not any_overridden(trainer, module, ("on_before_zero_grad", "optimizer_zero_grad"))
