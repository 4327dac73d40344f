"""OpTable: measured op times in a small JSON file that other models on the same kind of device reuse.

Keyed by device name, then op family (op, dtypes, which operands require grad), then the call's shapes and arguments.
Measuring is `measure.py`'s, reading between the lines is `roofline.py`'s.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpa_strategy.cost.flops import Work, op_work
from alpa_strategy.ir.op import OpCall, Slot, TensorMeta

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass(frozen=True)
class OpTime:
    """Measured seconds of one call, with the work that it stands for."""

    forward: float
    backward: float
    forward_work: Work
    backward_work: Work


def call_family(call: OpCall) -> str:
    """`aten.linear.default float32* float32*` (`*`: requires grad): calls whose times say something of each other."""
    return " ".join([call.target_name, *(_dtype(meta) for meta in call.operands)])


def call_key(call: OpCall) -> str:
    """What distinguishes a call within its family: operand shapes, then the arguments (`$0` is operand 0)."""
    shapes = " ".join(str(list(meta.shape)).replace(" ", "") for meta in call.operands)
    arguments = [_show(arg) for arg in call.args] + [f"{name}={_show(value)}" for name, value in call.kwargs]
    return f"{shapes} ({', '.join(arguments)})"


class OpTable:
    """A store of measured op times. In memory unless `path` is given; `save` writes atomically."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else None
        self._devices: dict[str, dict[str, dict[str, OpTime]]] = {}

    @classmethod
    def load(cls, path: str | Path) -> OpTable:
        """The table in `path`; empty when there is none. An unreadable or older file is reported and measured anew."""
        table = cls(path)
        file = Path(path)
        if not file.exists():
            return table
        try:
            data = json.loads(file.read_text())
            if data["version"] != FORMAT_VERSION:
                raise ValueError(f"format version {data['version']}, this package writes {FORMAT_VERSION}")
            for device, families in data["devices"].items():
                for family, calls in families.items():
                    for key, entry in calls.items():
                        table._put(device, family, key, _entry_from_dict(entry))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("op times in %s cannot be used (%s): ops are measured again", file, error)
            return cls(path)
        return table

    def save(self) -> None:
        """Write the table to its path, together with what other jobs have put there since."""
        if self.path is None:
            return
        if self.path.exists():
            for device, families in OpTable.load(self.path)._devices.items():
                for family, calls in families.items():
                    for key, entry in calls.items():
                        if key not in self._devices.get(device, {}).get(family, {}):
                            self._put(device, family, key, entry)
        devices = {
            device: {family: {key: _entry_to_dict(e) for key, e in calls.items()} for family, calls in families.items()}
            for device, families in self._devices.items()
        }
        write_json_atomically(self.path, {"version": FORMAT_VERSION, "devices": devices})

    def get(self, device: str, call: OpCall) -> OpTime | None:
        """The measurement of exactly this call."""
        return self._devices.get(device, {}).get(call_family(call), {}).get(call_key(call))

    def put(self, device: str, call: OpCall, forward: float, backward: float) -> None:
        """Remember a measurement, in seconds."""
        forward_work, backward_work = op_work(call)
        entry = OpTime(forward, backward, forward_work, backward_work)
        self._put(device, call_family(call), call_key(call), entry)

    def family(self, device: str, family: str) -> tuple[OpTime, ...]:
        """Every measurement of a family (`call_family`)."""
        return tuple(self._devices.get(device, {}).get(family, {}).values())

    def __len__(self) -> int:
        return sum(len(calls) for families in self._devices.values() for calls in families.values())

    def _put(self, device: str, family: str, key: str, entry: OpTime) -> None:
        self._devices.setdefault(device, {}).setdefault(family, {})[key] = entry


def write_json_atomically(path: Path, data: Any) -> None:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(data, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _dtype(meta: TensorMeta) -> str:
    return str(meta.dtype).removeprefix("torch.") + ("*" if meta.requires_grad else "")


def _show(arg: Any) -> str:
    if isinstance(arg, Slot):
        return f"${arg.index}"
    if isinstance(arg, tuple):
        return f"[{', '.join(_show(item) for item in arg)}]"
    return str(arg)


def _entry_to_dict(entry: OpTime) -> dict[str, Any]:
    return {
        "forward": entry.forward,
        "backward": entry.backward,
        "forward_work": [entry.forward_work.flops, entry.forward_work.num_bytes, entry.forward_work.kernels],
        "backward_work": [entry.backward_work.flops, entry.backward_work.num_bytes, entry.backward_work.kernels],
    }


def _entry_from_dict(data: dict[str, Any]) -> OpTime:
    seconds = float(data["forward"]), float(data["backward"])
    if min(seconds) < 0:
        raise ValueError(f"negative time {seconds}")
    return OpTime(*seconds, Work(*data["forward_work"]), Work(*data["backward_work"]))
