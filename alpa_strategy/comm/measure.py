"""Measuring a running job's cluster: collectives on every mesh axis, the devices, and files that
keep the findings.

All ranks go through the same loops in the same order: every count is a constant or agreed on by a
maximum over the ranks, never by one rank's clock. What comes out is therefore the same on all
ranks.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch

from alpa_strategy.cluster.devices import DeviceSpec, Host, Link
from alpa_strategy.cluster.logical_mesh import (
    CommTable,
    factorisations,
    strides,
    volume_factor,
    without_outliers,
)
from alpa_strategy.cluster.spec import NOMINAL, ClusterSpec
from alpa_strategy.cluster.topology import Topology
from alpa_strategy.comm.mesh import AxisComm, MeshComm
from alpa_strategy.cost.measured import device_name, measure_device
from alpa_strategy.errors import ClusterError
from alpa_strategy.files import read_json, write_json

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES_BYTES = tuple(4**exponent for exponent in range(5, 13))  # 1 KiB .. 16 MiB
ROUNDS = 8
HOST_BYTES, HOST_SHARE = 2**27, 0.9  # of a copy that times the way; of host memory that may be used
NO_SLOWDOWN = 1.1  # up to here it is noise
# That of the GPUs in configs/clusters, not measured; on CPUs collectives take the cores that
# compute.
GPU_OVERLAP = 0.75


def measure_collectives(
    mesh: MeshComm,
    kinds: Iterable[str] = KINDS,
    sizes_bytes: Iterable[int] = SIZES_BYTES,
    budget_seconds: float = 1.5,
    device: torch.device = CPU,
    axes: Iterable[int] | None = None,
) -> list[CommTable]:
    """Time each collective on each mesh axis (of more than one device), all groups of the axis at
    the same time.

    Seconds are the slowest rank's, the best of several rounds: one round times everything once, so
    that a burst of other load does not spoil all the repetitions of one collective. Sizes are those
    of the full tensor on the axis; larger ones are left out when half of an axis' budget is spent.
    All ranks of the mesh call this alike.
    """
    kinds, sizes = tuple(kinds), tuple(sorted(sizes_bytes))
    all_strides = strides(mesh.shape)
    tables = []
    for index in range(len(mesh.shape)) if axes is None else axes:
        axis = mesh.axes[index]
        if axis.size == 1:
            continue
        clock = _AgreedClock(mesh, device)
        best: dict[tuple[str, int], float] = {}
        for size in sizes:  # the first round warms up: connections are made lazily
            for kind in kinds:
                best[kind, size] = clock.time(_collective(axis, kind, size, device))
            if clock.elapsed > budget_seconds / 2 and len(best) >= 2 * len(kinds):
                break
        for round_index in range(ROUNDS):
            for kind, size in best:
                best[kind, size] = min(
                    best[kind, size], clock.time(_collective(axis, kind, size, device))
                )
            if clock.elapsed > budget_seconds and round_index > 0:
                break
        for kind in kinds:
            points = [
                (_exact_bytes(axis.size, size), best[kind, size])
                for size in sizes
                if (kind, size) in best
            ]
            tables.append(CommTable(kind, axis.size, all_strides[index], without_outliers(points)))
    return tables


def measure_cluster(
    num_nodes: int,
    devices_per_node: int,
    make_mesh: Callable[[tuple[int, ...]], MeshComm],
    folder: Path,
    device: torch.device = CPU,
    budget_seconds: float = 1.0,
) -> ClusterSpec:
    """The running job's cluster as a measured ClusterSpec, equal on all ranks.

    Args:
        make_mesh: logical shape -> this rank's MeshComm over the whole job; called for each shape
            on all ranks alike.
        folder: of stored ones (`.alpa/costs`): this one is read there where every rank finds it,
            else written.
        budget_seconds: per mesh axis.
    """
    shapes = factorisations(num_nodes * devices_per_node)
    whole = make_mesh(shapes[0])
    backend = "nccl" if device.type == "cuda" else "gloo"
    path = stored_path(folder, device_name(device), num_nodes, devices_per_node, backend)
    found = load_stored(path)
    if _agreed_max(whole, [0.0 if found else 1.0], device)[0] == 0.0:
        assert found is not None
        return found
    spec = _agreed_device(whole, measure_device(device, devices_per_node), device)
    spec = replace(spec, slowdown=measure_slowdown(whole, device))
    tables: list[CommTable] = []
    done: set[tuple[int, int]] = set()
    for shape in shapes:
        axes = [
            a for a, key in enumerate(zip(shape, strides(shape), strict=True)) if key not in done
        ]
        if not axes or shape == (1,):
            continue
        mesh = whole if shape == shapes[0] else make_mesh(shape)
        tables += measure_collectives(mesh, budget_seconds=budget_seconds, device=device, axes=axes)
        done.update(zip(shape, strides(shape), strict=True))
    cluster = ClusterSpec(
        name="this cluster",
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=spec,
        intra_node=_fit_link(tables, num_nodes, devices_per_node, across=False)
        or NOMINAL.intra_node,
        inter_node=_fit_link(tables, num_nodes, devices_per_node, across=True)
        or NOMINAL.inter_node,
        tables=tuple(tables),
        measured=True,
        overlap=0.0 if device.type == "cpu" else GPU_OVERLAP,
        host=measure_host(whole, device, devices_per_node),
    )
    try:
        write_json(path, cluster.to_dict())
    except OSError as error:  # costs the next job its time, not this one
        logger.warning("cluster measurements cannot be stored in %s: %s", path, error)
    return cluster


def measure_host(mesh: MeshComm, device: torch.device, devices_per_node: int) -> Host | None:
    """Measure the nodes' host memory and the link to it, while all devices use it at once, as in a
    step. Collective.

    None on CPUs.
    """
    if device.type != "cuda":
        return None
    pinned = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(pinned, device=device)
    on_host = torch.empty_like(pinned)
    clock = _AgreedClock(mesh, device)
    to_device = to_host = within_host = math.inf
    for _ in range(ROUNDS):
        to_device = min(to_device, clock.time(lambda: on_device.copy_(pinned)))
        to_host = min(to_host, clock.time(lambda: pinned.copy_(on_device)))
        within_host = min(within_host, clock.time(lambda: on_host.copy_(pinned)))
    # The smallest memory of all hosts.
    (memory,) = _agreed_max(mesh, [-psutil.virtual_memory().total * HOST_SHARE], device)
    return Host(
        link_bandwidth=HOST_BYTES / max(to_device, to_host),
        memory_bytes=-memory,
        # Read and written.
        memory_bandwidth=2 * HOST_BYTES * devices_per_node / within_host,
    )


def stored_path(
    folder: Path, device: str, num_nodes: int, devices_per_node: int, backend: str
) -> Path:
    """The file of such a cluster. Host names do not count: the next job on such machines need not
    measure again.
    """
    key = json.dumps([device, num_nodes, devices_per_node, backend, torch.__version__])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return folder / f"cluster-{num_nodes}x{devices_per_node}-{backend}-{digest}.json"


def load_stored(path: Path) -> ClusterSpec | None:
    """The measured cluster in a file; None when there is none that can be read."""
    if not path.exists():
        return None
    try:
        return ClusterSpec.from_dict(read_json(path), str(path))
    except (OSError, ValueError, ClusterError) as error:
        logger.warning(
            "cluster measurements in %s cannot be used (%s): measuring again", path, error
        )
        return None


def _exact_bytes(n: int, size: int) -> int:
    """Bytes of a float32 tensor [n, multiple of n] of about `size` bytes."""
    return 4 * n * n * max(1, round(size / (4 * n * n)))


def _collective(axis: AxisComm, kind: str, size: int, device: torch.device) -> Callable[[], object]:
    """A call of `kind` on a full tensor [axis size, columns] of `_exact_bytes`."""
    n = axis.size
    whole = torch.ones(n, _exact_bytes(n, size) // (4 * n), device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: axis.all_reduce(whole),
        "reduce_scatter": lambda: axis.reduce_scatter(whole, 0),
        "all_gather": lambda: axis.all_gather(whole[:1], 0, n),
        "all_to_all": lambda: axis.all_to_all(whole[:1], 0, n, 1),
    }
    return calls[kind]


class _AgreedClock:
    """Times on which all ranks of a mesh agree: each is the slowest rank's. `elapsed`: seconds
    since it was made.
    """

    def __init__(self, mesh: MeshComm, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self.elapsed = 0.0
        self._made = time.perf_counter()

    def time(self, run: Callable[[], object]) -> float:
        """Seconds of one run. The agreement before it makes all ranks start together."""
        _agreed_max(self.mesh, [0.0], self.device)
        started = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        seconds, self.elapsed = _agreed_max(
            self.mesh, [now - started, now - self._made], self.device
        )
        return seconds


def _agreed_max(mesh: MeshComm, values: list[float], device: torch.device) -> list[float]:
    """Element-wise maximum over all ranks of the mesh."""
    return mesh.whole.all_reduce(
        torch.tensor(values, dtype=torch.float64, device=device), "max"
    ).tolist()


def measure_slowdown(mesh: MeshComm, device: torch.device = CPU, seconds: float = 0.1) -> float:
    """How much slower a device computes while all of the mesh do: ranks may share cores, memory, or
    one machine.

    Rates over a whole window each, not best times: ranks that take turns on a core are fast for
    moments. 1 on GPUs.
    """
    if device.type != "cpu" or math.prod(mesh.shape) == 1:
        return 1.0
    matrix = torch.rand(256, 256)

    def rate() -> float:
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            matrix @ matrix
            count += 1
        return count / (time.perf_counter() - started)

    first = not any(mesh.coordinate)  # one device alone, then all together
    alone, together = 0.0, 0.0
    for _ in range(2):  # the better of two: a burst of other load passes
        alone = max(alone, _agreed_max(mesh, [rate() if first else 0.0], device)[0])
        _agreed_max(mesh, [0.0], device)
        together = max(together, -_agreed_max(mesh, [-rate()], device)[0])
    found = max(1.0, alone / together)
    return found if found > NO_SLOWDOWN else 1.0


def _agreed_device(mesh: MeshComm, spec: DeviceSpec, device: torch.device) -> DeviceSpec:
    """The weakest of the ranks' devices in every figure: all wait for it."""
    dtypes = [dtype for dtype, _ in spec.peak_flops]
    rates = [spec.memory_bytes, spec.memory_bandwidth, *(peak for _, peak in spec.peak_flops)]
    launch, *agreed = _agreed_max(mesh, [spec.launch_seconds, *(-rate for rate in rates)], device)
    memory, bandwidth, *peaks = [-value for value in agreed]
    flops = tuple(zip(dtypes, peaks, strict=True))
    return replace(
        spec,
        memory_bytes=int(memory),
        memory_bandwidth=bandwidth,
        peak_flops=flops,
        launch_seconds=launch,
    )


