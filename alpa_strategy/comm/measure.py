"""Measure a running job's cluster: collectives on every mesh axis, and the devices; store the
results in files.

All ranks run the same loops in the same order. Loops end by constants or by maxima over all ranks,
never by the clock of one rank. So the results are the same on all ranks.
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
# 1 KiB to 16 MiB.
SIZES_BYTES = tuple(4**exponent for exponent in range(5, 13))
ROUNDS = 8
# Of a copy to or from host memory.
HOST_BYTES = 2**27
# Share of the host memory that may be used.
HOST_SHARE = 0.9
# Smaller factors are noise.
NO_SLOWDOWN = 1.1
# `ClusterSpec.overlap` of GPUs, as in configs/clusters; it is not measured. 0 on CPUs, whose
# collectives take the cores that compute.
GPU_OVERLAP = 0.75


def measure_collectives(
    mesh: MeshComm,
    kinds: Iterable[str] = KINDS,
    sizes_bytes: Iterable[int] = SIZES_BYTES,
    budget_seconds: float = 1.5,
    device: torch.device = CPU,
    axes: Iterable[int] | None = None,
) -> list[CommTable]:
    """Measure each collective on each mesh axis, all groups of the axis at the same time.

    Axes of one device are skipped. Seconds are the slowest rank's, the best of several rounds. One
    round measures everything once, so that a burst of other load does not affect all repetitions of
    one collective. Collective: all ranks of the mesh pass the same arguments.

    Args:
        sizes_bytes: of the full tensor on the axis; larger ones are left out when half of an axis'
            budget is spent.
        budget_seconds: per axis.
        axes: of the mesh; None: all.
    """
    kinds = tuple(kinds)
    sizes = tuple(sorted(sizes_bytes))
    all_strides = strides(mesh.shape)
    tables = []
    for index in range(len(mesh.shape)) if axes is None else axes:
        axis = mesh.axes[index]
        if axis.size == 1:
            continue
        clock = _AgreedClock(mesh, device)
        best: dict[tuple[str, int], float] = {}
        # The first round warms up: connections are made lazily.
        for size in sizes:
            for kind in kinds:
                best[kind, size] = clock.time(_collective(axis, kind, size, device))
            if clock.elapsed > budget_seconds / 2 and len(best) >= 2 * len(kinds):
                break
        for round_index in range(ROUNDS):
            for kind, size in best:
                seconds = clock.time(_collective(axis, kind, size, device))
                best[kind, size] = min(best[kind, size], seconds)
            if clock.elapsed > budget_seconds and round_index > 0:
                break
        for kind in kinds:
            points = []
            for size in sizes:
                if (kind, size) in best:
                    points.append((_exact_bytes(axis.size, size), best[kind, size]))
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
    """Return the running job's cluster as a measured ClusterSpec, equal on all ranks. Collective.

    Args:
        make_mesh: logical shape -> this rank's MeshComm over all ranks of the job; called for each
            shape, in the same order on all ranks.
        folder: of stored clusters (`.alpa/costs`). The cluster is read from there if all ranks find
            it, else it is measured and stored.
        budget_seconds: per mesh axis.
    """
    shapes = factorisations(num_nodes * devices_per_node)
    full_mesh = make_mesh(shapes[0])
    backend = "nccl" if device.type == "cuda" else "gloo"
    path = stored_path(folder, device_name(device), num_nodes, devices_per_node, backend)
    stored = load_stored(path)
    (is_missing,) = _agreed_max(full_mesh, [0.0 if stored else 1.0], device)
    if is_missing == 0.0:
        assert stored is not None
        return stored
    spec = _agreed_device(full_mesh, measure_device(device, devices_per_node), device)
    spec = replace(spec, slowdown=measure_slowdown(full_mesh, device))

    # One table for each (size, stride) of an axis.
    tables: list[CommTable] = []
    measured: set[tuple[int, int]] = set()
    for shape in shapes:
        kinds_of_axes = list(zip(shape, strides(shape), strict=True))
        axes = [axis for axis, kind in enumerate(kinds_of_axes) if kind not in measured]
        if not axes or shape == (1,):
            continue
        mesh = full_mesh if shape == shapes[0] else make_mesh(shape)
        tables += measure_collectives(mesh, budget_seconds=budget_seconds, device=device, axes=axes)
        measured.update(kinds_of_axes)
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
        host=measure_host(full_mesh, device, devices_per_node),
    )
    try:
        write_json(path, cluster.to_dict())
    except OSError as error:
        # The next job will have to measure again.
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
    """Return the path of a cluster's file in `folder`.

    It depends on the arguments and PyTorch's version, not on host names, so that jobs on other
    hosts of the same kind use it as well.
    """
    key = json.dumps([device, num_nodes, devices_per_node, backend, torch.__version__])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return folder / f"cluster-{num_nodes}x{devices_per_node}-{backend}-{digest}.json"


def load_stored(path: Path) -> ClusterSpec | None:
    """Read a measured cluster; None if there is no such file, or it cannot be read (logged)."""
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
    """Return a function that runs a collective of kind `kind` on a full tensor [axis size, columns]
    of `_exact_bytes`.
    """
    n = axis.size
    full = torch.ones(n, _exact_bytes(n, size) // (4 * n), device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: axis.all_reduce(full),
        "reduce_scatter": lambda: axis.reduce_scatter(full, 0),
        "all_gather": lambda: axis.all_gather(full[:1], 0, n),
        "all_to_all": lambda: axis.all_to_all(full[:1], 0, n, 1),
    }
    return calls[kind]


class _AgreedClock:
    """Measures times that are equal on all ranks of a mesh: those of the slowest rank."""

    def __init__(self, mesh: MeshComm, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device
        # seconds since the clock was made, at the end of the last run
        self.elapsed = 0.0
        self._made = time.perf_counter()

    def time(self, run: Callable[[], object]) -> float:
        """Return the seconds of one run, the slowest rank's, and update `elapsed`. Collective; all
        ranks start it at the same time.
        """
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
    """Return the element-wise maximum over all ranks of the mesh. Collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    return mesh.all_devices.all_reduce(tensor, "max").tolist()


