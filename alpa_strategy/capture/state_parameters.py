"""Parameters that the step itself changes: the teacher that follows a student.

Such a parameter is state of the step, as a buffer is, and no optimizer changes it. So no gradient
may go to it.
"""

from collections.abc import Collection, Iterable, Iterator

from alpa_strategy.capture.graph_builder import View
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import BatchInput, BufferInput, ParameterInput

# An input of a trace.
Input = ParameterInput | BufferInput | BatchInput


class StateParameters:
    """The parameters that one step reads and writes.

    Args:
        names: of those that are state; None: all that the step writes to.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = names

        # Names of the parameters that need no gradient.
        self._frozen: set[str] = set()

        # Names of the parameters that ops have read whose results have a gradient.
        self._trained: set[str] = set()

        # Name of a parameter that the step writes to -> the user's line.
        self._written: dict[str, str] = {}

    def add(self, parameter: ParameterInput) -> None:
        """Add a parameter of the module."""
        if not parameter.meta.requires_grad:
            self._frozen.add(parameter.name)

    def read(self, view: View) -> None:
        """Note that an op with a gradient reads a view; one that is detached, or of a frozen
        parameter or another tensor, is ignored.

        Raises:
            CaptureError: of a parameter that the step has written to.
        """
        name = view.storage.parameter
        if not name or name in self._frozen or view.is_detached:
            return
        self._trained.add(name)
        if name in self._written:
            self._refuse(name, self._written[name])

    def write(self, name: str, source: str) -> None:
        """Note that the step writes to a parameter.

        Args:
            source: the user's line.

        Raises:
            CaptureError: it trains, or a plan already has it as one that the step does not change.
        """
        is_other = self._names is not None and name not in self._names
        if name in self._trained or is_other:
            self._refuse(name, source)
        self._written[name] = source

    def inputs(self, inputs: Iterable[Input]) -> Iterator[Input]:
        """Yield the inputs, with parameters that are state as buffers."""
        names = self._written.keys() if self._names is None else self._names
        for entry in inputs:
            if isinstance(entry, ParameterInput) and entry.name in names:
                yield BufferInput(entry.value, entry.name, entry.meta, is_parameter=True)
            else:
                yield entry

    def _refuse(self, name: str, source: str) -> None:
        """Raise CaptureError for a write."""
        raise CaptureError(
            f"the step changes parameter {name} in place ({source})",
            "parameters that train, or that some steps only change, are changed by the optimizer"
            " or in a hook such as on_train_batch_end",
        )
