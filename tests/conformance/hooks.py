"""Recording of every hook that Lightning calls, of a callback and of the module, in order."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

_MODULE_HOOKS = (
    *(
        n
        for base in (ModelHooks, DataHooks, CheckpointHooks)
        for n in vars(base)
        if not n.startswith("_")
    ),
    "configure_optimizers",
    "configure_callbacks",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "backward",
    "validation_step",
    "test_step",
    "predict_step",
)
_CALLBACK_HOOKS = [
    n for n, f in vars(pl.Callback).items() if inspect.isfunction(f) and not n.startswith("_")
]
_NOT_RECORDED = {
    "prepare_data",
    "prepare_data_per_node",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
} | {
    "predict_dataloader",
    "configure_sharded_model",
    "state_dict",
    "load_state_dict",
}


def recording_module(kind: type[pl.LightningModule], calls: list[str]) -> type[pl.LightningModule]:
    """A subclass that writes down the names of its hooks; `training_step` is no hook: a captured
    one is not called.
    """
    return type(
        kind.__name__,
        (kind,),
        {n: _recorded(getattr(kind, n), n, calls) for n in _recorded_names(kind)},
    )


def _recorded_names(kind: type[pl.LightningModule]) -> list[str]:
    return [
        n
        for n in _MODULE_HOOKS
        if n not in _NOT_RECORDED and inspect.isfunction(getattr(kind, n, None))
    ]


def recording_callback(calls: list[str]) -> pl.Callback:
    """A callback that writes down the names of its hooks."""
    members = {
        n: _recorded(getattr(pl.Callback, n), f"callback.{n}", calls) for n in _CALLBACK_HOOKS
    }
    members = {n: f for n, f in members.items() if n not in _NOT_RECORDED}
    return type("Recording", (pl.Callback,), members)()


def _recorded(function: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(self, *args, **kwargs)

    call.__signature__ = inspect.signature(function)  # the Trainer looks at what hooks take
    return call
