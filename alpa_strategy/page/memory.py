"""The memory of devices for the page: the parts that the terminal prints, and what is in them."""

from typing import Any

from alpa_strategy.display.memory import memory_of_meshes
from alpa_strategy.ir.plan import Plan, StagePlan
from alpa_strategy.ir.plan_details import StageMemory

# Of a part of the memory: the bytes that are known of it (a field of `StageMemory`), what they are,
# and what the rest is.
_ITEMS = {
    "weights": ("weights", "stored", "gathered copies, casts and buffers"),
    "gradients": ("gradients", "stored", "before they are scattered"),
    "activations": ("recomputed", "recomputed segment", "of the micro-batches in flight"),
}


def memory_of_devices(plan: Plan) -> list[dict[str, Any]]:
    """Return the bytes at the peak of a device of every mesh, by part, and the stages on it."""
    devices = []
    for stages, parts in memory_of_meshes(plan).items():
        indices = [int(index) for index in stages.split(",")]
        devices.append({"stages": indices, "peak": sum(parts.values()), "parts": parts})
    return devices


def parts_within(stage: StagePlan, memory: StageMemory) -> dict[str, list[list[Any]]]:
    """Return what is in the parts of a stage's memory, as part -> [[text, bytes]].

    The bytes of a part's items sum to the part. Parts of a single item are left out.
    """
    within = {}
    for part, (field, text, rest) in _ITEMS.items():
        whole_bytes = stage.predicted.memory.get(part, 0)
        known_bytes = getattr(memory, field)

        if 0 < known_bytes < whole_bytes:
            within[part] = [[text, known_bytes], [rest, whole_bytes - known_bytes]]
    return within


def memory_over_time(stage: StagePlan, memory: StageMemory) -> dict[str, int]:
    """Return the bytes of a stage that come and go in a step.

    `per_step` are the values that are made once per step, where the parts at the peak, in the
    update, have them in `temporary`: the rest of the step has them in `weights`.
    """
    parts = stage.predicted.memory
    constant = sum(parts.get(part, 0) for part in ("weights", "gradients", "state"))

    always = memory.weights + memory.gradients + memory.state + memory.gathered + memory.other
    # Smaller differences are those of rounding.
    per_step = max(0, always - constant) if memory.update else 0

    return {
        "per_step": per_step,
        "activations": memory.activations,
        "recomputed": memory.recomputed,
        "temporary": memory.temporary,
        "update": memory.update,
    }
