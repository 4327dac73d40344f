"""How busy the machine is beside a training on CPUs: a likely cause of slow steps."""

import os

# The machine is busy from this many runnable processes per core on.
BUSY_LOAD = 1.25


def busy_machine(device_type: str) -> str:
    """Return a clause on the load of a busy machine: `the machine is busy: load 14 on 2 cores`.

    Args:
        device_type: that the steps run on.

    Returns:
        "" if the steps do not run on CPUs, the machine is not busy, or its load is not known.
    """
    if device_type != "cpu" or not hasattr(os, "getloadavg"):
        return ""
    try:
        # Of the last minute.
        load, _, _ = os.getloadavg()
    except OSError:
        return ""
    # The load is that of the whole machine, so all its cores count, not this process's alone.
    num_cores = os.cpu_count() or 1
    if load < BUSY_LOAD * num_cores:
        return ""
    return f"the machine is busy: load {load:.0f} on {num_cores} core{'s' * (num_cores != 1)}"