def _fit_link(
    tables: list[CommTable], num_nodes: int, devices_per_node: int, *, across: bool
) -> Link | None:
    """Latency and bandwidth of the link that explain the measured all-reduces, across nodes or
    inside them.

    Latency is the fastest small one's; bandwidth (across: the whole node's, for all groups) the
    best large one's.
    """
    latency, bandwidth = float("inf"), 0.0
    one_way_out = Topology(num_nodes, devices_per_node, (0.0, math.inf), (0.0, 1.0), (), ())
    ranks = np.arange(num_nodes * devices_per_node)
    for table in tables:
        groups = (
            ranks.reshape(-1, table.size, table.stride)
            .swapaxes(1, 2)
            .reshape(-1, table.size)
            .tolist()
        )
        share = one_way_out.way(
            list(map(tuple, groups))
        ).bandwidth  # of it that a group has; inf inside of nodes
        if table.kind != "all_reduce" or math.isfinite(share) != across:
            continue
        first, (num_bytes, seconds) = min(time for _, time in table.points), table.points[-1]
        latency = min(latency, first)
        moved = volume_factor("all_reduce", table.size) * num_bytes
        # Noise can make a large message look as fast as a small one.
        bandwidth = max(bandwidth, moved / max(seconds - first, 0.05 * seconds) / min(share, 1.0))
    return Link(latency, bandwidth) if bandwidth else None
