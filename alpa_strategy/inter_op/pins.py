"""Checks of the pins of a pipeline before anything is solved: which pin cannot be met, why, and
what to do.
"""

import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate, pairwise

import numpy as np

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.flops import op_flops
from alpa_strategy.errors import OptionError, PlanError
from alpa_strategy.inter_op.mesh_options import allowed_shapes, axis_counts
from alpa_strategy.inter_op.subgraph import (
    PLAIN_LAYERS,
    boundary_bytes,
    cluster_layers,
    default_num_layers,
)
from alpa_strategy.intra_op.restrict import matching
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.options import PlanOptions
from alpa_strategy.schedules import SCHEDULES, refusal

# Of a mesh: its first device's place, and how many there are.
Place = tuple[int, int]


def check_pins(step: StepGraph, cluster: ClusterSpec, options: PlanOptions) -> None:
    """Check that the pinned stages, schedule, micro-batches and meshes are possible together here.

    Raises:
        OptionError: a pattern of `placements` or `device_map` matches no parameter of the step, or
            `stages` do not split it (`stage_cuts`).
        PlanError: they are not. With `num_stages=1` only `device_map` is checked.
    """
    check_placements(step, cluster, options)
    stage_cuts(step, options.stages)
    wanted = options.num_stages
    schedule = options.schedule
    count = options.num_microbatches
    if wanted == 1:
        return
    most = sum(1 for op in step.ops if op.operands)
    if wanted is not None and wanted > most:
        raise PlanError(
            f"num_stages={wanted}, but training_step has only {most} ops, and a stage holds at"
            " least one",
            f"ask for at most {most} stages, or leave num_stages out",
        )
    possible = _possible(cluster, options)
    numbers = sorted({n for pairs in possible.values() for n, _ in pairs})
    if not numbers or (wanted is not None and wanted not in numbers):
        raise _no_such_stages(cluster, options, numbers)
    if numbers[0] > most:
        raise PlanError(
            f"schedule={schedule!r} has at least {numbers[0]} stages on {_where(cluster, options)},"
            " but training_step "
            f"has only {most} ops, and a stage holds at least one",
            "use the schedule 1F1B or GPipe",
        )
    if schedule is None or count is None:
        return
    meshes = {ranks for n, ranks in possible[schedule] if wanted in (None, n)}
    reasons = {refusal(schedule, ranks, count) for ranks in sorted(meshes)}
    if reasons and None not in reasons:
        raise PlanError(
            f"num_microbatches={count} cannot be met: {'; '.join(sorted(filter(None, reasons)))}",
            "leave num_microbatches out to have it solved, or use another schedule, such as 1F1B",
        )


def stage_cuts(step: StepGraph, stages: Sequence[str]) -> tuple[int, ...]:
    """Return the op indices at which `PlanOptions.stages` splits the step, both ends included; ()
    if no stages are pinned.

    Between the modules of two stages, it is the index with the fewest crossing bytes; of equals the
    last.

    Raises:
        OptionError: a name without ops, or a stage whose ops do not all run after those of the
            stage before it.
    """
    if not stages:
        return ()
    # Module -> its ops, those of its submodules included.
    ops_of: dict[str, list[int]] = {}
    for index, op in enumerate(step.ops):
        for module in accumulate(op.module.split("."), "{}.{}".format):
            ops_of.setdefault(module, []).append(index)
    spans = []
    for text in stages:
        ops = [i for name in _module_names(text) for i in _ops_of(name, ops_of, text)]
        spans.append((min(ops), max(ops) + 1))
    bytes_at, cuts = boundary_bytes(step), [0]
    for ((_, end), (start, _)), (text, other) in zip(
        pairwise(spans), pairwise(stages), strict=True
    ):
        if start < end:
            raise OptionError(
                f"stages: {other!r} does not run after {text!r}: {step.ops[start].name} of"
                f" {step.ops[start].module} "
                f"comes before {step.ops[end - 1].name} of {step.ops[end - 1].module}",
                "name modules in the order in which training_step calls them, each in one stage",
            )
        cuts.append(min(range(start, end - 1, -1), key=bytes_at.__getitem__))
    return (*cuts, len(step.ops))


