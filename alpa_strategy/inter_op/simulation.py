"""Simulates the seconds of a pipeline's step: the actions of its schedule in order, its messages
and its runtime.

The stage DP works with closed forms (`schedules.closed_form`). This module predicts the time of the
stages that the DP chose.
"""

from collections.abc import Sequence

import numpy as np

from alpa_strategy.cluster.devices import DeviceSpec
from alpa_strategy.schedules import seconds_of_many

# The runtime's time for a micro-batch, in launches of small ops: 0.3 to 0.8 ms on CPUs, which do
# nothing else meanwhile. Accelerators work on while their host prepares the next ops.
RUNTIME_LAUNCHES_ON_CPU = 100
RUNTIME_LAUNCHES = 10


def runtime_seconds(device: DeviceSpec) -> float:
    """Return the seconds that the runtime takes for a micro-batch of a stage in addition to its
    ops: messages and bookkeeping.
    """
    launches = RUNTIME_LAUNCHES_ON_CPU if device.is_cpu else RUNTIME_LAUNCHES
    return launches * device.launch_seconds * device.slowdown


def simulated_seconds(
    schedule: str,
    num_meshes: int,
    num_microbatches: int,
    pipelines: Sequence[Sequence[tuple[float, float, float, float]]],
    overhead: float,
) -> list[float]:
    """Return the seconds of a step of each pipeline: its micro-batches by the schedule, then what
    happens once per step.

    The closed form of the stage DP counts messages as work of their sender; here a boundary carries
    them while stages compute.

    Args:
        num_meshes: that the stages are on, as many on each.
        pipelines: all with the same number of stages, in pipeline order. Each stage has the seconds
            of a micro-batch's forward and backward (recomputation included), those once per step,
            and those of a micro-batch's messages to and from the next stage.
        overhead: seconds of a micro-batch in each stage in addition to its ops (`runtime_seconds`).
    """
    # [pipeline, stage] each
    forward, backward, once, wires = np.moveaxis(np.array(pipelines), -1, 0)
    num_stages = forward.shape[1]
    if num_stages == 1:
        seconds = num_microbatches * (forward + backward + overhead)[:, 0]
    else:
        seconds = seconds_of_many(
            schedule,
            forward + overhead / 2,
            backward + overhead / 2,
            num_microbatches,
            num_meshes,
            wires / 2,
        )
    stages_per_mesh = num_stages // num_meshes
    return (seconds + stages_per_mesh * once.max(axis=1)).tolist()