def measure_slowdown(mesh: MeshComm, device: torch.device = CPU, seconds: float = 0.1) -> float:
    """Measure how many times slower a device computes while all devices of the mesh do. Collective.

    Ranks may share cores, memory, or one host. 1 on GPUs, on one device, and up to `NO_SLOWDOWN`.

    Args:
        seconds: of a window over which the rate is measured. Best times would not do: ranks that
            take turns on a core are fast for moments. Ranks may start later than others by as
            much.
    """
    if device.type != "cpu" or math.prod(mesh.shape) == 1:
        return 1.0
    is_first = not any(mesh.coordinate)
    alone = 0.0
    together = 0.0
    # The better of two, so that a burst of other load does not count.
    for _ in range(2):
        rate_alone = 0.0
        if is_first:
            rate_alone = _rate(seconds)
        else:
            # Ranks that wait for others in a collective poll, which takes time on a core.
            time.sleep(2 * seconds)
        (rate_alone,) = _agreed_max(mesh, [rate_alone], device)
        alone = max(alone, rate_alone)
        # A slow network lets ranks go on tens of milliseconds apart (TCP's delayed
        # acknowledgements): they compute for longer than the window, so that all do within it.
        _agreed_max(mesh, [0.0], device)
        _rate(seconds)
        rate_together = _rate(seconds)
        _rate(seconds)
        (negative_rate,) = _agreed_max(mesh, [-rate_together], device)
        together = max(together, -negative_rate)
    slowdown = max(1.0, alone / together)
    return slowdown if slowdown > NO_SLOWDOWN else 1.0


def _rate(seconds: float) -> float:
    """Return how many matmuls of one size this process computes per second, in a window of
    `seconds`.
    """
    matrix = torch.rand(256, 256)
    count = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        matrix @ matrix
        count += 1
    return count / (time.perf_counter() - started)


def _agreed_device(mesh: MeshComm, spec: DeviceSpec, device: torch.device) -> DeviceSpec:
    """Return this rank's device with the weakest memory, memory bandwidth, peaks and launch time of
    any rank's: all ranks wait for it. Collective.

    Args:
        spec: of this rank's device.
    """
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
    """Return the link that explains the measured all-reduces; None if there are none.

    Its latency is that of the fastest small one, its bandwidth that of the best large one.

    Args:
        tables: of all mesh axes.
        across: whether it is the link between nodes (whose bandwidth all groups share), or the one
            inside nodes.
    """
    latency = float("inf")
    bandwidth = 0.0
    # With a bandwidth of 1 between nodes, and no limit inside them.
    unit_uplinks = Topology(num_nodes, devices_per_node, (0.0, math.inf), (0.0, 1.0), (), ())
    ranks = np.arange(num_nodes * devices_per_node)
    for table in tables:
        groups = (
            ranks.reshape(-1, table.size, table.stride)
            .swapaxes(1, 2)
            .reshape(-1, table.size)
            .tolist()
        )
        # Share of the uplink that a group has; infinite inside nodes.
        share = unit_uplinks.way(list(map(tuple, groups))).bandwidth
        if table.kind != "all_reduce" or math.isfinite(share) != across:
            continue
        first = min(seconds for _, seconds in table.points)
        num_bytes, seconds = table.points[-1]
        latency = min(latency, first)
        moved = volume_factor("all_reduce", table.size) * num_bytes
        # Noise can make a large message look as fast as a small one.
        bandwidth = max(bandwidth, moved / max(seconds - first, 0.05 * seconds) / min(share, 1.0))
    return Link(latency, bandwidth) if bandwidth else None