def layers_of(
    step: StepGraph, cluster: ClusterSpec, options: PlanOptions
) -> tuple[tuple[int, ...], tuple[frozenset[Place], ...]]:
    """Return the op indices that split the step into layers, and per layer the meshes to which
    `options.device_map` pins the parameters that it reads.

    There are as many layers as there may be stages, and a split at every index that a pin requires.
    A parameter that several modules share is pinned where it is used under the pinned name. A model
    of few blocks is also split as for one stage on every device, or on every equal mesh.

    Raises:
        OptionError, PlanError: as of `stage_cuts` and `pinned_places`.
    """
    # Stages that the options allow; they are possible (`check_pins`).
    least = options.num_stages or 1
    if options.num_stages is None and options.schedule is not None:
        least = min(n for n, _ in _possible(cluster, options)[options.schedule])
    count = max(least, min(default_num_layers(step), len(step.ops)))
    cuts = {*cluster_layers(step, count), *stage_cuts(step, options.stages)}
    is_open = options.num_stages is None and not options.stages and not options.device_map
    if is_open:
        for number in _regular_numbers(step, cluster, count):
            cuts.update(cluster_layers(step, number))

    bytes_at = boundary_bytes(step)
    readers = _pinned_readers(step, pinned_places(step, cluster, options))
    for (end, places), (start, next_places) in pairwise(readers):
        if places != next_places:
            cuts.add(min(range(start, end, -1), key=bytes_at.__getitem__))

    all_cuts = tuple(sorted(cuts))
    places_of_layers = []
    for first, last in pairwise(all_cuts):
        of_layer: set[Place] = set()
        for op, places in readers:
            if first <= op < last:
                of_layer |= places
        places_of_layers.append(frozenset(of_layer))
    return all_cuts, tuple(places_of_layers)


def _regular_numbers(step: StepGraph, cluster: ClusterSpec, num_layers: int) -> list[int]:
    """Return the numbers of stages on equal meshes, one on each, for which `num_layers` are too
    few: up to as many as a model without blocks has layers.
    """
    most = min(PLAIN_LAYERS, sum(op_flops(op.call) > 0 for op in step.ops))
    numbers = range(num_layers + 1, min(most, cluster.num_devices) + 1)
    return [number for number in numbers if cluster.num_devices % number == 0]


def _pinned_readers(
    step: StepGraph, places: Mapping[str, Place]
) -> list[tuple[int, frozenset[Place]]]:
    """Return, per op that reads parameters, (its index, the meshes to which they are pinned): none
    for an op whose parameters are all free.

    A parameter with several names counts under the names in the op's module, if it has one there.

    Args:
        places: of `pinned_places`; if empty, so is the result.
    """
    if not places:
        return []
    names_of_value = {p.value: p.names for p in step.parameters}
    readers = []
    for index, op in enumerate(step.ops):
        read = [names_of_value[value] for value in op.operands if value in names_of_value]
        if not read:
            continue
        pinned = set()
        for names in read:
            in_module = [name for name in names if name.rpartition(".")[0] == op.module]
            for name in in_module or names:
                if name in places:
                    pinned.add(places[name])
        readers.append((index, frozenset(pinned)))
    return readers


def pinned_places(step: StepGraph, cluster: ClusterSpec, options: PlanOptions) -> dict[str, Place]:
    """Return, per name of a parameter in `options.device_map`, its mesh by the last pattern that
    matches: (position of the first device in the cluster's order, number of devices).

    Raises:
        OptionError: a pattern matches no parameter.
        PlanError: the devices are no mesh that a stage can have.
    """
    names = {name: name for parameter in step.parameters for name in parameter.names}
    D = cluster.num_devices
    meshes = submeshes(cluster)
    mesh_of_name: dict[str, Place] = {}
    ranks_in_order = cluster.ranks_of(0, D) or range(D)
    order = {rank: place for place, rank in enumerate(ranks_in_order)}
    fits = stage_fits(cluster, meshes)
    for pattern, ranks in options.device_map:
        places = sorted(order.get(rank, D) for rank in ranks)
        first, count = places[0], len(places)
        sizes = [
            math.prod(mesh)
            for mesh, may_begin in zip(meshes, fits[D - first], strict=True)
            if may_begin
        ]
        if places[-1] - first + 1 != count or count not in sizes:
            raise PlanError(
                f"device_map[{pattern!r}]={list(ranks)} is no mesh that a stage can have on devices"
                f" 0 to {D - 1}",
                f"name {_short(sizes) or 'some'} neighbours from one on: a part of a node, or whole"
                " nodes",
            )
        mesh_of_name |= dict.fromkeys(matching(pattern, names, "device_map"), (first, count))
    return mesh_of_name


