"""Parameters that are frozen, unfrozen, added or replaced while a training runs: the plan does not hold for them."""

from __future__ import annotations

from torch import nn


class ParametersAsTheyWere:
    """Which parameters `module` has and which of them train, to be compared with later."""

    def __init__(self, module: nn.Module) -> None:
        self._flags = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
        owners = [(path, vars(child)["_parameters"]) for path, child in module.named_modules()]
        self._owners = [(path, now, tuple(now.items())) for path, now in owners]

    def changed(self) -> str | None:
        """The first change in words, None when there is none. Some microseconds for a hundred parameters."""
        for name, parameter, trains in self._flags:
            if parameter.requires_grad is not trains:
                return f"{name} was {'frozen' if trains else 'unfrozen'}"
        for path, now, before in self._owners:
            if len(now) != len(before) or any(now.get(name) is not p for name, p in before):
                return f"the parameters of {path or 'the module'} were replaced"
        return None
