"""Sections of a cluster file: devices, links, host memory, measured tables and the device order.

Each `read_*` takes the fields of the file, or of the part around its section. It raises
ClusterError, which names the file and the field that is missing, unknown or wrong.
"""

import dataclasses
import math
from itertools import pairwise
from typing import Any

from alpa_strategy.cluster.devices import DTYPES, PRODUCT_KINDS, DeviceSpec, Host, Link
from alpa_strategy.cluster.load import Fields
from alpa_strategy.cluster.logical_mesh import COLLECTIVES, CommTable
from alpa_strategy.cluster.topology import Order
from alpa_strategy.errors import ClusterError

DEVICE_FIELDS = tuple(DeviceSpec.__dataclass_fields__)
HOST_FIELDS = tuple(Host.__dataclass_fields__)
# The last one of `intra_node` alone.
LINK_FIELDS = ("latency", "bandwidth", "hop", "links")
EXPECTED_LINK = "a section with latency (s) and bandwidth (bytes/s)"

ORDERS = ("searched", "numbered")
EXPECTED_ORDER = "searched, numbered, or a list of all ranks"


def read_device(fields: Fields, nominal: dict[str, Any] | None) -> DeviceSpec:
    """Read the section `device`; `nominal` is used if there is none. ClusterError if a field is
    missing or wrong.
    """
    device = fields.section(
        "device", DEVICE_FIELDS, f"a section with {', '.join(DEVICE_FIELDS)}", nominal
    )
    peaks = device.section(
        "peak_flops", DTYPES, "FLOP/s by dtype, for example {float16: 125e12, float32: 15.7e12}"
    )
    if not peaks.data:
        device.number("peak_flops", "FLOP/s of at least one dtype, for example {float32: 15.7e12}")
    peak_flops = []
    for dtype in peaks.data:
        peak_flops.append((dtype, peaks.number(dtype, "FLOP/s, for example 125e12")))
    return DeviceSpec(
        name=device.text("name", "the device's name"),
        memory_bytes=device.integer(
            "memory_bytes", "the device's memory in bytes, for example 16e9"
        ),
        memory_bandwidth=device.number(
            "memory_bandwidth", "bytes/s of the device's memory, for example 900e9"
        ),
        peak_flops=tuple(peak_flops),
        launch_seconds=device.number(
            "launch_seconds", "seconds to start one op, for example 5e-6", zero=True
        ),
        efficiency=device.number(
            "efficiency",
            "the share of peak that large matrix products reach, above 0 and at most 1",
            1.0,
            maximum=1.0,
        ),
        slowdown=device.number(
            "slowdown", "how much slower an op is while all devices compute, for example 1.5", 1.0
        ),
        efficiencies=_read_efficiencies(device),
        compute_units=device.integer("compute_units", "how many SMs it has", 0, minimum=0),
    )


def _read_efficiencies(device: Fields) -> tuple[tuple[str, tuple[tuple[str, float], ...]], ...]:
    """Return (kind of matmul, (dtype, share of peak)...) of a cluster file's `efficiencies`.

    Raises:
        ClusterError: a kind or dtype is unknown, or a share is no number up to 1.
    """
    expected = (
        "shares of peak by kind of product and dtype, for example {convolution: {float32: 0.5}}"
    )
    kinds = device.section("efficiencies", PRODUCT_KINDS, expected, {})
    efficiencies = []
    for kind in kinds.data:
        shares = kinds.section(kind, DTYPES, expected)
        by_dtype = []
        for dtype in shares.data:
            by_dtype.append((dtype, shares.number(dtype, expected, maximum=1.0)))
        efficiencies.append((kind, tuple(by_dtype)))
    return tuple(efficiencies)


def read_link(fields: Fields, key: str, nominal: dict[str, Any] | None) -> Link:
    """Read the section `key` (`intra_node` or `inter_node`); `nominal` is used if there is none.
    ClusterError if a field is missing or wrong.
    """
    known = LINK_FIELDS if key == "intra_node" else LINK_FIELDS[:3]
    link = fields.section(key, known, EXPECTED_LINK, nominal)
    return Link(
        latency=link.number("latency", "seconds per message, for example 10e-6", zero=True),
        bandwidth=link.number("bandwidth", "bytes/s per direction, for example 25e9"),
        hop=link.number("hop", "seconds per further device, for example 1e-6", 0.0, zero=True),
    )


def read_host(fields: Fields) -> Host | None:
    """Read the section `host`; None if there is none. ClusterError if a field is not right."""
    if "host" not in fields.data:
        return None
    host = fields.section("host", HOST_FIELDS, f"a section with {', '.join(HOST_FIELDS)}")
    return Host(
        link_bandwidth=host.number(
            "link_bandwidth", "bytes/s between a device and host memory, for example 25e9"
        ),
        memory_bytes=host.number(
            "memory_bytes", "bytes of a node's host memory that may be used, for example 1e12"
        ),
        memory_bandwidth=host.number(
            "memory_bandwidth", "bytes/s of a node's host memory, for example 200e9"
        ),
    )


def read_order(fields: Fields) -> str | Order:
    """Read the field `order`: one of `ORDERS` (the first if there is no field), or ranks (whether
    they are all is not checked); ClusterError if it is something else.
    """
    order = fields.value("order", EXPECTED_ORDER, ORDERS[0])
    if isinstance(order, list | tuple) and all(type(rank) is int for rank in order):
        return tuple(order)
    return fields.valid("order", order, order in ORDERS, EXPECTED_ORDER)


def read_table(data: Any, source: str, index: int) -> CommTable:
    """Read `data`, the entry `index` of `tables` in the file `source`.

    Raises:
        ClusterError: a field is missing or wrong; the message names it.
    """
    fields = Fields(data, ("kind", "size", "stride", "points"), source, f"tables.{index}.")
    kind = fields.text("kind", f"one of {', '.join(COLLECTIVES)}")
    points = fields.items("points", "[[bytes, seconds], ...] with bytes ascending")

    pairs: list[tuple[Any, Any]] = []
    for point in points:
        if isinstance(point, list | tuple) and len(point) == 2:
            num_bytes, seconds = point
            pairs.append((num_bytes, seconds))
    is_complete = bool(pairs) and len(pairs) == len(points)
    if kind not in COLLECTIVES or not is_complete or not _is_ascending(pairs):
        raise ClusterError(
            f"cluster file {source}: field tables.{index} holds no readable measurements of"
            f" {kind!r}",
            f"kind is one of {', '.join(COLLECTIVES)}; points are [[bytes, seconds], ...] with"
            " bytes ascending",
        )
    return CommTable(
        kind=kind,
        size=fields.integer("size", "devices in the group"),
        stride=fields.integer("stride", "distance between neighbouring ranks of the group"),
        points=tuple((int(size), float(seconds)) for size, seconds in pairs),
    )


def _is_ascending(pairs: list[tuple[Any, Any]]) -> bool:
    """Whether (bytes, seconds) are finite numbers >= 0, with bytes strictly ascending."""
    for pair in pairs:
        for number in pair:
            if not isinstance(number, int | float) or not math.isfinite(number) or number < 0:
                return False
    return all(before[0] < after[0] for before, after in pairwise(pairs))


def changed_fields(record: Any, *always: str) -> dict[str, Any]:
    """Return the fields of a dataclass by name, without those that have their default value.

    So a new field leaves the digests of other clusters as they are.

    Args:
        always: names of fields that are returned even if they have their default.
    """
    values = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name in always or value != field.default:
            values[field.name] = value
    return values