def _module_names(text: str) -> list[str]:
    """Return the module names of a text: `embed, blocks.0-2` -> embed, blocks.0, blocks.1,
    blocks.2.

    Ranges may also be written as plans are displayed: `blocks.0-blocks.2`. Empty items are skipped;
    names are not checked.

    Raises:
        OptionError: a range counts down.
    """
    names = []
    for name in filter(None, map(str.strip, text.split(","))):
        if numbered := re.fullmatch(r"(.+\.)(\d+)-(?:\1)?(\d+)", name):
            first, last = int(numbered[2]), int(numbered[3])
            if last < first:
                raise OptionError(
                    f"stages: {name!r} counts down", f"write {numbered[1]}{last}-{first}"
                )
            names += [f"{numbered[1]}{i}" for i in range(first, last + 1)]
        else:
            names.append(name)
    return names


def _ops_of(name: str, ops_of: dict[str, list[int]], text: str) -> list[int]:
    """Return the indices of the ops of a module.

    Args:
        name: path of the module.
        ops_of: path -> indices.
        text: the pin, for the error.

    Raises:
        OptionError: no op runs in it.
    """
    if name in ops_of:
        return ops_of[name]
    near = [known for known in ops_of if known.endswith("." + name)] or get_close_matches(
        name, ops_of, n=3
    )
    raise OptionError(
        f"stages: no op of training_step runs in a module {name!r} (of {text!r})",
        "write " + " or ".join(near[:3] or list(ops_of)[:3]) + ", names as in named_modules()",
    )


def check_placements(step: StepGraph, cluster: ClusterSpec, options: PlanOptions) -> None:
    """Check that every pattern of `placements` and `device_map` matches a parameter.

    Raises:
        OptionError: a pattern matches none.
        PlanError: see `pinned_places`.
    """
    pinned_places(step, cluster, options)
    names = {alias: parameter.name for parameter in step.parameters for alias in parameter.names}
    for pattern, _ in options.placements:
        matching(pattern, names)


def logical_shapes(options: PlanOptions, cluster: ClusterSpec) -> list[tuple[int, ...]]:
    """Return the logical meshes over all devices that pins allow: the pinned one, or all that have
    the pinned number of axes.

    Raises:
        PlanError: there are none.
    """
    if options.logical_mesh is not None:
        size = math.prod(options.logical_mesh)
        if size != cluster.num_devices:
            raise PlanError(
                f"logical_mesh={options.logical_mesh} has {size} devices, the cluster"
                f" {cluster.num_devices}",
                "choose a shape whose product is the number of devices",
            )
        return [tuple(options.logical_mesh)]
    fitting = list(allowed_shapes(cluster, options))
    if not fitting:
        counts = sorted(axis_counts(options))
        raise PlanError(
            f"placements and parallel name {counts} mesh axes; {cluster.num_devices} devices allow"
            " the logical "
            f"meshes {cluster.logical_shapes()}",
            "give every pin one mode per axis of one of these, or set logical_mesh",
        )
    return fitting


def _possible(cluster: ClusterSpec, options: PlanOptions) -> dict[str, list[tuple[int, int]]]:
    """Return, per allowed schedule, the (number of stages, number of meshes) that are possible on
    the devices, ascending; without one stage if the schedule is pinned.
    """
    sizes = sorted(
        {math.prod(mesh) for mesh in submeshes(cluster) if allowed_shapes(cluster, options, mesh)}
    )
    schedules = [options.schedule] if options.schedule else SCHEDULES
    possible = {name: _stages_and_meshes(name, cluster.num_devices, sizes) for name in schedules}
    # One stage has none.
    if options.schedule:
        return {
            name: [(n, ranks) for n, ranks in numbers if n > 1]
            for name, numbers in possible.items()
        }
    return possible


