"""The text for a process that was lost."""

import contextlib
import signal


def exit_text(code: int) -> str:
    """Return a text for the exit code of a lost process; it is negative if a signal ended it."""
    if code > 0:
        return f"ended with exit code {code}"

    name = f"signal {-code}"
    # Some signals have no name.
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
    reason = "; out of memory is a common reason" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{reason}"
