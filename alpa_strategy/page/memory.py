"""The memory of devices for the page: the parts that the terminal prints, and what is in them."""

from collections.abc import Mapping
from typing import Any

from alpa_strategy.display.memory import memory_of_meshes
from alpa_strategy.ir.plan import Plan, StagePlan
from alpa_strategy.ir.plan_details import StageMemory

# What the bytes of a part are that no item has.
_RESTS = {
    "weights": "made once per step, such as casts, and buffers",
    "gradients": "of gathered copies, summed in full before they are scattered once per step",
    "activations": "of the micro-batches in flight",
}


def memory_of_devices(plan: Plan) -> list[dict[str, Any]]:
    """Return the bytes at the peak of a device of every mesh, by part, and the stages on it."""
    devices = []
    for stages, parts in memory_of_meshes(plan).items():
        indices = [int(index) for index in stages.split(",")]
        devices.append({"stages": indices, "peak": sum(parts.values()), "parts": parts})
    return devices


def parts_within(stage: StagePlan, memory: StageMemory) -> dict[str, list[list[Any]]]:
    """Return the items of which the parts of a stage's memory are made: part -> [[text, bytes]].

    The bytes of a part's items sum to the part. Parts of a single item are left out. So are parts
    whose items have more bytes than the part.
    """
    within = {}
    for part, items in _items(stage.predicted.memory, memory).items():
        whole_bytes = stage.predicted.memory.get(part, 0)
        known: list[list[Any]] = [
            [text, num_bytes] for text, num_bytes in items.items() if num_bytes > 0
        ]
        rest = whole_bytes - sum(num_bytes for _, num_bytes in known)
        if known and rest > 0:
            known.append([_RESTS[part], rest])
        if len(known) > 1 and rest >= 0:
            within[part] = known
    return within


def _items(parts: Mapping[str, int], memory: StageMemory) -> dict[str, dict[str, int]]:
    """Return part -> (text of a kind of bytes -> number of bytes), as far as they are known.

    Args:
        parts: bytes of each part at the peak.
        memory: details of the stage.
    """
    # The gathered bytes are those of copies and of their gradients.
    gradients = max(0, parts.get("gradients", 0) - memory.gradients)
    copies = max(0, memory.gathered - gradients)
    return {
        "weights": {"stored": memory.weights, "gathered copies, in the dtype of their use": copies},
        "gradients": {"stored": memory.gradients},
        "activations": {"recomputed segment": memory.recomputed},
    }


def memory_over_time(stage: StagePlan, memory: StageMemory) -> dict[str, int]:
    """Return the bytes of a stage that change within a step: `per_step`, and of `memory` the parts
    `activations`, `recomputed`, `temporary` and `update`.

    `per_step`: values that are made once per step and are freed by the update. They are to be added
    to the plan's `weights` before the update, and to `update` in it; 0 if `weights` has them.
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