def _stages_and_meshes(
    schedule: str, num_devices: int, sizes: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the (number of stages, number of meshes) of a schedule on meshes that use all devices,
    each with one of `sizes`; ascending. Of schedules with equal meshes, only with several of these.
    """
    if not SCHEDULES[schedule].has_one_stage_per_mesh:
        ranks = {num_devices // size for size in sizes if num_devices % size == 0}
        return sorted(
            (n * v, n) for n in ranks if n > 1 for v in SCHEDULES[schedule].stages_per_mesh
        )
    # [devices]: bit n is set if n meshes can have that number
    numbers = [1] + [0] * num_devices
    for devices in range(1, num_devices + 1):
        for size in sizes:
            if size <= devices:
                numbers[devices] |= numbers[devices - size] << 1
    return [(n, n) for n in range(1, num_devices + 1) if numbers[num_devices] >> n & 1]


def _where(cluster: ClusterSpec, options: PlanOptions) -> str:
    """Return a text that names the devices, and what is pinned of their meshes."""
    where = f"{cluster.num_devices} device{'s' * (cluster.num_devices != 1)}"
    if options.logical_mesh is not None:
        return f"{where} with logical_mesh={list(options.logical_mesh)}"
    counts = sorted({len(modes.split()) for _, modes in options.placements})
    if counts in ([], [1]):
        return where
    return f"{where} with placements for meshes of {' and '.join(map(str, counts))} axes"


def _no_such_stages(cluster: ClusterSpec, options: PlanOptions, possible: list[int]) -> PlanError:
    """Return the error if the options allow no number of stages.

    Args:
        possible: the numbers of stages that the other options allow.
    """
    wanted = options.num_stages
    schedule = options.schedule
    where = _where(cluster, options)
    request = (
        f"num_stages={wanted}"
        if wanted is not None
        else "a pipeline"
        if schedule is None
        else "this"
    )
    others = ["num_stages"] * (wanted is not None) + ["schedule"] * (schedule is not None)
    others += ["logical_mesh"] * (options.logical_mesh is not None) + ["placements"] * (
        " placements " in where
    )
    if possible:
        fix = f"ask for one of {_short(possible)}, or leave {' or '.join(others)} out"
    else:
        has_one = schedule in SCHEDULES and SCHEDULES[schedule].has_one_stage_per_mesh
        fix = "use more devices" if has_one else "use the schedule 1F1B or GPipe, or more devices"
        fix += (
            f", or leave {others[-1]} out"
            if others[-1:] in (["logical_mesh"], ["placements"])
            else ""
        )
    if schedule is None:
        return PlanError(f"{request} cannot be met on {where} by any schedule", fix)
    counts = " or ".join(map(str, SCHEDULES[schedule].stages_per_mesh))
    return PlanError(
        f"{request} cannot be met by schedule={schedule!r} on {where}: it puts {counts}"
        f" stage{'s' * (counts != '1')} on each "
        "mesh" + ("" if counts == "1" else ", and all meshes are of one size"),
        fix,
    )


def _short(numbers: list[int]) -> str:
    """Return numbers as text; of more than eight, the first six and the last."""
    if len(numbers) > 8:
        return f"{', '.join(map(str, numbers[:6]))}, ..., {numbers[-1]}"
    return ", ".join(map(str, numbers))


# --- The submeshes that a stage may have: parts of one node, or whole nodes (Alpa, section 5.2).


# Nodes, or devices of a single node, of which every number is tried.
FEW = 4


def submeshes(cluster: ClusterSpec) -> tuple[tuple[int, int], ...]:
    """Return the submeshes that stages may have, (nodes, devices per node), ascending.

    Within a node these are powers of two and divisors of its devices; else k full nodes. On one
    node of few devices every number is tried (1 + 3); of many nodes, powers of two and divisors.
    """
    nodes, per_node = cluster.num_nodes, cluster.devices_per_node
    inside = _sizes(per_node, all_sizes=nodes == 1 and per_node <= FEW)
    across = _sizes(nodes, all_sizes=nodes <= FEW)
    in_a_node = [(1, size) for size in inside]
    of_nodes = [(num_nodes, per_node) for num_nodes in across if num_nodes > 1]
    return (*in_a_node, *of_nodes)


def stage_fits(cluster: ClusterSpec, candidates: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Return [devices left, submesh] whether a stage may start there if stages take devices in
    order.

    A submesh within a node must not cross nodes, and full nodes start at a node. So ranges are
    contiguous, and links are as priced.

    Args:
        candidates: (nodes, devices per node) of each submesh.
    """
    left, (nodes, devices) = np.arange(cluster.num_devices + 1)[:, None], np.array(candidates).T
    # In the stage's first node.
    offset = (cluster.num_devices - left) % cluster.devices_per_node
    return (left > 0) & np.where(
        nodes > 1, offset == 0, offset + devices <= cluster.devices_per_node
    )


def _sizes(limit: int, all_sizes: bool) -> list[int]:
    """Return sizes of a submesh up to `limit`, ascending: all, or powers of two and divisors."""
    if all_sizes:
        return list(range(1, limit + 1))
    sizes = []
    for size in range(1, limit + 1):
        is_power_of_two = size & (size - 1) == 0
        if limit % size == 0 or is_power_of_two:
            sizes.append(size)
    return sizes
