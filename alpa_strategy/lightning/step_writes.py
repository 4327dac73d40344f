"""StepWrites: parameters that the code of an eager step writes to itself, outside of optimizers.

Such a step may write what depends on its rank's own batch: ActNorm takes the statistics of the
first one. The ranks' weights differ from then on, and DDP goes on. Replicas are compared here
(`digests.py`), and what was written tells such a difference from that of a device that computes
wrongly.

A write is seen by the parameter's version. `parameter.data` has a version of its own, so that
attribute of tensors is replaced from a run's first step to its end.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from alpa_strategy.capture.python_state import patched, version_of
from alpa_strategy.ir.user_code import user_position
from alpa_strategy.lightning.digests import chained, digest
from alpa_strategy.runtime.parameters import ParameterStore

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")

# The attribute of tensors itself.
_DATA: Any = Tensor.data

# Of an alias that replaced the parameter's data.
_REPLACED = -1


class _Alias(NamedTuple):
    """A tensor that the step's code got from `parameter.data`, or assigned to it."""

    # Has its version, and none of its memory.
    counter: Tensor

    # When the code got it; `_REPLACED`: the code assigned it.
    version: int

    # Position in the user's code.
    line: str

    @property
    def is_written(self) -> bool:
        """Whether it has been written to."""
        return self.version == _REPLACED or version_of(self.counter) != self.version


class StepWrites:
    """Records which parameters the steps of this rank write to. Nothing communicates here.

    Args:
        store: of the parameters.
        watches_data: whether writes to `parameter.data` are seen as well.
    """

    def __init__(self, store: ParameterStore, watches_data: bool) -> None:
        self._watches_data = watches_data
        self._by_id = {id(parameter): parameter for parameter in store.parameters}

        # `look` is called for the others by what gathers them: elsewhere they have no values.
        self._in_full = {}
        for key, parameter in self._by_id.items():
            if parameter not in store.sharded_parameters:
                self._in_full[key] = parameter

        # Of each parameter that was written to: where, if that is known.
        self.lines: dict[nn.Parameter, str] = {}

        # Digests of what was written to a parameter, one after the other.
        self._digests: dict[nn.Parameter, Tensor] = {}

        # While a step runs: versions at the last look, and aliases since then.
        # By the parameter's id: the hash of a tensor takes longer.
        self._versions: dict[int, int] = {}
        self._aliases: dict[int, list[_Alias]] = {}
        self._is_active = False

        # Of the attribute of tensors.
        self._installed = ExitStack()
        self._is_installed = False

        # Number of optimizers' steps that are running within the step, one in the other.
        self._num_stepping = 0

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Context of the user's step, in which its writes to parameters are recorded, but not those
        of optimizers.
        """
        if self._watches_data and not self._is_installed:
            # Once, not in each step: attributes of a class that changes often are not cached.
            attribute = property(self._read_data, self._replace_data)
            self._installed.enter_context(patched([(Tensor, "data", attribute)]))
            self._is_installed = True
        self._num_stepping = 0
        self._is_active = True
        self._begin()
        try:
            with ExitStack() as hooks:
                before = register_optimizer_step_pre_hook(self._pause)
                hooks.callback(before.remove)
                after = register_optimizer_step_post_hook(self._resume)
                hooks.callback(after.remove)
                yield
            self._look_at_all()
        finally:
            self._is_active = False
            self._aliases.clear()

    def remove(self) -> None:
        """Restore the attribute of tensors, at the end of the run."""
        self._installed.close()
        self._is_installed = False

    def _pause(self, *_: Any) -> None:
        """Ignore writes until `_resume`: an optimizer steps."""
        if self._num_stepping == 0:
            self._look_at_all()
        self._num_stepping += 1

    def _resume(self, *_: Any) -> None:
        """End a pause; nothing if the optimizer has begun before the step (its closure)."""
        if self._num_stepping == 0:
            return
        self._num_stepping -= 1
        if self._num_stepping == 0:
            self._begin()

    def look(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Record what the step has written to a parameter since the last look, if anything.

        Args:
            parameter: of the store.
            full: its full value.
        """
        if not self._is_active or self._num_stepping:
            return
        version = version_of(parameter)
        aliases = self._aliases.pop(id(parameter), [])
        lines = [alias.line for alias in aliases if alias.is_written]
        if not lines and version == self._versions[id(parameter)]:
            return

        self._versions[id(parameter)] = version
        line = lines[0] if lines else ""
        self.lines[parameter] = self.lines.get(parameter) or line
        written = digest(full)
        before = self._digests.get(parameter)
        self._digests[parameter] = written if before is None else chained(before, written)

    def digest_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a digest of all that was written to a parameter, `[]` of int64; None: nothing."""
        return self._digests.get(parameter)

    def _begin(self) -> None:
        self._aliases.clear()
        self._versions = {key: version_of(parameter) for key, parameter in self._by_id.items()}

    def _look_at_all(self) -> None:
        """Look at all parameters that every rank has in full."""
        for key, parameter in self._in_full.items():
            if key in self._aliases or version_of(parameter) != self._versions[key]:
                self.look(parameter, parameter)

    # `Tensor.data`

    def _read_data(self, tensor: Tensor) -> Tensor:
        """Return `tensor.data`, and record the user's line if it is a watched parameter's: writes
        to the alias do not raise the parameter's version.
        """
        alias: Tensor = _DATA.__get__(tensor)
        parameter = self._by_id.get(id(tensor)) if self._is_active else None
        if parameter is not None and type(alias) is Tensor and not alias.is_inference():
            frame = sys._getframe(1)
            if not _is_of_package(frame):
                counter = _counter_of(alias)
                self._note(parameter, _Alias(counter, version_of(counter), _line(frame)))
        return alias

    def _replace_data(self, tensor: Tensor, data: Tensor) -> None:
        """Set `tensor.data`, and note it if the user's code does so with a parameter in a step."""
        _DATA.__set__(tensor, data)
        parameter = self._by_id.get(id(tensor)) if self._is_active else None
        frame = sys._getframe(1)
        if parameter is not None and not _is_of_package(frame):
            self._note(parameter, _Alias(data.new_empty(0), _REPLACED, _line(frame)))

    def _note(self, parameter: nn.Parameter, alias: _Alias) -> None:
        if not self._num_stepping:
            self._aliases.setdefault(id(parameter), []).append(alias)


def _counter_of(alias: Tensor) -> Tensor:
    """Return a tensor without elements that has the version of `alias`, now and later."""
    counter = alias.detach()
    _DATA.__set__(counter, alias.new_empty(0))
    return counter


def _is_of_package(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _line(frame: FrameType) -> str:
    """Return `file:line` of the innermost user frame at or above `frame`; empty without one."""
    position = user_position(frame)
    return "" if position is None else f"{position[0]}:{position[1]}"
