"""`Fabric(strategy="alpa")`: an error that says why there is none.

Fabric's users write the loop, forward and backward themselves: there is no `training_step` to capture.
"""

from __future__ import annotations

from typing import Any, NoReturn

from alpa_strategy.errors import AlpaError


class NoFabric:
    """Registered as Fabric's "alpa"; making one is an AlpaError."""

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise AlpaError(
            'Fabric(strategy="alpa"): alpa plans the training_step of a LightningModule, and Fabric has none',
            'put the step into a LightningModule and use Trainer(strategy="alpa"), or another strategy of Fabric',
        )
